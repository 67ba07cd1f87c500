"""A hot tier that is full: the cap holds, what may go goes, and nobody hangs."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

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

# So long that waiting in vain for room is a test that does not end.
PATIENT = '[hot]\nroom_wait = "10m"\n'


def hot(daemon: Daemon) -> dict[str, int]:
    facts: dict[str, int] = daemon.stats()["tiers"]["hot"]
    return facts


def physical_bytes(daemon: Daemon) -> int:
    usage = os.statvfs(daemon.state / "hot")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def fill(daemon: Daemon, count: int, length: int = MIB) -> list[Path]:
    paths = [daemon.put(f"block{number:04d}", noise(number, length)) for number in range(count)]
    for path in paths[-3:]:
        if path.exists():
            daemon.wait_sealed(path.name)
    return paths


def test_cap_holds_at_every_moment_with_64_writers_and_64_readers(
    start: Callable[..., Daemon],
) -> None:
    # LMCache#1454, LMCache#1399: one cap, however many clients
    daemon = start(hot="48MiB")
    capacity = 48 * MIB
    done = threading.Event()
    samples: list[tuple[int, int]] = []

    def watch() -> None:
        while not done.wait(0.02):
            facts = hot(daemon)
            samples.append((physical_bytes(daemon), facts["used_bytes"]))

    def write(number: int) -> None:
        for turn in range(8):
            path = daemon.mount / f"w{number}-{turn}"
            temporary = path.with_suffix(".tmp")
            length = (64 << 10) + (number * 37 + turn * 131) % 900 * 1024
            with open(temporary, "wb", buffering=0) as file:
                assert file.write(bytes([number]) * length) == length
            os.rename(temporary, path)

    def read(number: int) -> None:
        for turn in range(40):
            owner = (number * 7 + turn * 13) % 64
            content = read_or_none(daemon.mount / f"w{owner}-{turn % 8}")
            assert content is None or set(content[::4096]) == {owner}

    watcher = threading.Thread(target=watch)
    watcher.start()
    jobs = [partial(write, n) for n in range(64)] + [partial(read, n) for n in range(64)]
    try:
        together(jobs)
    finally:
        done.set()
        watcher.join()
    assert len(samples) > 5
    assert max(physical for physical, _ in samples) <= capacity
    assert max(used for _, used in samples) <= capacity
    counters = daemon.stats()["counters"]
    assert counters["evicted"] > 0
    assert counters["no_space"] == 0


def test_fill_three_times_over_keeps_the_newest(hot_only: Daemon) -> None:
    paths = fill(hot_only, 200)
    held = [path for path in paths if path.exists()]
    assert 40 < len(held) < 64
    assert held == paths[-len(held) :]
    total = sum(path.stat().st_blocks * 512 for path in hot_only.mount.iterdir())
    assert total <= hot(hot_only)["used_bytes"] <= 64 * MIB
    for number, path in enumerate(paths):
        if path in held:
            assert path.read_bytes() == noise(number, MIB)


def test_block_larger_than_the_tier_is_refused_at_once(start: Callable[..., Daemon]) -> None:
    daemon = start(config=PATIENT)
    for length in (63 * MIB + 1, 65 * MIB, 300 * MIB):
        with pytest.raises(OSError, match="No space") as caught:
            daemon.put("large", bytes(length))
        assert caught.value.errno == errno.ENOSPC
        (daemon.mount / "large").unlink(missing_ok=True)
    wait_until(lambda: physical_bytes(daemon) < MIB)
    content = noise(1, 60 * MIB)
    assert daemon.put("fits", content).read_bytes() == content


def test_tier_full_of_pinned_blocks_refuses_at_once(start: Callable[..., Daemon]) -> None:
    daemon = start(config=PATIENT)
    pinned = []
    for number in range(60):
        pinned.append(daemon.put(f"pinned{number}", noise(number, MIB)))
        daemon.set(pinned[-1].name, "pin", "1")
    with pytest.raises(OSError, match="No space"):
        daemon.put("one-too-many", bytes(8 * MIB))
    for number, path in enumerate(pinned):
        assert path.read_bytes() == noise(number, MIB)
    (daemon.mount / "one-too-many").unlink(missing_ok=True)
    daemon.set(pinned[0].name, "pin", "0")
    daemon.wait_sealed(pinned[0].name)
    daemon.put("fits-now", noise(1, MIB))
    daemon.put("and-another", noise(2, MIB))
    assert not pinned[0].exists()


def test_writers_that_all_wait_for_each_other_are_not_left_hanging(
    start: Callable[..., Daemon],
) -> None:
    daemon = start(config=PATIENT)

    def write(number: int) -> str:
        path = daemon.mount / f"big{number}.tmp"
        try:
            path.write_bytes(bytes([number]) * 24 * MIB)
        except OSError as error:
            assert not path.exists()
            return os.strerror(error.errno or 0)
        try:
            os.rename(path, daemon.mount / f"big{number}")
        except FileNotFoundError:
            return "too late"  # on a machine so busy that the grace was over before the rename
        return "written"

    answers = together([partial(write, number) for number in range(8)])
    assert set(answers) <= {"written", "too late", os.strerror(errno.ENOSPC)}
    assert "written" in answers
    wait_until(lambda: daemon.stats()["blocks"]["writing"] == 0)
    for path in daemon.mount.iterdir():
        assert set(path.read_bytes()[::4096]) == {int(path.name.removeprefix("big"))}


def test_the_least_recently_opened_goes_first(hot_only: Daemon) -> None:
    fill(hot_only, 50)
    used = hot_only.mount / "block0000"
    assert used.read_bytes() == noise(0, MIB)
    fill_more = [hot_only.put(f"more{number}", noise(number, MIB)) for number in range(20)]
    assert fill_more[-1].exists()
    assert used.exists()
    assert not (hot_only.mount / "block0001").exists()


def test_looking_is_not_use(hot_only: Daemon) -> None:
    # Mooncake#2187: exists() renewed leases for ever
    fill(hot_only, 50)
    looked_at = hot_only.mount / "block0000"
    for number in range(30):
        for _ in range(5):
            with contextlib.suppress(FileNotFoundError):  # it may go between two looks
                looked_at.stat()
                os.listdir(hot_only.mount)
                os.listxattr(looked_at)
        hot_only.put(f"more{number}", noise(number, MIB))
    assert not looked_at.exists()


def open_and_mapped(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        yield None
        yield file.read() == bytes(view) and bytes(view)


@pytest.mark.parametrize("how", ["evicted", "unlinked", "expired", "overwritten"])
def test_open_and_mapped_block_keeps_its_bytes_and_then_gives_its_room_back(
    hot_only: Daemon, how: str
) -> None:
    content = noise(99, 5 * MIB)
    path = hot_only.put("held", content)
    hot_only.wait_sealed("held")
    before = hot(hot_only)["used_bytes"]
    with Actor(lambda: open_and_mapped(path)) as reader:
        reader.step()
        if how == "evicted":
            fill(hot_only, 200)
        elif how == "unlinked":
            path.unlink()
        elif how == "expired":
            hot_only.set("held", "ttl", "0.1")
            wait_until(lambda: not path.exists())
        else:
            path.write_bytes(b"new")
        if how != "evicted":  # what is open does not go for room
            assert hot(hot_only)["used_bytes"] > before - MIB
        assert reader.step() == content
    if how != "evicted":
        wait_until(lambda: hot(hot_only)["used_bytes"] < before - 4 * MIB)
        wait_until(lambda: physical_bytes(hot_only) < 3 * MIB)


def test_mapping_without_descriptor_keeps_its_bytes_when_the_block_is_unlinked(
    hot_only: Daemon,
) -> None:
    # the mapping alone holds the file
    content = noise(5, MIB)
    path = hot_only.put("mapped", content)
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    path.unlink()
    fill(hot_only, 100)
    assert bytes(view) == content
    view.close()


def test_room_of_deleted_blocks_can_be_used_at_once(hot_only: Daemon) -> None:
    for turn in range(20):
        path = hot_only.put("same", bytes([turn]) * 40 * MIB)
        assert path.stat().st_size == 40 * MIB
        path.unlink()
    assert hot_only.stats()["counters"]["evicted"] == 0


def test_full_statvfs_stays_honest(hot_only: Daemon) -> None:
    # Mooncake#2783, and cleaners that start at a percentage of f_blocks
    empty = os.statvfs(hot_only.mount)
    assert empty.f_bsize == empty.f_frsize == 4096
    assert empty.f_blocks * 4096 == 64 * MIB
    hot_only.put("block", noise(1, 20 * MIB))
    part = os.statvfs(hot_only.mount)
    assert (empty.f_bavail - part.f_bavail) * 4096 == pytest.approx(20 * MIB, abs=MIB)
    fill(hot_only, 100)
    full = os.statvfs(hot_only.mount)
    assert 0 <= full.f_bavail * 4096 < 10 * MIB
    assert full.f_bavail <= full.f_bfree


def test_sparse_blocks_take_only_the_room_they_use(hot_only: Daemon) -> None:
    path = hot_only.mount / "sparse"
    with open(path, "wb") as file:
        file.truncate(60 * MIB)
        file.seek(30 * MIB)
        file.write(b"x")
    hot_only.wait_sealed("sparse")
    assert path.stat().st_size == 60 * MIB
    assert path.stat().st_blocks * 512 <= 3 * MIB
    assert elsewhere(path.read_bytes) == bytes(30 * MIB) + b"x" + bytes(30 * MIB - 1)
    assert path.stat().st_blocks * 512 <= 3 * MIB  # reading it fills nothing in


def test_mixed_sizes_leave_no_room_behind(hot_only: Daemon) -> None:
    # LMCache#3187, LMCache#1285: allocator exhaustion and fragmentation
    for turn in range(150):
        hot_only.put(f"mixed{turn % 40}", bytes((turn * 7919) % (6 * MIB) + 1))
    for path in hot_only.mount.iterdir():
        path.unlink()
    wait_until(lambda: physical_bytes(hot_only) < 2 * MIB)
    assert hot(hot_only)["used_bytes"] < 3 * MIB
    assert hot(hot_only)["reserved_bytes"] == 0


def test_more_sparse_blocks_than_memory_harm_nobody(start: Callable[..., Daemon]) -> None:
    # a mapping of a hole takes memory, and SIGBUS is what there is when none is left
    daemon = start(cold="512MiB")
    for number in range(5):
        with open(daemon.mount / f"sparse{number}", "wb") as file:
            file.truncate(60 * MIB)
    for number in range(5):
        daemon.wait_sealed(f"sparse{number}")
        assert (daemon.mount / f"sparse{number}").read_bytes() == bytes(60 * MIB)
    daemon.set("sparse0", "tier", "cold")
    assert (daemon.mount / "sparse0").read_bytes() == bytes(60 * MIB)
    assert physical_bytes(daemon) <= 64 * MIB


@pytest.fixture
def crammed(start: Callable[..., Daemon]) -> Daemon:
    """A daemon whose hot tier is full of pinned blocks but for some MiB."""
    daemon = start(config=PATIENT)
    for number in range(50):
        daemon.put(f"pinned{number}", noise(number, MIB))
        daemon.set(f"pinned{number}", "pin", "1")
    return daemon


def put_without_looking(path: Path) -> int:
    """Write as LMCache does: one call, whose result nobody looks at."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        return os.write(fd, bytes(24 * MIB))
    finally:
        os.close(fd)


def test_block_that_lacks_refused_bytes_is_never_shown(crammed: Daemon) -> None:
    # LMCache local_disk ignores a short write, and serves a truncated block later
    old = crammed.put("block", b"old")
    crammed.set("block", "pin", "1")
    for path in (old, crammed.mount / "other"):
        with pytest.raises(OSError, match="No space"):  # at close at the latest
            put_without_looking(path)
    assert old.read_bytes() == b"old"
    assert not (crammed.mount / "other").exists()
    assert crammed.stats()["counters"]["discarded"] == 2
    assert elsewhere(lambda: sorted(os.listdir(crammed.mount))[0]) == "block"


def test_block_that_lacks_refused_bytes_is_not_renamed(crammed: Daemon) -> None:
    temporary, final = crammed.mount / "b.tmp", crammed.mount / "b"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o644)
    assert os.write(fd, bytes(24 * MIB)) < 24 * MIB
    with pytest.raises(OSError, match="No space"):
        os.rename(temporary, final)
    with pytest.raises(OSError, match="No space"):
        os.close(fd)
    assert not final.exists()
    wait_until(lambda: not temporary.exists())


def test_mapped_pages_that_had_no_room_are_not_served_as_zeros(crammed: Daemon) -> None:
    path = crammed.mount / "mapped"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, 24 * MIB)
    view = mmap.mmap(fd, 0)
    view[:] = b"x" * (24 * MIB)
    with pytest.raises(OSError, match="No space"):
        view.flush()
    view.close()
    with contextlib.suppress(OSError):
        os.close(fd)
    wait_until(lambda: crammed.stats()["blocks"]["writing"] == 0)
    assert not path.exists()


def test_writer_that_tries_again_when_there_is_room_has_its_block(crammed: Daemon) -> None:
    path, content = crammed.mount / "again", noise(1, 24 * MIB)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    done = os.write(fd, content)
    with pytest.raises(OSError, match="No space"):
        os.write(fd, content[done:])
    for number in range(30):
        crammed.set(f"pinned{number}", "pin", "0")
    while done < len(content):
        done += os.write(fd, content[done:])
    os.close(fd)
    assert elsewhere(path.read_bytes) == content
