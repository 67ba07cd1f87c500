"""Hot files lent for writing: what is true of bytes that the daemon never saw go by."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctxfs.codec.digest import DIGEST_NAME, digest
from tests.mount.calls import Mapping, Pages
from tests.mount.harness import (
    MIB,
    Actor,
    Daemon,
    elsewhere,
    noise,
    read_or_none,
    together,
    wait_until,
)
from tests.mount.test_direct import needs_passthrough

Start = Callable[..., Daemon]

pytestmark = [pytest.mark.channel("direct"), needs_passthrough]

WRITES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
BOTH = os.O_RDWR | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def direct(start: Start) -> Daemon:
    """A daemon with 256 MiB of hot tier."""
    return start(hot="256MiB")


@pytest.fixture
def cold(start: Start) -> Daemon:
    """A daemon with 256 MiB of hot tier over a cold file of as much."""
    return start(hot="256MiB", cold="256MiB")


def counter(daemon: Daemon, name: str) -> int:
    return int(daemon.stats()["counters"][name])


def hot(daemon: Daemon) -> dict[str, int]:
    facts: dict[str, int] = daemon.stats()["tiers"]["hot"]
    return facts


def digest_of(content: bytes) -> str:
    return f"{DIGEST_NAME}:{digest(content).hex()}"


def is_sealed_as(daemon: Daemon, key: str, content: bytes) -> bool:
    daemon.wait_sealed(key)
    assert daemon.get(key, "digest") == digest_of(content)
    return elsewhere((daemon.mount / key).read_bytes) == content


# -- every way of writing


def test_a_put_does_not_reach_the_daemon_and_is_sealed_as_written(direct: Daemon) -> None:
    content = noise(1, 3 * MIB + 7)
    direct.put("k", content)
    assert is_sealed_as(direct, "k", content)
    assert counter(direct, "writers_lent") == 1
    assert counter(direct, "written_bytes") == 0
    assert hot(direct)["reserved_bytes"] == 0


def test_holes_read_as_zeros_and_take_no_room(direct: Daemon) -> None:
    fd = os.open(direct.mount / "k", WRITES)
    assert os.pwrite(fd, b"end", 8 * MIB) == 3
    assert os.pwrite(fd, b"early", 0) == 5
    assert os.fstat(fd).st_size == 8 * MIB + 3
    os.close(fd)
    assert is_sealed_as(direct, "k", b"early" + bytes(8 * MIB - 5) + b"end")
    assert int(direct.get("k", "stored")) < 5 * MIB


def test_appending_descriptors_write_at_the_end(direct: Daemon) -> None:
    path = direct.mount / "k"
    first = os.open(path, WRITES | os.O_APPEND)
    second = os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in range(50):
        os.write((first, second)[number % 2], b"%03d" % number)
    os.close(second)
    os.close(first)
    assert is_sealed_as(direct, "k", b"".join(b"%03d" % number for number in range(50)))
    assert counter(direct, "writers_lent") == 2


def test_what_is_stored_through_a_shared_mapping_is_the_content(direct: Daemon) -> None:
    content = noise(2, 2 * MIB)
    fd = os.open(direct.mount / "k", BOTH)
    os.ftruncate(fd, len(content))
    with mmap.mmap(fd, len(content)) as view:
        view[:] = content
        assert os.pread(fd, 1000, MIB) == content[MIB : MIB + 1000]
        os.pwrite(fd, b"between", 10)
        assert view[10:17] == b"between"
    os.close(fd)
    assert is_sealed_as(direct, "k", content[:10] + b"between" + content[17:])


def test_a_file_can_be_shortened_and_grow_while_it_is_written(direct: Daemon) -> None:
    path = direct.mount / "k"
    fd = os.open(path, BOTH)
    os.write(fd, b"x" * 100_000)
    os.ftruncate(fd, 10)
    assert os.fstat(fd).st_size == path.stat().st_size == 10
    os.ftruncate(fd, 20)
    assert os.pread(fd, 100, 0) == b"x" * 10 + bytes(10)
    os.truncate(path, 15)
    os.pwrite(fd, b"end", 17)
    os.close(fd)
    assert is_sealed_as(direct, "k", b"x" * 10 + bytes(7) + b"end")


def test_size_blocks_and_time_are_those_of_the_moment(direct: Daemon) -> None:
    path = direct.mount / "k"
    fd = os.open(path, WRITES)
    before = os.fstat(fd)
    os.write(fd, noise(3, 4 * MIB))
    after = os.fstat(fd)
    assert after.st_size == os.lseek(fd, 0, os.SEEK_END) == 4 * MIB
    assert after.st_blocks * 512 >= 4 * MIB
    assert after.st_mtime_ns > before.st_mtime_ns
    assert int(os.getxattr(fd, "user.ctx.stored")) >= 4 * MIB
    os.utime(fd, (10, 20))
    assert os.fstat(fd).st_mtime == 20
    os.write(fd, b"more")
    assert os.fstat(fd).st_mtime > 1_000_000
    os.utime(fd, (10, 30))
    os.close(fd)
    assert is_sealed_as(direct, "k", noise(3, 4 * MIB) + b"more")
    assert path.stat().st_mtime == 30


def test_its_writer_goes_on_with_it_after_closing(direct: Daemon) -> None:
    path = direct.put("k", b"first")
    with open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b" second")
    direct.wait_sealed("k")
    with open(path, "ab") as file:
        file.write(b" third")
    assert is_sealed_as(direct, "k", b"first second third")
    assert counter(direct, "creates") == 1


def test_a_name_is_switched_to_a_file_that_is_still_written(direct: Daemon) -> None:
    direct.put("k", b"old")
    direct.wait_sealed("k")
    temporary, path = direct.mount / "k.tmp", direct.mount / "k"
    fd = os.open(temporary, WRITES)
    os.write(fd, b"new")
    assert elsewhere(path.read_bytes) == b"old"
    os.rename(temporary, path)
    assert elsewhere(path.read_bytes) == b"new"
    os.write(fd, b" and more")
    assert elsewhere(path.read_bytes) == b"new and more"
    os.close(fd)
    assert is_sealed_as(direct, "k", b"new and more")


def test_an_old_content_that_is_open_outlives_a_new_one(direct: Daemon) -> None:
    path = direct.put("k", b"old bytes")
    direct.wait_sealed("k")

    def play() -> Iterator[Any]:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            yield None
            yield file.read(), view[:]

    with Actor(play) as reader:
        reader.step()
        direct.put("k", b"new")
        assert reader.step() == (b"old bytes", b"old bytes")
    assert is_sealed_as(direct, "k", b"new")


def test_nothing_written_is_an_empty_block(direct: Daemon) -> None:
    os.close(os.open(direct.mount / "k", WRITES))
    assert is_sealed_as(direct, "k", b"")
    os.close(os.open(direct.mount / "k", WRITES))
    assert is_sealed_as(direct, "k", b"")
    assert hot(direct)["reserved_bytes"] == 0


def test_readers_see_what_is_written_at_once(direct: Daemon) -> None:
    temporary, path = direct.mount / "k.tmp", direct.mount / "k"

    def play() -> Iterator[Any]:
        with open(path, "rb", buffering=0) as file:
            for _ in range(3):
                yield file.read()
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
                yield view[:10]

    with Actor(play) as reader:  # forked before there is a descriptor to inherit
        fd = os.open(temporary, WRITES)
        os.write(fd, b"a" * 5000)
        os.rename(temporary, path)
        assert reader.step() == b"a" * 5000
        os.write(fd, b"b" * 10)
        assert reader.step() == b"b" * 10
        assert reader.step() == b""
        os.pwrite(fd, b"changed", 0)
        assert reader.step() == b"changedaaa"
        os.close(fd)
        # A reader does not keep it from being sealed.
        assert is_sealed_as(direct, "k", b"changed" + b"a" * 4993 + b"b" * 10)


def test_a_file_begun_as_a_copy_goes_through_the_daemon(direct: Daemon) -> None:
    path = direct.put("k", b"old bytes")
    direct.wait_sealed("k")
    lent = counter(direct, "writers_lent")

    def change() -> None:
        with open(path, "r+b") as file:
            file.write(b"new")

    elsewhere(change)
    assert counter(direct, "writers_lent") == lent
    assert is_sealed_as(direct, "k", b"new bytes")


# -- how it ends


def mapped_beyond_close(path: Path, content: bytes) -> Iterator[Any]:
    """Make and close a file of 1 MiB, then store through a mapping of it, then unmap that."""
    fd = os.open(path, BOTH)
    os.ftruncate(fd, MIB)
    pages = Mapping(fd, MIB)
    os.close(fd)
    yield None
    pages.write(0, content)
    yield None
    pages.close()
    yield None


def test_a_mapping_that_outlives_its_close_keeps_the_block_from_being_sealed(
    direct: Daemon,
) -> None:
    content = noise(4, MIB)
    path = direct.mount / "k"

    with Actor(partial(mapped_beyond_close, path, content)) as writer:
        writer.step()
        for _ in range(20):  # the daemon has had every opportunity
            assert direct.get("k", "state") == "writing"
            time.sleep(0.01)
        writer.step()
        assert elsewhere(path.read_bytes) == content
        writer.step()
        assert is_sealed_as(direct, "k", content)


def test_fsync_of_a_block_that_is_written_brings_it_to_the_cold_tier(cold: Daemon) -> None:
    path = cold.mount / "k"
    fd = os.open(path, BOTH)
    os.write(fd, noise(5, MIB))
    os.fsync(fd)
    with mmap.mmap(fd, MIB) as view:
        view[:4] = b"seen"
        os.fsync(fd)
        view[:4] = b"also"
        os.fsync(fd)
    os.close(fd)
    content = b"also" + noise(5, MIB)[4:]
    assert is_sealed_as(cold, "k", content)
    wait_until(lambda: cold.get("k", "copies") == "hot,cold")
    cold.set("k", "tier", "cold")
    assert cold.get("k", "copies") == "cold"
    assert elsewhere(path.read_bytes) == content


def test_fsync_of_a_closed_block_does_not_wait_for_a_mapping_to_end(cold: Daemon) -> None:
    path = cold.mount / "k"

    with Actor(partial(mapped_beyond_close, path, noise(7, MIB))) as writer:
        writer.step()
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        cold.set("k", "tier", "cold")  # carried out when it is sealed
        writer.step()
        assert cold.get("k", "copies") == "hot"
        writer.step()
    wait_until(lambda: cold.get("k", "copies") == "cold")
    assert is_sealed_as(cold, "k", noise(7, MIB))


def test_who_maps_a_block_that_left_keeps_its_bytes_when_others_come(start: Start) -> None:
    daemon = start(hot="256MiB", cold="512MiB")
    contents = {f"k{number}": noise(number, 2 * MIB) for number in range(4)}
    for key, content in contents.items():
        daemon.put(key, content)
        daemon.wait_sealed(key)
    pages = Pages(daemon.mount / "k0")
    for _ in range(3):
        for key in contents:
            daemon.set(key, "tier", "cold")
            daemon.set(key, "tier", "auto")
            assert daemon.get(key, "copies") == "cold"
        for key, content in contents.items():
            assert (daemon.mount / key).read_bytes() == content
        assert pages.content() == contents["k0"]
    pages.close()
    assert counter(daemon, "recycled") > 0


def test_a_writer_that_is_killed_leaves_nothing(direct: Daemon) -> None:
    path = direct.mount / "k"

    def play() -> Iterator[Any]:
        fd = os.open(path, WRITES)
        os.write(fd, noise(6, 5 * MIB))
        yield fd

    with Actor(play) as writer:
        writer.step()
        writer.end(signal.SIGKILL)
    wait_until(lambda: counter(direct, "discarded") == 1)
    assert not path.exists()
    wait_until(lambda: hot(direct)["used_bytes"] < 2 * MIB)
    assert hot(direct)["reserved_bytes"] == 0


def test_an_unlinked_file_is_written_on_and_its_room_comes_back(direct: Daemon) -> None:
    path = direct.mount / "k"
    fd = os.open(path, BOTH)
    os.write(fd, b"x" * MIB)
    path.unlink()
    os.write(fd, b"y" * MIB)
    assert os.fstat(fd).st_size == 2 * MIB
    assert os.pread(fd, 2, MIB - 1) == b"xy"
    os.close(fd)
    wait_until(lambda: hot(direct)["used_bytes"] < 2 * MIB)
    assert hot(direct)["reserved_bytes"] == 0
    assert hot(direct)["blocks"] == 0


def test_a_block_that_grew_past_the_largest_is_not_shown(start: Start) -> None:
    daemon = start(hot="256MiB", config='[limits]\nblock_max = "4MiB"\n')
    path = daemon.mount / "k"
    fd = os.open(path, WRITES)
    os.write(fd, bytes(5 * MIB))
    with pytest.raises(OSError, match="No space"):
        os.close(fd)
    assert not path.exists()
    fd = os.open(path, WRITES)
    os.write(fd, bytes(5 * MIB))
    os.ftruncate(fd, 3 * MIB)
    os.close(fd)
    assert is_sealed_as(daemon, "k", bytes(3 * MIB))


def test_blocks_are_found_again_after_the_daemon_was_killed(direct: Daemon) -> None:
    contents = {f"k{number}": noise(number, MIB + number) for number in range(5)}
    for key, content in contents.items():
        direct.put(key, content)
        direct.wait_sealed(key)
    direct.crash()
    for key, content in contents.items():
        assert is_sealed_as(direct, key, content)


# -- the next daemon


def test_a_writer_writes_on_while_no_daemon_lives_and_the_next_one_seals_it(
    direct: Daemon,
) -> None:
    path, content = direct.mount / "k", noise(8, 6 * MIB)
    fd = os.open(f"{path}.tmp", BOTH)
    os.write(fd, content[:MIB])
    old = direct.kill_child()
    os.write(fd, content[MIB : 3 * MIB])
    direct.wait_for_successor(old)
    os.write(fd, content[3 * MIB :])
    assert os.fstat(fd).st_size == 6 * MIB
    os.rename(f"{path}.tmp", path)
    os.close(fd)
    assert is_sealed_as(direct, "k", content)
    assert hot(direct)["reserved_bytes"] == 0


def test_the_next_daemon_does_not_seal_what_is_still_mapped(direct: Daemon) -> None:
    path, content = direct.mount / "k", noise(9, MIB)

    with Actor(partial(mapped_beyond_close, path, content)) as writer:
        writer.step()
        direct.wait_for_successor(direct.kill_child())
        assert direct.get("k", "state") == "writing"
        writer.step()
        assert direct.get("k", "state") == "writing"
        writer.step()
        assert is_sealed_as(direct, "k", content)


# -- room


def test_the_cap_holds_at_every_moment_with_64_writers_and_64_readers(direct: Daemon) -> None:
    capacity = 256 * MIB
    done = threading.Event()
    samples: list[tuple[int, int]] = []

    def watch() -> None:
        while not done.wait(0.02):
            usage = os.statvfs(direct.state / "hot")
            physical = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
            samples.append((physical, hot(direct)["used_bytes"]))

    def write(number: int) -> None:
        for turn in range(8):
            path = direct.mount / f"w{number}-{turn}"
            length = (256 << 10) + (number * 37 + turn * 131) % 900 * 4096
            fd = os.open(f"{path}.tmp", WRITES)
            assert os.write(fd, bytes([number]) * length) == length
            os.close(fd)
            os.rename(f"{path}.tmp", path)

    def read(number: int) -> None:
        for turn in range(40):
            owner = (number * 7 + turn * 13) % 64
            content = read_or_none(direct.mount / f"w{owner}-{turn % 8}")
            assert content is None or set(content[::4096]) == {owner}

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        together([partial(write, n) for n in range(64)] + [partial(read, n) for n in range(64)])
    finally:
        done.set()
        watcher.join()
    assert len(samples) > 5
    assert max(physical for physical, _ in samples) <= capacity
    assert max(used for _, used in samples) <= capacity
    assert counter(direct, "evicted") > 0
    assert counter(direct, "writers_lent") > 0
    wait_until(lambda: direct.stats()["blocks"]["writing"] == 0)
    assert hot(direct)["reserved_bytes"] == 0


def test_lent_writers_into_a_full_store_evict(direct: Daemon) -> None:
    for number in range(120):
        direct.put(f"old{number}", noise(number, 2 * MIB))
        assert hot(direct)["used_bytes"] <= 256 * MIB

    def write(number: int) -> None:
        for turn in range(6):
            direct.put(f"new{number}-{turn}", bytes([number]) * 8 * MIB)

    together([partial(write, number) for number in range(8)])
    assert counter(direct, "no_space") == 0
    newest = [direct.mount / f"new{number}-5" for number in range(8)]
    for number, path in enumerate(newest):
        assert path.read_bytes() == bytes([number]) * 8 * MIB


def test_room_of_a_writer_that_rests_is_for_others(direct: Daemon) -> None:
    fd = os.open(direct.mount / "rests", WRITES)
    os.write(fd, b"x")
    assert hot(direct)["reserved_bytes"] > 0
    wait_until(lambda: hot(direct)["reserved_bytes"] == 0)
    os.write(fd, bytes(MIB))
    wait_until(lambda: hot(direct)["reserved_bytes"] > 0)
    os.close(fd)
    assert is_sealed_as(direct, "rests", b"x" + bytes(MIB))
    assert hot(direct)["reserved_bytes"] == 0


def test_a_small_hot_tier_is_written_through_the_daemon(start: Start) -> None:
    daemon = start(hot="64MiB")
    daemon.put("k", noise(1, MIB))
    assert is_sealed_as(daemon, "k", noise(1, MIB))
    assert counter(daemon, "writers_lent") == 0


def test_files_written_without_us_have_huge_pages_where_there_are_any(direct: Daemon) -> None:
    if not direct.stats()["tiers"]["hot"]["huge_pages"]:
        pytest.skip("this kernel gives no huge pages to tmpfs")
    path = direct.put("k", noise(1, 4 * MIB))
    assert path.stat().st_blocks * 512 == 4 * MIB
    direct.put("small", noise(2, 5000))
    assert Path(direct.mount / "small").stat().st_blocks * 512 <= 2 * MIB
