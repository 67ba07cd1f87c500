"""A cold device that hangs: a file system that is frozen beneath the cold file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.device.places import loop_device, mounted_ext4, why_no_loop_devices
from tests.mount.calls import error_of
from tests.mount.harness import MIB, Daemon, noise, wait_until
from tools.doctor import CONNECTIONS

CTX = shutil.which("ctx", path=os.path.dirname(sys.executable)) or "ctx"
Start = Callable[..., Daemon]
QUICK = """
[hot]
room_wait = "100ms"
[limits]
read_deadline = "200ms"
operation_deadline = "400ms"
"""


@contextmanager
def frozen(point: Path) -> Iterator[None]:
    """Whoever writes to this file system waits until the end."""
    subprocess.run(["fsfreeze", "-f", point], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", point], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    if why := why_no_loop_devices():
        pytest.skip(why)
    point = tmp_path / "disk"
    with loop_device(tmp_path / "backing", 256 * MIB) as device, mounted_ext4(device, point):
        yield point


@pytest.fixture
def hanging(start: Start, disk: Path) -> Iterator[Daemon]:
    """A daemon whose cold file is on `disk`; it is ended before that goes."""
    daemon = start(config=QUICK, arguments=("--cold", f"{disk}/cold:128MiB"))
    yield daemon
    assert "Traceback" not in daemon.log(), daemon.log()
    daemon.stop()


def overdue(daemon: Daemon) -> int:
    return int(daemon.stats()["counters"]["overdue"])


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def test_fsync_and_moves_on_a_device_that_hangs_end_with_an_error(
    hanging: Daemon, disk: Path
) -> None:
    path = hanging.put("k", noise(1, MIB))
    hanging.wait_sealed("k")
    with frozen(disk):
        assert error_of(partial(sync, path)) == errno.ETIMEDOUT
        assert error_of(partial(hanging.set, "k", "tier", "cold")) == errno.ETIMEDOUT
        assert hanging.put("other", b"content").read_bytes() == b"content"
        assert overdue(hanging) == 2
        told = [(event["key"], event["operation"]) for event in hanging.events("overdue")]
        assert told == [("k", "FSYNC"), ("k", "SETXATTR")]
    assert "SETXATTR of b'k' waited" in hanging.log()
    sync(path)  # the device goes on, and so does everything else
    assert path.read_bytes() == noise(1, MIB)
    assert overdue(hanging) == 2


def test_a_request_that_waits_shows_in_the_statistics(start: Start, disk: Path) -> None:
    daemon = start(arguments=("--cold", f"{disk}/cold:128MiB"))
    path = daemon.put("k", noise(1, MIB))
    daemon.wait_sealed("k")
    with frozen(disk):
        waiter = threading.Thread(target=sync, args=(path,))
        waiter.start()
        wait_until(lambda: daemon.stats()["requests"]["waiting"] == 1)
        wait_until(lambda: daemon.stats()["requests"]["longest_s"] > 0.1)
        metrics = (daemon.mount / ".ctx/metrics").read_text()
        assert "ctxfs_requests_waiting 1\n" in metrics
    waiter.join()
    wait_until(lambda: daemon.stats()["requests"] == {"waiting": 0, "longest_s": 0.0})
    assert overdue(daemon) == 0
    daemon.stop()


@pytest.mark.channel("direct")
def test_a_daemon_that_is_killed_after_it_gave_up_is_followed_by_one_that_goes_on(
    hanging: Daemon, disk: Path
) -> None:
    path = hanging.put("k", noise(1, MIB))
    hanging.wait_sealed("k")
    with frozen(disk):
        assert error_of(partial(sync, path)) == errno.ETIMEDOUT
        killed = hanging.pid
        os.kill(killed, signal.SIGKILL)  # it ends when what it asked the device for has
    hanging.wait_for_successor(killed)
    assert path.read_bytes() == noise(1, MIB)
    sync(path)


def requests_check(daemon: Daemon) -> dict[str, str]:
    """What `ctx doctor` says of requests that wait, whatever else it says."""
    script = f'mount -t fusectl none {CONNECTIONS} && exec "$0" "$@"'
    command = ["unshare", "-m", "sh", "-c", script]
    command += [CTX, "--mount", str(daemon.mount), "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    checks: list[dict[str, str]] = json.loads(done.stdout)
    (found,) = (check for check in checks if check["name"] == f"requests {daemon.mount}")
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="fusectl is mounted for it")
def test_doctor_tells_of_requests_that_wait_and_how_to_end_them(start: Start) -> None:
    daemon = start()
    assert requests_check(daemon)["state"] == "ok"
    pid = daemon.pid
    os.kill(pid, signal.SIGSTOP)
    waiter = threading.Thread(target=daemon.put, args=("k", b"content"))
    waiter.start()
    try:
        told = requests_check(daemon)
    finally:
        os.kill(pid, signal.SIGCONT)
    waiter.join()
    assert told["state"] == "warn"
    assert "wait for the daemon" in told["text"]
    assert f"{daemon.mount.stat().st_dev}/abort" in told["remedy"]
    assert (daemon.mount / "k").read_bytes() == b"content"


# Stops one thread and no other, until its process ends.
HOLD = """
import ctypes, os, sys
ptrace, tid = ctypes.CDLL(None, use_errno=True).ptrace, int(sys.argv[1])
SEIZE, INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
for request in (SEIZE, INTERRUPT):
    if ptrace(ctypes.c_long(request), ctypes.c_long(tid), None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(tid, WALL)
print("held", flush=True)
_, status = os.waitpid(tid, WALL)
print(os.waitstatus_to_exitcode(status))
"""
SOONER = """
from mountd import watchdog
watchdog.watched.__kwdefaults__.update(tick_s=0.05, ticks_max=40)
"""


@pytest.mark.channel("direct")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a parent that holds the mount")
def test_a_daemon_that_stands_still_is_followed_by_one_that_answers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SOONER)
    known = os.environ.get("PYTHONPATH")
    paths = [str(tmp_path / "site"), *([known] if known else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    daemon = start()
    path = daemon.put("k", noise(1, MIB))
    daemon.wait_sealed("k")
    pid = daemon.pid
    command = [sys.executable, "-c", HOLD, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert daemon.get("k", "state") == "sealed"  # the next one says so
        assert int(holder.stdout.readline()) == -signal.SIGKILL
    assert daemon.pid != pid
    assert daemon.stats()["restarts"] == 1
    assert path.read_bytes() == noise(1, MIB)
    log = daemon.log()
    assert "the loop stands still, and another process takes over" in log
    assert "was killed by signal 9; restart 1" in log
