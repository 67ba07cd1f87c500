"""What must not end the daemon: odd times, too few descriptors, files taken away beneath it."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from tests.mount.calls import error_of
from tests.mount.harness import Daemon, is_mounted, noise, read_or_none, wait_until


def keep_open(path: Path, content: bytes, files: list[IO[bytes]]) -> None:
    file = path.open("wb", buffering=0)
    files.append(file)
    file.write(content)


@pytest.mark.parametrize("seconds", [99_999_999_999, -9_250_000_000, 2**62])
def test_times_that_cannot_be_kept_become_the_nearest_that_can(
    hot_only: Daemon, seconds: int
) -> None:
    path = hot_only.put("k", b"content")
    hot_only.wait_sealed("k")
    for each in (path, hot_only.mount):
        done = subprocess.run(
            ["touch", "-d", f"@{seconds}", str(each)], capture_output=True, check=False
        )
        assert done.returncode in (0, 1)
    hot_only.crash()
    assert path.read_bytes() == b"content"


def test_more_open_files_than_descriptors_is_an_error_to_the_opener_alone(
    start: Callable[..., Daemon],
) -> None:
    daemon = start(run_as=["prlimit", "--nofile=64:64"])
    files: list[IO[bytes]] = []
    code = 0
    try:
        for number in range(80):
            path = daemon.mount / f"k{number}"
            code = error_of(partial(keep_open, path, noise(number, 100), files))
            if code:
                break
        assert code in (errno.ENFILE, errno.EMFILE)
    finally:
        for file in files:
            file.close()
    assert len(files) > 4
    for number in range(len(files)):
        daemon.wait_sealed(f"k{number}")
        assert (daemon.mount / f"k{number}").read_bytes() == noise(number, 100)
    assert "Traceback" not in daemon.log()


def test_a_hot_tier_taken_away_beneath_the_daemon_is_misses_and_errors(daemon: Daemon) -> None:
    # LMCache#1313
    path = daemon.put("k", noise(1, 100_000))
    daemon.wait_sealed("k")
    daemon.set("k", "tier", "cold")
    daemon.put("hot", noise(2, 1000))
    daemon.wait_sealed("hot")
    shutil.rmtree(daemon.state / "hot" / "blocks")
    assert read_or_none(path) in (None, noise(1, 100_000))
    assert read_or_none(daemon.mount / "hot") is None
    assert error_of(partial(daemon.put, "new", b"x")) == errno.EIO
    assert daemon.stats()["pid"] == daemon.pid


def test_programs_see_a_dead_mount_until_the_new_one_is_there(
    start: Callable[..., Daemon],
) -> None:
    daemon = start(cold="64MiB")
    for number in range(50):
        daemon.put(f"k{number}", noise(number, 100_000))
    daemon.kill()
    # A writer that goes on all the while must not write into the directory beneath the mount.
    writer = subprocess.Popen(
        ["sh", "-c", f"while :; do echo x > {daemon.mount}/during || :; done"],
        stderr=subprocess.DEVNULL,
    )
    try:
        daemon.start()
        wait_until(lambda: (daemon.mount / "during").exists())
    finally:
        writer.kill()
        writer.wait()
    assert daemon.stop() == 0
    assert not is_mounted(daemon.mount)
    beneath = os.listdir(daemon.mount)
    assert len(beneath) <= 1  # between the old mount's end and the new one is one system call
    for name in beneath:
        (daemon.mount / name).unlink()


def test_a_lost_cold_device_has_no_room(daemon: Daemon) -> None:
    before = os.statvfs(daemon.mount)
    for key in ("hot", "cold"):
        daemon.put(key, noise(1, 100_000))
        daemon.wait_sealed(key)
    daemon.set("cold", "tier", "cold")
    os.truncate(daemon.cold_path, 4096)
    assert read_or_none(daemon.mount / "cold") is None
    assert daemon.stats()["tiers"]["cold"]["devices"][0]["state"] == "lost"
    after = os.statvfs(daemon.mount)
    assert after.f_blocks < before.f_blocks
    assert after.f_bfree <= after.f_blocks
    assert (daemon.mount / "hot").read_bytes() == noise(1, 100_000)
    assert daemon.put("new", b"new").read_bytes() == b"new"
