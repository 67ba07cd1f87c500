"""Cold devices that are added, drained and grown below a mount that is in use."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mount.calls import error_of
from tests.mount.harness import Daemon, noise, read_or_none, run_as, wait_until

MIB = 1 << 20
SIZE = 300_000


def ask(daemon: Daemon, what: str, device: Path | str) -> None:
    os.setxattr(daemon.mount / ".ctx", f"user.ctx.device.{what}", os.fsencode(str(device)))


def device(daemon: Daemon, path: Path) -> dict[str, Any]:
    """What `.ctx/stats` says of one."""
    devices = daemon.stats()["tiers"]["cold"]["devices"]
    found: dict[str, Any] = next(each for each in devices if each["path"] == str(path))
    return found


def wait_for_state(daemon: Daemon, path: Path, state: str) -> None:
    wait_until(lambda: device(daemon, path)["state"] == state)


def put_cold(daemon: Daemon, count: int, first: int = 0, size: int = SIZE) -> None:
    for number in range(first, first + count):
        daemon.put(f"block{number}", noise(number, size))
    for number in range(first, first + count):
        daemon.wait_sealed(f"block{number}")
        daemon.set(f"block{number}", "tier", "cold")


def check(daemon: Daemon, count: int, size: int = SIZE) -> None:
    for number in range(count):
        assert read_or_none(daemon.mount / f"block{number}") == noise(number, size), number


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Path]:
    """Where a second device may be made."""
    path = tmp_path / "second"
    yield path
    path.unlink(missing_ok=True)


def test_first_device_is_drained_into_one_that_was_added_and_can_be_pulled_out(
    daemon: Daemon, second: Path
) -> None:
    put_cold(daemon, 30)
    (daemon.mount / "directory").mkdir()
    before = os.statvfs(daemon.mount).f_blocks
    ask(daemon, "add", f"{second}:128MiB")
    assert device(daemon, second)["state"] == "ok"
    assert os.statvfs(daemon.mount).f_blocks > before
    ask(daemon, "drain", daemon.cold_path)
    wait_for_state(daemon, daemon.cold_path, "drained")
    gone = device(daemon, daemon.cold_path)
    assert (gone["left_blocks"], gone["left_bytes"], gone["capacity_bytes"]) == (0, 0, 0)
    assert device(daemon, second)["blocks"] == 30
    daemon.cold_path.unlink()
    check(daemon, 30)
    put_cold(daemon, 5, first=30)
    assert daemon.stop() == 0
    daemon.command[daemon.command.index(f"{daemon.cold_path}:256MiB")] = str(second)
    daemon.start()
    check(daemon, 35)
    assert (daemon.mount / "directory").is_dir()
    assert "was a device" not in daemon.log()
    assert "Traceback" not in daemon.log()


def test_drained_device_that_is_pulled_out_stops_no_start_and_one_that_was_not_does(
    start: Callable[..., Daemon], second: Path
) -> None:
    with second.open("wb") as file:
        file.truncate(64 * MIB)
    daemon = start(hot="64MiB", cold="64MiB", arguments=("--cold", str(second)))
    put_cold(daemon, 10)
    ask(daemon, "drain", second)
    wait_for_state(daemon, second, "drained")
    wait_until(lambda: (daemon.state / "cold-drained").exists())
    assert daemon.stop() == 0
    second.unlink()
    daemon.start()
    check(daemon, 10)
    assert f"{second} was drained and is not here any more" in daemon.log()
    assert daemon.stop() == 0
    # Here again, it is used again, and missed from then on.
    with second.open("wb") as file:
        file.truncate(64 * MIB)
    daemon.start()
    assert device(daemon, second)["state"] == "ok"
    assert daemon.stop() == 0
    second.unlink()
    refused = subprocess.run(daemon.command, capture_output=True, text=True, timeout=30)
    assert refused.returncode != 0
    assert f"{second}: does not exist; give its size" in refused.stderr


def test_blocks_are_read_written_and_removed_while_a_device_is_drained(
    start: Callable[..., Daemon], second: Path
) -> None:
    daemon = start(hot="64MiB", cold="256MiB")
    put_cold(daemon, 60, size=2 * MIB)
    ask(daemon, "add", f"{second}:256MiB")
    ask(daemon, "drain", daemon.cold_path)
    for number in range(0, 60, 3):
        assert read_or_none(daemon.mount / f"block{number}") == noise(number, 2 * MIB)
        (daemon.mount / f"block{number + 1}").unlink()
        daemon.put(f"new{number}", noise(1000 + number, MIB))
    wait_for_state(daemon, daemon.cold_path, "drained")
    daemon.cold_path.unlink()
    for number in range(60):
        expected = None if number % 3 == 1 else noise(number, 2 * MIB)
        assert read_or_none(daemon.mount / f"block{number}") == expected
    for number in range(0, 60, 3):
        assert read_or_none(daemon.mount / f"new{number}") == noise(1000 + number, MIB)


def test_killed_daemon_finds_everything_whatever_it_was_doing(
    start: Callable[..., Daemon], second: Path
) -> None:
    daemon = start(hot="64MiB", cold="128MiB", arguments=("--cold", f"{second}:128MiB"))
    put_cold(daemon, 40, size=MIB)
    os.sync()
    for turn in range(4):
        left = device(daemon, daemon.cold_path)["blocks"]
        ask(daemon, "drain", daemon.cold_path)
        wait_until(lambda: device(daemon, daemon.cold_path)["blocks"] <= max(0, left - 2 - turn))  # noqa: B023
        daemon.crash()
        check(daemon, 40, size=MIB)
        devices = daemon.stats()["tiers"]["cold"]["devices"]
        assert sum(each["blocks"] for each in devices) == 40
    assert "Traceback" not in daemon.log()


def test_pinned_blocks_stop_a_drain_for_which_there_is_no_room(
    start: Callable[..., Daemon], second: Path
) -> None:
    daemon = start(hot="32MiB", cold="64MiB")
    put_cold(daemon, 40, size=MIB)
    for number in range(40):
        daemon.set(f"block{number}", "pin", "1")
    ask(daemon, "add", f"{second}:32MiB")
    ask(daemon, "drain", daemon.cold_path)
    wait_for_state(daemon, daemon.cold_path, "needs room")
    told = device(daemon, daemon.cold_path)
    assert told["left_blocks"] > 0
    assert told["left_bytes"] >= told["left_blocks"] * MIB
    assert "full" in told["why"]
    check(daemon, 40, size=MIB)
    for number in range(30):
        daemon.set(f"block{number}", "tier", "auto")
        daemon.set(f"block{number}", "pin", "0")
    ask(daemon, "drain", daemon.cold_path)
    wait_for_state(daemon, daemon.cold_path, "drained")
    for number in range(30, 40):
        assert read_or_none(daemon.mount / f"block{number}") == noise(number, MIB)
    assert daemon.stats()["counters"]["evicted"] > 0


def test_drain_that_is_taken_back_leaves_everything_readable(daemon: Daemon, second: Path) -> None:
    put_cold(daemon, 20)
    ask(daemon, "add", f"{second}:64MiB")
    put_cold(daemon, 1, first=20)
    ask(daemon, "drain", second)
    ask(daemon, "add", second)
    assert device(daemon, second)["state"] == "ok"
    check(daemon, 21)


def test_file_is_grown_while_it_is_used(daemon: Daemon) -> None:
    put_cold(daemon, 10)
    before = os.statvfs(daemon.mount).f_blocks
    ask(daemon, "grow", f"{daemon.cold_path}:384MiB")
    assert daemon.cold_path.stat().st_size == 384 * MIB
    assert os.statvfs(daemon.mount).f_blocks - before > 100 * MIB // 4096
    check(daemon, 10)
    daemon.command[daemon.command.index(f"{daemon.cold_path}:256MiB")] = str(daemon.cold_path)
    daemon.crash()
    check(daemon, 10)
    os.truncate(daemon.cold_path, 512 * MIB)
    ask(daemon, "grow", daemon.cold_path)
    assert device(daemon, daemon.cold_path)["capacity_bytes"] > 400 * MIB


def test_larger_size_in_the_configuration_grows_the_file_at_the_next_start(
    daemon: Daemon,
) -> None:
    put_cold(daemon, 10)
    assert daemon.stop() == 0
    at = daemon.command.index(f"{daemon.cold_path}:256MiB")
    daemon.command[at] = f"{daemon.cold_path}:384MiB"
    daemon.start()
    assert device(daemon, daemon.cold_path)["capacity_bytes"] > 300 * MIB
    check(daemon, 10)


def test_start_without_an_added_device_says_so_and_it_comes_back_with_the_configuration(
    daemon: Daemon, second: Path
) -> None:
    put_cold(daemon, 5)
    ask(daemon, "add", f"{second}:1GiB")
    daemon.put("away", b"old")
    daemon.wait_sealed("away")
    daemon.set("away", "tier", "cold")
    for _ in range(50):  # far more changes there than anywhere else
        daemon.set("away", "ttl", "9h")
    assert device(daemon, second)["blocks"] == 1
    daemon.restart()
    check(daemon, 5)
    assert read_or_none(daemon.mount / "away") is None
    assert f"{second} was a device of this cold tier" in daemon.log()
    daemon.put("away", b"new")
    daemon.wait_sealed("away")
    daemon.set("away", "tier", "cold")
    assert daemon.stop() == 0
    daemon.command[-1:-1] = ["--cold", str(second)]
    daemon.start()
    check(daemon, 5)
    assert read_or_none(daemon.mount / "away") == b"new"


@pytest.mark.parametrize(
    ("what", "value", "expected", "said"),
    [
        ("add", "relative", errno.EINVAL, "is not an absolute path"),
        ("add", "/nowhere/cold:64MiB", errno.EINVAL, "/nowhere does not exist"),
        ("add", "{mount}/../missing", errno.EINVAL, "give it a size"),
        ("add", "{mount}/block:64MiB", errno.EINVAL, "lies in this mount itself"),
        ("add", "{mount}/../new:12", errno.EINVAL, "too few"),
        ("add", "{mount}/../new:much", errno.EINVAL, "is not a size"),
        ("add", "{cold}", errno.EBUSY, "is a device of this cold tier already"),
        ("add", "{link}", errno.EBUSY, "is a device of this cold tier already"),
        ("add", "{foreign}", errno.EINVAL, "holds a SquashFS image"),
        ("drain", "{cold}", errno.ENOSPC, "only cold device"),
        ("drain", "/dev/null", errno.ENODEV, "is no device of the cold tier"),
        ("grow", "/dev/null", errno.ENODEV, "is no device of the cold tier"),
        ("grow", "{cold}", errno.EINVAL, "are not a segment more"),
        ("grow", "{cold}:100MiB", errno.EINVAL, "are not a segment more"),
    ],
)
def test_what_cannot_be_done_is_an_error_a_log_line_and_in_the_statistics(
    daemon: Daemon, what: str, value: str, expected: int, said: str
) -> None:
    base = daemon.mount.parent
    (base / "link").symlink_to(daemon.cold_path)
    with (base / "foreign").open("wb") as file:
        file.write(b"hsqs")
        file.truncate(32 * MIB)
    text = value.format(
        mount=daemon.mount, cold=daemon.cold_path, link=base / "link", foreign=base / "foreign"
    )
    assert error_of(partial(ask, daemon, what, text)) == expected
    assert said in daemon.log()
    job = daemon.stats()["tiers"]["cold"]["device_work"][-1]
    assert (job["what"], job["state"]) == (what, "failed")
    assert said in job["error"]
    assert len(daemon.stats()["tiers"]["cold"]["devices"]) == 1
    put_cold(daemon, 1)
    check(daemon, 1)


def test_device_of_another_daemon_and_one_with_blocks_are_refused(
    start: Callable[..., Daemon],
) -> None:
    one, other = start(cold="64MiB"), start(cold="64MiB")
    put_cold(other, 3)
    assert error_of(partial(ask, one, "add", other.cold_path)) == errno.EBUSY
    assert "in use by another daemon" in one.log()
    assert other.stop() == 0
    assert error_of(partial(ask, one, "add", other.cold_path)) == errno.ENOTEMPTY
    assert "holds 3 blocks" in one.log()
    other.start()
    check(other, 3)


def test_only_root_and_the_daemons_user_may(daemon: Daemon, second: Path) -> None:
    def attempt() -> int:
        return error_of(partial(ask, daemon, "add", f"{second}:64MiB"))

    assert run_as(12345, attempt) in (errno.EPERM, errno.EACCES)
    assert not second.exists()
    assert attempt() == 0


def test_without_a_cold_tier_there_is_nothing_to_add_to(hot_only: Daemon, second: Path) -> None:
    assert error_of(partial(ask, hot_only, "add", f"{second}:64MiB")) == errno.EINVAL
    assert "there is no cold tier" in hot_only.log()


def test_device_that_goes_while_it_is_drained_is_lost_and_the_rest_stays(
    start: Callable[..., Daemon], second: Path
) -> None:
    daemon = start(cold="64MiB")
    put_cold(daemon, 20)
    ask(daemon, "add", f"{second}:64MiB")
    os.truncate(daemon.cold_path, 4096)
    ask(daemon, "drain", daemon.cold_path)
    wait_for_state(daemon, daemon.cold_path, "lost")
    wait_until(lambda: device(daemon, daemon.cold_path)["why"] is not None)
    assert device(daemon, daemon.cold_path)["left_blocks"] > 0
    put_cold(daemon, 3, first=100)
    assert read_or_none(daemon.mount / "block101") == noise(101, SIZE)
    assert "Traceback" not in daemon.log()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A block device of 64 MiB, and the file behind it."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("loop devices need root and /dev/loop-control")
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(64 * MIB)
    done = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    yield Path(done.stdout.strip()), backing
    subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


def test_block_device_is_added_grown_and_drained(
    start: Callable[..., Daemon], loop: tuple[Path, Path]
) -> None:
    path, backing = loop
    daemon = start(cold="64MiB")
    put_cold(daemon, 10)
    ask(daemon, "add", path)
    os.truncate(backing, 128 * MIB)
    subprocess.run(["losetup", "--set-capacity", str(path)], check=True)
    ask(daemon, "grow", path)
    assert device(daemon, path)["capacity_bytes"] > 100 * MIB
    ask(daemon, "drain", daemon.cold_path)
    wait_for_state(daemon, daemon.cold_path, "drained")
    check(daemon, 10)
    ask(daemon, "add", daemon.cold_path)
    ask(daemon, "drain", path)
    wait_for_state(daemon, path, "drained")
    check(daemon, 10)
    assert daemon.stop() == 0
