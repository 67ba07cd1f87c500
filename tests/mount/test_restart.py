"""Ends of the daemon, wanted and unwanted, and what the next one finds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import MIB, Actor, Daemon, is_mounted, noise, wait_until

STATE_WHEN_STOPPED = {"daemon.pid"}


def physical_bytes(daemon: Daemon) -> int:
    """What du says of the hot blocks."""
    blocks = daemon.state / "hot" / "blocks"
    return sum(path.stat().st_blocks * 512 for path in blocks.iterdir())


def check_accounting(daemon: Daemon) -> None:
    hot = daemon.stats()["tiers"]["hot"]
    room = daemon.state / "hot"
    journal = (room / "journal").stat().st_blocks * 512
    session = room / "session"
    beside = session.stat().st_blocks * 512 if session.exists() else 0
    expected = physical_bytes(daemon) + beside + journal + max(journal, MIB)
    assert hot["used_bytes"] == expected


def story(daemon: Daemon, key: str) -> dict[bytes | str, bytes]:
    path = daemon.mount / key
    changing = {"user.ctx.idle", "user.ctx.ttl", "user.ctx.hits"}
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name not in changing}


def test_killed_daemon_finds_its_sealed_blocks_again_with_everything(hot_only: Daemon) -> None:
    # LMCache#562, LMCache#2273: the index is lost, the files are orphans
    contents = {f"block{n}": noise(n, n * 70_001) for n in range(20)}
    (hot_only.mount / "dir" / "sub").mkdir(parents=True)
    contents |= {f"dir/sub/{n}": noise(n, 5000) for n in range(5)}
    (hot_only.mount / "empty-dir").mkdir(mode=0o750)
    for key, content in contents.items():
        hot_only.put(key, content)
        hot_only.wait_sealed(key)
    path = hot_only.mount / "block7"
    os.setxattr(path, "user.binary", bytes(range(256)))
    os.setxattr(hot_only.mount / "dir", "user.on-directory", b"x")
    hot_only.set("block7", "ttl", "1h")
    hot_only.set("block7", "pin", "1")
    hot_only.set("block7", "parent", "block6")
    hot_only.set("block7", "dtype", "bf16")
    hot_only.set("dir", "ttl", "2h")
    os.chmod(path, 0o640)
    os.chown(path, 12, 34)
    os.utime(path, ns=(5 * 10**18 // 3, 10**18))
    os.rename(hot_only.mount / "block8", hot_only.mount / "renamed")
    contents["renamed"] = contents.pop("block8")
    (hot_only.mount / "block9").unlink()
    del contents["block9"]
    before = {key: (story(hot_only, key), (hot_only.mount / key).stat()) for key in contents}

    hot_only.crash()

    for key, content in contents.items():
        stat_before, stat_after = before[key][1], (hot_only.mount / key).stat()
        assert story(hot_only, key) == before[key][0]
        for field in ("st_ino", "st_mode", "st_uid", "st_gid", "st_size", "st_blocks"):
            assert getattr(stat_after, field) == getattr(stat_before, field)
        assert stat_after.st_mtime_ns == stat_before.st_mtime_ns
        assert (hot_only.mount / key).read_bytes() == content
    assert 3590 < float(hot_only.get("block7", "ttl")) <= 3600
    assert hot_only.get("dir", "ttl") == "7200.000"
    assert os.getxattr(hot_only.mount / "dir", "user.on-directory") == b"x"
    assert (hot_only.mount / "empty-dir").stat().st_mode & 0o777 == 0o750
    found = {p.relative_to(hot_only.mount).as_posix() for p in hot_only.mount.rglob("*")}
    assert found == {*contents, "dir", "dir/sub", "empty-dir"}
    check_accounting(hot_only)


def test_killed_daemon_drops_what_was_unsealed(hot_only: Daemon) -> None:
    def play() -> Iterator[Any]:
        private = open(hot_only.mount / "private", "wb", buffering=0)  # noqa: SIM115
        private.write(b"half")
        published = open(hot_only.mount / "b.tmp", "wb", buffering=0)  # noqa: SIM115
        published.write(b"half")
        os.rename(hot_only.mount / "b.tmp", hot_only.mount / "published")
        yield None
        yield None

    hot_only.put("sealed", b"whole")
    hot_only.wait_sealed("sealed")
    with Actor(play) as writer:
        writer.step()
        hot_only.kill()
        writer.end(signal.SIGKILL)
        hot_only.start()
    assert os.listdir(hot_only.mount) == ["sealed"]
    assert hot_only.stats()["blocks"]["total"] == 1
    assert len(os.listdir(hot_only.state / "hot" / "blocks")) == 1
    check_accounting(hot_only)


@pytest.mark.parametrize("cold", [None, "256MiB"])
def test_daemon_killed_at_random_moments_under_load_never_shows_wrong_bytes(
    start: Callable[..., Daemon], cold: str | None
) -> None:
    # LMCache#1454, LMCache#4564, juicefs#6291
    daemon = start(cold=cold, hot="48MiB")
    dice = random.Random(1)
    stop = threading.Event()
    published: dict[str, int] = {}

    def check_block(content: bytes) -> None:
        seed = int.from_bytes(content[:4], "big")
        assert content[4:] == noise(seed, 200_000 + seed % 700_000)

    def load(number: int) -> None:
        own = random.Random(number)
        while not stop.is_set():
            key = f"k{number}-{own.randrange(8)}"
            seed = own.randrange(1 << 30)
            with contextlib.suppress(OSError):
                match own.randrange(6):
                    case 0:
                        (daemon.mount / key).unlink()
                    case 1:
                        daemon.set(key, "tier", "cold" if cold else "auto")
                    case 2:
                        check_block((daemon.mount / key).read_bytes())
                    case _:
                        temporary = daemon.mount / f"{key}.tmp{seed}"
                        body = noise(seed, 200_000 + seed % 700_000)
                        temporary.write_bytes(seed.to_bytes(4, "big") + body)
                        os.rename(temporary, daemon.mount / key)
                        published[key] = seed

    def check() -> None:
        for path in daemon.mount.iterdir():
            check_block(path.read_bytes())
            assert daemon.get(path.name, "state") in ("sealed", "writing")

    for _ in range(5):
        stop.clear()
        threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        stop.wait(0.2 + dice.random() * 0.5)
        daemon.kill()
        stop.set()
        for thread in threads:
            thread.join()
        daemon.start()
        check()
        check_accounting(daemon)
    assert published


def test_terminated_daemon_ends_cleanly_while_files_are_open(hot_only: Daemon) -> None:
    def play() -> Iterator[Any]:
        file = open(hot_only.mount / "open", "wb", buffering=0)  # noqa: SIM115
        file.write(noise(1, MIB))
        reader = open(hot_only.mount / "read", "rb")  # noqa: SIM115
        yield None
        with pytest.raises(OSError, match=r"not connected|aborted"):
            file.write(b"more")
        with contextlib.suppress(OSError):
            file.close()
        yield reader.name

    hot_only.put("read", b"content")
    with Actor(play) as actor:
        actor.step()
        assert hot_only.stop() == 0
        assert not is_mounted(hot_only.mount)
        assert not is_mounted(hot_only.state / "hot")
        actor.step()
    assert "Traceback" not in hot_only.log()


def test_unmounting_from_outside_ends_the_daemon(hot_only: Daemon) -> None:
    hot_only.put("block", b"content")
    assert hot_only.process is not None
    subprocess.run(["umount", str(hot_only.mount)], check=True)
    assert hot_only.process.wait(20) == 0
    assert not is_mounted(hot_only.state / "hot")
    assert not (hot_only.state / "daemon.pid").exists()
    assert "Traceback" not in hot_only.log()


def test_lazy_unmount_with_a_reader_ends_the_daemon_when_the_reader_goes(
    hot_only: Daemon,
) -> None:
    # juicefs-csi#343: recovery by umount -l
    content = noise(3, MIB)
    hot_only.put("block", content)

    def play() -> Iterator[Any]:
        with open(hot_only.mount / "block", "rb") as file:
            yield None
            yield file.read()

    assert hot_only.process is not None
    with Actor(play) as reader:
        reader.step()
        subprocess.run(["umount", "-l", str(hot_only.mount)], check=True)
        assert reader.step() == content
    assert hot_only.process.wait(20) == 0
    assert not is_mounted(hot_only.state / "hot")


def test_stale_mount_of_a_killed_daemon_is_cleared_at_start(hot_only: Daemon) -> None:
    hot_only.put("block", b"content")
    hot_only.wait_sealed("block")
    hot_only.kill()
    assert is_mounted(hot_only.mount)
    with pytest.raises(OSError, match="not connected"):
        os.listdir(hot_only.mount)
    hot_only.start()
    assert (hot_only.mount / "block").read_bytes() == b"content"
    mounts = Path("/proc/self/mountinfo").read_text().count(f" {hot_only.mount} ")
    assert mounts == 1


def test_two_daemons_on_one_state_directory_are_refused(hot_only: Daemon, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    command = [*hot_only.command[:-1], str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert f"pid {hot_only.pid}" in done.stderr
    assert "--state" in done.stderr
    assert "Traceback" not in done.stderr
    hot_only.put("still", b"alive")


def test_two_daemons_on_one_mount_point_are_refused(hot_only: Daemon, tmp_path: Path) -> None:
    state = tmp_path / "other-state"
    state.mkdir(mode=0o700)
    command = [*hot_only.command]
    command[command.index("--state") + 1] = str(state)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert str(hot_only.mount) in done.stderr
    assert "Traceback" not in done.stderr
    assert not is_mounted(state / "hot")
    hot_only.put("still", b"alive")


def test_restart_without_cold_tier_starts_empty(hot_only: Daemon) -> None:
    hot_only.put("block", b"content")
    hot_only.restart()
    assert os.listdir(hot_only.mount) == []


def test_journal_that_is_torn_is_cut_and_what_is_before_it_is_found(hot_only: Daemon) -> None:
    for number in range(10):
        hot_only.put(f"block{number}", noise(number, 10_000))
        hot_only.wait_sealed(f"block{number}")
    hot_only.kill()
    journal = hot_only.state / "hot" / "journal"
    os.truncate(journal, journal.stat().st_size - 7)
    hot_only.start()
    names = sorted(os.listdir(hot_only.mount))
    assert names == [f"block{number}" for number in range(9)]
    for number in range(9):
        assert (hot_only.mount / f"block{number}").read_bytes() == noise(number, 10_000)
    hot_only.put("new", b"new")
    hot_only.wait_sealed("new")
    hot_only.crash()
    assert (hot_only.mount / "new").read_bytes() == b"new"


def test_hot_file_removed_behind_the_daemons_back_is_a_miss(hot_only: Daemon) -> None:
    # LMCache#1313, s3fs#715: a deleted file crashes the engine, or reads as zeros
    path = hot_only.put("block", noise(1, MIB))
    hot_only.put("other", b"other")
    hot_only.wait_sealed("block")
    generation = int(hot_only.get("block", "generation"))
    (hot_only.state / "hot" / "blocks" / f"{generation:016x}").unlink()
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    assert not path.exists()
    assert (hot_only.mount / "other").read_bytes() == b"other"
    assert hot_only.put("block", b"again").read_bytes() == b"again"
    assert hot_only.stats()["counters"]["trouble"] == 1


def test_deadlines_go_on_while_the_daemon_is_down(hot_only: Daemon) -> None:
    hot_only.put("short", b"s")
    hot_only.put("long", b"l")
    for key, ttl in (("short", "0.3"), ("long", "1h")):
        hot_only.wait_sealed(key)
        hot_only.set(key, "ttl", ttl)
    deadline = time.monotonic() + 0.3
    hot_only.kill()
    wait_until(lambda: time.monotonic() > deadline)
    hot_only.start()
    assert os.listdir(hot_only.mount) == ["long"]
    assert hot_only.stats()["counters"]["expired"] == 1
    assert float(hot_only.get("long", "ttl")) < 3600


def test_requests_in_flight_when_the_daemon_dies_fail_and_do_not_hang(hot_only: Daemon) -> None:
    def follow() -> Iterator[Any]:
        with open(hot_only.mount / ".ctx/events", "rb", buffering=0) as events:
            yield None
            with contextlib.suppress(OSError):
                while events.read(100_000) is not None:
                    pass
            yield "ended"

    with Actor(follow) as reader:
        reader.step()
        reader.go()
        hot_only.kill()
        assert reader.answer() == "ended"
