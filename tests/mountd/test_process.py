"""What /proc tells of a client."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from mountd import process
from tests.mount.harness import wait_until


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped, so that signals stay pending."""
    with subprocess.Popen(["sleep", "60"]) as child:
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: b"State:\tT" in open_status(child.pid))
        yield child
        child.kill()


def open_status(pid: int) -> bytes:
    with open(f"/proc/{pid}/status", "rb") as file:
        return file.read()


def test_a_process_without_signals_is_not_to_end(stopped: subprocess.Popen[bytes]) -> None:
    assert not process.is_to_end(stopped.pid)
    stopped.send_signal(signal.SIGCHLD)
    stopped.send_signal(signal.SIGUSR1)
    assert not process.is_to_end(stopped.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_that_was_told_to_end_is(
    stopped: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    stopped.send_signal(number)
    assert process.is_to_end(stopped.pid)


def test_a_signal_that_is_blocked_ends_nothing() -> None:
    with subprocess.Popen(["env", "--block-signal=TERM", "sleep", "60"]) as child:
        wait_until(lambda: b"Name:\tsleep" in open_status(child.pid))
        child.send_signal(signal.SIGTERM)
        assert not process.is_to_end(child.pid)
        child.kill()


def test_who_is_gone_is_to_end() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    assert process.is_to_end(child.pid)


def test_threads_are_told_from_processes_without_proc() -> None:
    found: list[tuple[int, int]] = []

    def look() -> None:
        tid = threading.get_native_id()
        found.append((tid, process.process_of(tid)))
        assert process.is_thread_of(tid, os.getpid())
        assert not process.is_thread_of(tid, tid)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    ((tid, owner),) = found
    assert tid != owner == os.getpid()
    assert process.process_of(os.getpid()) == os.getpid()
