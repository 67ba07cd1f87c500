"""What the cold tier gives back after an end, a power cut, and damage."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.harness import (
    MIB,
    Daemon,
    is_mounted,
    noise,
    read_or_none,
    wait_until,
)


def lose_memory(daemon: Daemon) -> None:
    """Kill the daemon and take its tmpfs away, as a power cut does."""
    daemon.kill()
    daemon.clean()


def sync_names(daemon: Daemon) -> None:
    fd = os.open(daemon.mount, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def put_cold(daemon: Daemon, key: str, content: bytes) -> None:
    daemon.put(key, content)
    daemon.set(key, "tier", "cold")
    daemon.set(key, "tier", "auto")


def refused(daemon: Daemon) -> str:
    """Start it, expect that it does not, and return what it says."""
    with pytest.raises(AssertionError, match="did not start") as caught:
        daemon.start()
    assert daemon.refused_with == 2
    said = str(caught.value)
    assert "Traceback" not in said
    assert not is_mounted(daemon.mount)
    assert not is_mounted(daemon.state / "hot")
    return said


def test_clean_end_saves_every_block_with_everything(daemon: Daemon) -> None:
    (daemon.mount / "dir/sub").mkdir(parents=True)
    (daemon.mount / "empty").mkdir(mode=0o711)
    contents = {f"block{n}": noise(n, n * 33_333) for n in range(30)}
    contents |= {"dir/sub/leaf": b"leaf", "nothing": b""}
    for key, content in contents.items():
        daemon.put(key, content)
    path = daemon.mount / "block5"
    daemon.wait_sealed("block5")
    os.setxattr(path, "user.binary", bytes(range(256)))
    for name, value in (("ttl", "1h"), ("pin", "1"), ("parent", "block4"), ("dtype", "fp8")):
        daemon.set("block5", name, value)
    daemon.set("dir", "ttl", "2h")
    daemon.set("dir", "together", "1")
    os.chmod(path, 0o604)
    os.chown(path, 7, 8)
    before = path.stat()
    daemon.restart()
    for key, content in contents.items():
        assert (daemon.mount / key).read_bytes() == content
    after = path.stat()
    for field in ("st_ino", "st_mode", "st_uid", "st_gid", "st_mtime_ns"):
        assert getattr(after, field) == getattr(before, field)
    assert os.getxattr(path, "user.binary") == bytes(range(256))
    assert daemon.get("block5", "pin") == "1"
    assert daemon.get("block5", "parent") == "block4"
    assert daemon.get("block5", "dtype") == "fp8"
    assert 3590 < float(daemon.get("block5", "ttl")) <= 3600
    assert daemon.get("dir", "together") == "1"
    assert (daemon.mount / "empty").stat().st_mode & 0o777 == 0o711
    found = {p.relative_to(daemon.mount).as_posix() for p in daemon.mount.rglob("*")}
    assert found == {*contents, "dir", "dir/sub", "empty"}


def test_synced_attributes_names_and_removals_survive_a_power_cut(daemon: Daemon) -> None:
    for key in ("kept", "removed", "renamed-from", "replaced", "attributed"):
        put_cold(daemon, key, noise(len(key), 100_000))
    (daemon.mount / "gone-directory").mkdir()
    (daemon.mount / "directory").mkdir()
    sync_names(daemon)
    (daemon.mount / "removed").unlink()
    os.rename(daemon.mount / "renamed-from", daemon.mount / "directory/renamed-to")
    put_cold(daemon, "replaced", b"anew")
    (daemon.mount / "gone-directory").rmdir()
    os.setxattr(daemon.mount / "attributed", "user.mine", b"\0\1")
    daemon.set("attributed", "ttl", "1h")
    daemon.set("attributed", "pin", "2h")
    daemon.set("directory", "ttl", "3h")
    sync_names(daemon)
    lose_memory(daemon)
    daemon.start()
    found = {p.relative_to(daemon.mount).as_posix() for p in daemon.mount.rglob("*")}
    assert found == {"kept", "replaced", "attributed", "directory", "directory/renamed-to"}
    assert (daemon.mount / "kept").read_bytes() == noise(4, 100_000)
    assert (daemon.mount / "replaced").read_bytes() == b"anew"
    assert (daemon.mount / "directory/renamed-to").read_bytes() == noise(12, 100_000)
    assert os.getxattr(daemon.mount / "attributed", "user.mine") == b"\0\1"
    assert 3590 < float(daemon.get("attributed", "ttl")) <= 3600
    assert 7190 < float(daemon.get("attributed", "pin")) <= 7200
    assert daemon.get("directory", "ttl") == "10800.000"


def test_removed_block_does_not_rise_again_after_any_end(daemon: Daemon) -> None:
    # LMCache#562: orphans of an earlier life
    for number in range(20):
        put_cold(daemon, f"block{number}", noise(number, 50_000))
    sync_names(daemon)
    for number in range(0, 20, 2):
        (daemon.mount / f"block{number}").unlink()
    expected = {f"block{number}" for number in range(1, 20, 2)}
    daemon.crash()
    assert set(os.listdir(daemon.mount)) == expected
    daemon.restart()
    assert set(os.listdir(daemon.mount)) == expected
    sync_names(daemon)
    lose_memory(daemon)
    daemon.start()
    assert set(os.listdir(daemon.mount)) == expected
    for number in range(1, 20, 2):
        assert (daemon.mount / f"block{number}").read_bytes() == noise(number, 50_000)


def test_overwritten_block_never_shows_its_old_bytes_after_a_crash(daemon: Daemon) -> None:
    put_cold(daemon, "block", b"old" * 10_000)
    sync_names(daemon)
    daemon.put("block", b"new" * 10_000)
    daemon.wait_sealed("block")
    daemon.crash()
    assert (daemon.mount / "block").read_bytes() == b"new" * 10_000


def test_deadlines_pass_while_the_machine_is_off(daemon: Daemon) -> None:
    put_cold(daemon, "short", b"s")
    put_cold(daemon, "long", b"l")
    daemon.set("short", "ttl", "0.4")
    daemon.set("long", "ttl", "1h")
    deadline = time.monotonic() + 0.4
    sync_names(daemon)
    lose_memory(daemon)
    wait_until(lambda: time.monotonic() > deadline)
    daemon.start()
    assert os.listdir(daemon.mount) == ["long"]
    assert daemon.stats()["counters"]["expired"] == 1


def test_accounting_after_a_restart_equals_that_before(daemon: Daemon) -> None:
    # LMCache#4564: the used counter starts at 0 again; Mooncake#2783: capacity 0
    for number in range(100):
        daemon.put(f"block{number}", noise(number, 500_000 + number))
    sync_names(daemon)
    daemon.restart()
    first = daemon.stats()
    space = os.statvfs(daemon.mount)
    assert first["blocks"]["total"] == 100
    assert first["tiers"]["cold"]["blocks"] == 100
    assert first["tiers"]["cold"]["live_bytes"] >= 100 * 500_000
    assert space.f_blocks > space.f_bavail > 0
    lose_memory(daemon)
    daemon.start()
    second = daemon.stats()
    assert second["tiers"]["cold"]["live_bytes"] == pytest.approx(
        first["tiers"]["cold"]["live_bytes"], abs=256 << 10
    )
    for number in range(100):
        (daemon.mount / f"block{number}").unlink()
    assert daemon.stats()["tiers"]["cold"]["live_bytes"] < 512 << 10


def damage(path: Path, needle: bytes, count: int) -> int:
    """Flip a bit in the middle of each place where the file holds these bytes."""
    found = 0
    content = path.read_bytes()
    with path.open("r+b") as file:
        at = content.find(needle)
        while at >= 0 and found < count:
            file.seek(at + len(needle) // 2)
            file.write(bytes([content[at + len(needle) // 2] ^ 1]))
            found += 1
            at = content.find(needle, at + 1)
    return found


def test_damaged_cold_copy_is_a_miss_that_is_counted_and_told(daemon: Daemon) -> None:
    # Mooncake#3066, sglang#27504, dynamo#15079: wrong bytes, reported as a hit
    for number in range(5):
        put_cold(daemon, f"block{number}", noise(number, 200_000))
    assert daemon.stop() == 0
    assert damage(daemon.cold_path, noise(2, 200_000)[100_000:100_064], 10) >= 1
    daemon.start()
    with pytest.raises(FileNotFoundError):
        (daemon.mount / "block2").read_bytes()
    assert not (daemon.mount / "block2").exists()
    counters = daemon.stats()["counters"]
    assert counters["corrupt"] == 1
    assert counters["hits_cold"] == 0
    events = daemon.events("corrupt")
    assert [(event["key"], event["tier"]) for event in events] == [("block2", "cold")]
    for number in (0, 1, 3, 4):
        assert (daemon.mount / f"block{number}").read_bytes() == noise(number, 200_000)
    daemon.put("block2", b"computed again")
    assert (daemon.mount / "block2").read_bytes() == b"computed again"


def test_damaged_cold_copy_is_an_error_to_those_who_ask_for_errors(
    start: Callable[..., Daemon],
) -> None:
    daemon = start(cold="256MiB", config='[defaults]\non_trouble = "error"\n')
    put_cold(daemon, "block", noise(1, 200_000))
    assert daemon.stop() == 0
    assert damage(daemon.cold_path, noise(1, 200_000)[100_000:100_064], 10) >= 1
    daemon.start()
    assert read_or_none(daemon.mount / "block") is None  # no copy is left, so it is a miss
    assert daemon.stats()["counters"]["corrupt"] == 1


def test_damaged_cold_copy_is_found_by_verify_while_the_hot_one_serves(daemon: Daemon) -> None:
    put_cold(daemon, "block", noise(1, 200_000))
    daemon.set("block", "tier", "hot")
    assert damage(daemon.cold_path, noise(1, 200_000)[100_000:100_064], 10) >= 1
    with pytest.raises(OSError, match="Input/output error"):
        daemon.set("block", "verify", "1")
    assert daemon.stats()["counters"]["corrupt"] == 1
    content = read_or_none(daemon.mount / "block")
    assert content in (None, noise(1, 200_000))


@pytest.mark.parametrize("lost", ["start", "middle", "end"])
def test_any_part_of_the_cold_file_may_be_overwritten_with_rubbish(
    daemon: Daemon, lost: str
) -> None:
    for number in range(60):
        put_cold(daemon, f"block{number}", noise(number, MIB))
    lose_memory(daemon)
    size = daemon.cold_path.stat().st_size
    offset = {"start": 1 << 20, "middle": 30 << 20, "end": size - (64 << 20)}[lost]
    with daemon.cold_path.open("r+b") as file:
        file.seek(offset)
        file.write(noise(99, 10 << 20))
    daemon.start()
    found = 0
    for number in range(60):
        content = read_or_none(daemon.mount / f"block{number}")
        assert content in (None, noise(number, MIB))
        found += content is not None
    assert found >= 45
    daemon.put("new", noise(1, MIB))
    daemon.set("new", "tier", "cold")
    assert (daemon.mount / "new").read_bytes() == noise(1, MIB)


def test_file_with_somebody_elses_data_is_refused_and_left_alone(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start(cold="256MiB")
    daemon.stop()
    foreign = tmp_path / "foreign"
    subprocess.run(["truncate", "-s", "256M", str(foreign)], check=True)
    subprocess.run(["mkfs.ext4", "-q", str(foreign)], check=True)
    before = foreign.read_bytes()
    daemon.command[daemon.command.index("--cold") + 1] = str(foreign)
    said = refused(daemon)
    assert str(foreign) in said
    assert "ext4" in said
    assert "--format" in said
    assert foreign.read_bytes() == before


def test_two_daemons_on_one_cold_file_are_refused(daemon: Daemon, tmp_path: Path) -> None:
    mount, state = tmp_path / "other-ctx", tmp_path / "other-state"
    mount.mkdir()
    state.mkdir(mode=0o700)
    command = [*daemon.command[:-1], str(mount)]
    command[command.index("--state") + 1] = str(state)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert str(daemon.cold_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert not is_mounted(mount)
    put_cold(daemon, "still", b"alive")


def test_cold_file_that_was_cut_is_refused_and_loses_what_was_cut_and_no_more(
    daemon: Daemon,
) -> None:
    for number in range(60):
        put_cold(daemon, f"block{number}", noise(number, MIB))
    daemon.stop()
    size = daemon.cold_path.stat().st_size
    os.truncate(daemon.cold_path, 40 * MIB)
    assert "but was made with" in refused(daemon)
    assert daemon.cold_path.stat().st_size == 40 * MIB
    os.truncate(daemon.cold_path, size)  # whoever wants the rest of it says so
    daemon.start()
    contents = [read_or_none(daemon.mount / f"block{number}") for number in range(60)]
    for number, content in enumerate(contents):
        assert content in (None, noise(number, MIB))
    assert 20 < sum(content is not None for content in contents) < 60


def test_cold_file_is_refused_when_it_may_use_less_than_it_was_made_with(daemon: Daemon) -> None:
    put_cold(daemon, "block", noise(1, MIB))
    daemon.stop()
    place = daemon.command.index("--cold") + 1
    asked, daemon.command[place] = daemon.command[place], f"{daemon.cold_path}:128MiB"
    assert "was formatted with" in refused(daemon)
    daemon.command[place] = asked
    daemon.start()
    assert (daemon.mount / "block").read_bytes() == noise(1, MIB)


def test_cold_file_that_is_shorter_than_its_own_records_say_is_refused(daemon: Daemon) -> None:
    put_cold(daemon, "block", noise(1, MIB))
    daemon.stop()
    os.truncate(daemon.cold_path, 100 * MIB)
    daemon.command[daemon.command.index("--cold") + 1] = str(daemon.cold_path)
    assert str(daemon.cold_path) in refused(daemon)
    os.truncate(daemon.cold_path, 256 * MIB)
    daemon.start()
    assert (daemon.mount / "block").read_bytes() == noise(1, MIB)


def test_cold_file_moves_to_another_state_directory(
    daemon: Daemon, start: Callable[..., Daemon]
) -> None:
    # the medium alone is enough
    put_cold(daemon, "block", noise(1, MIB))
    assert daemon.stop() == 0
    other = start(arguments=("--cold", str(daemon.cold_path)))
    assert (other.mount / "block").read_bytes() == noise(1, MIB)


def test_power_cut_at_random_moments_shows_whole_blocks_only(daemon: Daemon) -> None:
    written: dict[str, bytes] = {}
    for life in range(4):
        for number in range(25):
            key = f"life{life}-{number}"
            content = noise(life * 100 + number, 300_000 + number)
            daemon.put(key, content)
            if number % 3 == 0:
                daemon.set(key, "tier", "cold")
            if number % 5 == 0:
                fd = os.open(daemon.mount / key, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
                written[key] = content
        lose_memory(daemon)
        daemon.start()
        for path in daemon.mount.iterdir():
            life_number, number = map(int, path.name.removeprefix("life").split("-"))
            assert path.read_bytes() == noise(life_number * 100 + number, 300_000 + number)
        for key, content in written.items():
            assert (daemon.mount / key).read_bytes() == content


def test_block_whose_key_is_missing_is_said_to_lack_it_and_stays(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("old " + "11" * 32 + "\n")
    daemon = start(cold="64MiB", config=f'[codec]\nkey_file = "{keys}"\n')
    content = noise(1, MIB)
    put_cold(daemon, "k", content)
    assert daemon.stop() == 0
    keys.write_text("new " + "22" * 32 + "\n")
    daemon.start()
    assert read_or_none(daemon.mount / "k") is None
    for attribute, value in (("verify", "1"), ("tier", "hot")):
        with pytest.raises(OSError, match="Required key not available"):
            daemon.set("k", attribute, value)
    assert "encrypted with key old, which is not here" in daemon.log()
    assert daemon.stop() == 0
    keys.write_text("old " + "11" * 32 + "\n")
    daemon.start()
    assert (daemon.mount / "k").read_bytes() == content
