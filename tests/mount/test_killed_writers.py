"""How a writer ends decides what is left of what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import MIB, Actor, Daemon, elsewhere, noise, wait_until

DEADLY = [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]


def half_written(path: Path) -> Iterator[Any]:
    with open(path, "wb", buffering=0) as file:
        file.write(noise(1, MIB))
        yield None
        yield None


@pytest.mark.parametrize("number", DEADLY)
def test_killed_writer_leaves_nothing(shared: Daemon, place: Path, number: signal.Signals) -> None:
    path = place / "block"
    discarded = shared.stats()["counters"]["discarded"]
    with Actor(lambda: half_written(path)) as writer:
        writer.step()
        assert writer.end(number) == -number
    wait_until(lambda: shared.stats()["counters"]["discarded"] == discarded + 1)
    assert not path.exists()
    assert os.listdir(place) == []


def test_killed_writer_leaves_the_old_generation(shared: Daemon, place: Path) -> None:
    path = place / "block"
    path.write_bytes(b"old")
    discarded = shared.stats()["counters"]["discarded"]
    with Actor(lambda: half_written(path)) as writer:
        writer.step()
        writer.end(signal.SIGKILL)
    wait_until(lambda: shared.stats()["counters"]["discarded"] == discarded + 1)
    assert path.read_bytes() == b"old"


def test_killed_writer_with_threads_leaves_nothing(shared: Daemon, place: Path) -> None:
    path = place / "block"
    discarded = shared.stats()["counters"]["discarded"]

    def play() -> Iterator[Any]:
        ready, never = threading.Event(), threading.Event()

        def write() -> None:
            with open(path, "wb", buffering=0) as file:
                file.write(b"half")
                ready.set()
                never.wait()

        threading.Thread(target=write, daemon=True).start()
        ready.wait()
        yield None

    with Actor(play) as writer:
        writer.step()
        writer.end(signal.SIGTERM)
    wait_until(lambda: shared.stats()["counters"]["discarded"] == discarded + 1)
    assert not path.exists()


def test_process_that_exits_without_closing_publishes(place: Path) -> None:
    path = place / "block"
    with Actor(lambda: half_written(path)) as writer:
        writer.step()
        assert not path.exists()
        assert writer.end() == 0
    assert path.read_bytes() == noise(1, MIB)


def test_interpreter_that_exits_with_threads_publishes(place: Path) -> None:
    path = place / "block"
    code = (
        "import os, sys, threading\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o644)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "os.write(fd, b'content')\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == 3
    assert path.read_bytes() == b"content"


def test_writer_killed_after_it_published_by_rename_leaves_the_block(place: Path) -> None:
    temporary, final = place / "b.tmp", place / "b"

    def play() -> Iterator[Any]:
        with open(temporary, "wb", buffering=0) as file:
            file.write(b"whole")
            os.rename(temporary, final)
            yield None
            yield None

    with Actor(play) as writer:
        writer.step()
        writer.end(signal.SIGKILL)
    assert final.read_bytes() == b"whole"
    wait_until(lambda: os.getxattr(final, "user.ctx.state") == b"sealed")


def test_writer_killed_while_a_child_holds_its_descriptor_leaves_nothing(
    shared: Daemon, place: Path
) -> None:
    path = place / "block"
    discarded = shared.stats()["counters"]["discarded"]
    children: list[int] = []

    def play() -> Iterator[Any]:
        with open(path, "wb", buffering=0) as file:
            file.write(b"half")
            pid = os.fork()
            if pid == 0:
                signal.pause()
            yield pid
            yield None

    with Actor(play) as writer:
        children.append(writer.step())
        writer.end(signal.SIGKILL)
    assert not path.exists()
    os.kill(children[0], signal.SIGTERM)
    wait_until(lambda: shared.stats()["counters"]["discarded"] == discarded + 1)
    assert not path.exists()


def test_interrupted_writer_leaves_nothing_of_a_shell_redirection(
    shared: Daemon, place: Path
) -> None:
    path = place / "block"
    discarded = shared.stats()["counters"]["discarded"]
    with subprocess.Popen(["sh", "-c", f"exec yes > '{path}'"]) as process:
        wait_until(lambda: shared.stats()["blocks"]["writing"] > 0)
        process.send_signal(signal.SIGINT)
    wait_until(lambda: shared.stats()["counters"]["discarded"] == discarded + 1)
    assert not path.exists()


def test_killed_writers_give_their_room_back(shared: Daemon, place: Path) -> None:
    # LMCache#4980: buffers of a crashed engine are kept
    path = place / "block"
    path.write_bytes(b"x")
    wait_until(lambda: os.getxattr(path, "user.ctx.state") == b"sealed")
    before = shared.stats()["tiers"]["hot"]["used_bytes"]
    for _ in range(20):
        with Actor(lambda: half_written(place / "other")) as writer:
            writer.step()
            writer.end(signal.SIGKILL)
    wait_until(lambda: shared.stats()["tiers"]["hot"]["used_bytes"] <= before + 64 * 1024)
    assert shared.stats()["blocks"]["writing"] == 0
    assert elsewhere(lambda: os.listdir(place)) == ["block"]


def test_killed_readers_leave_no_lease(shared: Daemon, place: Path) -> None:
    path = place / "block"
    path.write_bytes(noise(2, MIB))

    def play() -> Iterator[Any]:
        with open(path, "rb") as file:
            file.read(10)
            yield None
            yield None

    for _ in range(10):
        with Actor(play) as reader:
            reader.step()
            reader.end(signal.SIGKILL)

    def leases() -> int:
        return int(json.loads(os.getxattr(path, "user.ctx.story"))["open"])

    wait_until(lambda: leases() == 0)
