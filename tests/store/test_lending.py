"""What the store knows of files that the kernel writes, with a kernel that is played here."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel

from ctxfs.codec.digest import digest
from ctxfs.core.block import Block, State
from ctxfs.store.grants import GRANT_MIN_BYTES
from ctxfs.store.handle import Handle, Way
from ctxfs.store.store import NewOwner, Store
from ctxfs.tiers.hot import HotTier
from tests.store.world import MIB, OWNER, World, get, put, set_attribute

WHO = NewOwner(0, 0, 0o644)
HOT_BYTES = 256 * MIB


@pytest.fixture
def lone_world(hot_world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Hot 256 MiB alone, which passes for a tmpfs of its own."""
    return as_lone(hot_world, monkeypatch)


def as_lone(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(HotTier, "orphaned_bytes", 0)
    world.hot_bytes = HOT_BYTES
    return world


@asynccontextmanager
async def lending_store(world: World) -> AsyncIterator[Store]:
    world.is_alone = True
    async with world.store() as store:
        yield store


async def create(store: Store, name: str, *, lock: bool = False, mode: int = 0o644) -> Handle:
    root = store.catalog.names.root
    who = NewOwner(0, 0, mode)
    handle = await store.create(root, name.encode(), who, OWNER, os.O_WRONLY | os.O_TRUNC)
    assert handle.block.mode == mode
    return handle


def opened(handle: Handle) -> int:
    """What the kernel does with a file it was lent: open it anew."""
    return os.open(f"/proc/self/fd/{handle.file.fd}", os.O_RDWR)


def close(store: Store, handle: Handle, fd: int) -> None:
    os.close(fd)
    store.publish_on_close(handle)
    store.release(handle)


def is_sealed(block: Block) -> bool:
    return block.state is State.SEALED


async def lent(store: Store, name: str) -> tuple[Handle, int]:
    handle = await create(store, name)
    assert store.lending.lend(handle) == handle.file.fd
    return handle, opened(handle)


async def test_size_and_room_follow_the_file(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        hot = store.catalog.hot
        handle, fd = await lent(store, "k")
        block, granted = handle.block, hot.reserved_bytes
        assert granted >= GRANT_MIN_BYTES
        os.pwrite(fd, b"x" * MIB, 0)
        used = hot.used_bytes
        store.content.refresh(block)
        assert (block.size, block.hot_bytes) == (MIB, MIB)
        assert hot.used_bytes == used + MIB
        assert hot.reserved_bytes == granted - MIB  # what is used is not set aside as well
        close(store, handle, fd)
        await store.sealing.wait_sealed(block)
        assert block.digest == digest(b"x" * MIB)
        assert hot.reserved_bytes == 0
        assert await get(store, "k") == b"x" * MIB


async def test_a_block_is_not_sealed_before_nobody_can_write_it(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        handle, fd = await lent(store, "k")
        os.ftruncate(fd, MIB)
        view = mmap.mmap(fd, MIB)
        os.close(fd)
        store.publish_on_close(handle)
        store.release(handle)
        block = handle.block
        await store.sealing.wait_sealed(block)  # says so rather than wait for somebody's mapping
        assert not is_sealed(block)
        view[:5] = b"later"
        view.close()
        with trio.fail_after(20):
            while not is_sealed(block):
                await store.sealing.wait_sealed(block)
                await trio.lowlevel.checkpoint()
        assert block.digest == digest(b"later" + bytes(MIB - 5))


async def test_a_reader_does_not_keep_a_block_from_being_sealed(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        handle, fd = await lent(store, "k")
        os.write(fd, b"content")
        reader = os.open(f"/proc/self/fd/{handle.file.fd}", os.O_RDONLY)
        close(store, handle, fd)
        await store.sealing.wait_sealed(handle.block)
        assert handle.block.digest == digest(b"content")
        os.close(reader)


async def test_all_opens_of_a_block_go_one_way(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        lending = store.lending
        handle, fd = await lent(store, "k")
        reader = await store.open_for_read(handle.block, OWNER)
        assert lending.lend(reader) == handle.file.fd
        second = await store.open_for_write(handle.block, OWNER, os.O_WRONLY)
        assert lending.lend(second) == handle.file.fd
        store.release(second)
        store.release(reader)
        close(store, handle, fd)

        kept = await create(store, "kept")
        lending.keep(kept)
        reader = await store.open_for_read(kept.block, OWNER)
        assert lending.lend(reader) is None
        store.release(reader)
        store.release(kept)


@pytest.mark.parametrize(
    ("name", "mode"), [("k.lock", 0o644), ("setuid", 0o4755), ("setgid", 0o2755)]
)
async def test_what_needs_each_write_seen_is_kept(lone_world: World, name: str, mode: int) -> None:
    async with lending_store(lone_world) as store:
        handle = await create(store, name, mode=mode)
        assert store.lending.lend(handle) is None
        store.release(handle)


async def test_a_copy_of_old_bytes_is_kept_as_long_as_it_is_written(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        await put(store, "k", b"old")
        root = store.catalog.names.root
        handle = await store.create(root, b"k", WHO, OWNER + 1, os.O_WRONLY)
        assert handle.block.size == 3
        assert store.lending.lend(handle) is None
        store.release(handle)


async def test_a_tier_that_others_share_or_that_is_small_is_not_written_without_us(
    hot_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hot_world.store() as store:
        handle = await create(store, "shared")
        assert store.lending.lend(handle) is None
        store.release(handle)
    as_lone(hot_world, monkeypatch).hot_bytes = 64 * MIB
    async with lending_store(hot_world) as store:
        handle = await create(store, "small")
        assert store.lending.lend(handle) is None
        store.release(handle)


async def test_without_room_for_a_grant_an_open_is_kept(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        hot = store.catalog.hot
        taken = hot.room_bytes - MIB
        assert hot.try_reserve(taken)
        handle = await create(store, "k")
        assert store.lending.lend(handle) is None
        hot.unreserve(taken)
        await store.content.write(handle, 0, b"by us")
        handle.wrote = True
        store.publish_on_close(handle)
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)


async def test_grants_together_leave_most_of_the_tier_to_blocks(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        handles = [await create(store, f"k{number}") for number in range(20)]
        lent_to = [handle for handle in handles if store.lending.lend(handle) is not None]
        assert 2 <= len(lent_to) < 20
        assert store.catalog.hot.reserved_bytes <= HOT_BYTES // 4
        for handle in handles:
            store.release(handle)
        assert store.catalog.hot.reserved_bytes == 0


async def test_a_grant_is_filled_up_by_evicting_as_the_file_grows(
    lone_world: World, autojump_clock: object
) -> None:
    async with lending_store(lone_world) as store:
        hot = store.catalog.hot
        for number in range(100):
            await put(store, f"k{number}", bytes(2 * MIB))
        handle, fd = await lent(store, "large")
        for start in range(0, 128, 4):
            os.pwrite(fd, bytes(4 * MIB), start * MIB)
            await trio.sleep(0.1)
            assert handle.file.granted_bytes >= GRANT_MIN_BYTES // 2
            assert hot.room_bytes >= 0
        assert store.catalog.counters.evicted > 20
        close(store, handle, fd)
        await store.sealing.wait_sealed(handle.block)
        assert handle.block.size == 128 * MIB
        assert hot.reserved_bytes == 0


async def test_a_resting_writer_gives_its_grant_back_and_gets_it_again(
    lone_world: World, autojump_clock: object
) -> None:
    async with lending_store(lone_world) as store:
        hot = store.catalog.hot
        handle, fd = await lent(store, "k")
        await trio.sleep(3)
        assert hot.reserved_bytes == 0
        os.write(fd, b"more")
        await trio.sleep(0.2)
        assert hot.reserved_bytes >= GRANT_MIN_BYTES - MIB
        close(store, handle, fd)
        await store.sealing.wait_sealed(handle.block)


async def test_what_is_kept_after_all_is_counted_as_such(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        handle = await create(store, "k")
        assert store.lending.lend(handle) is not None
        store.lending.keep(handle)  # the kernel would not have it
        assert (handle.file.lent, handle.file.kept) == (0, 1)
        assert store.catalog.counters.writers_lent == 0
        await store.content.write(handle, 0, b"by us")
        store.publish_on_close(handle)
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)
        assert handle.block.digest == digest(b"by us")
        assert store.catalog.hot.reserved_bytes == 0


async def test_a_write_that_comes_to_us_after_all_is_served(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        handle, fd = await lent(store, "k")
        os.write(fd, b"without")
        assert await store.content.write(handle, 7, b" and with us") == 12
        assert bytes(store.content.read(handle, 0, 100)) == b"without and with us"
        await store.content.truncate(handle.block, 11, handle)
        assert os.pread(fd, 100, 0) == b"without and"
        close(store, handle, fd)
        await store.sealing.wait_sealed(handle.block)
        assert handle.block.digest == digest(b"without and")


async def test_a_discarded_writer_leaves_neither_file_nor_grant(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        hot = store.catalog.hot
        before = hot.used_bytes
        handle, fd = await lent(store, "k")
        os.write(fd, bytes(MIB))
        os.close(fd)
        store.release(handle)
        assert handle.block.is_gone
        assert (hot.used_bytes, hot.reserved_bytes) == (before, 0)
        assert not list((lone_world.path / "blocks").iterdir())


async def test_what_was_written_while_no_daemon_lived_is_found(lone_world: World) -> None:
    async with lending_store(lone_world) as store:
        handle, fd = await lent(store, "k")
        block, file = handle.block, handle.file
        os.write(fd, b"unseen")
        store.lending.over(block)  # nothing is known of it any more
        successor = store.resume(block, OWNER, writable=True, wrote=True, way=Way.LENT)
        assert successor is not None
        assert (block.size, file.lent) == (6, 2)
        store.release(handle)
        os.write(fd, b" and more")
        close(store, successor, fd)
        await store.sealing.wait_sealed(block)
        assert block.digest == digest(b"unseen and more")
        assert store.catalog.hot.reserved_bytes == 0


async def test_fsync_writes_a_copy_of_what_may_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lending_store(as_lone(world, monkeypatch)) as store:
        handle, fd = await lent(store, "k")
        block = handle.block
        os.write(fd, bytes(MIB))
        with mmap.mmap(fd, MIB) as view:
            for number in range(3):  # nothing that stat shows changes
                view[:8] = b"%08d" % number
                await store.sealing.sync(block)
                assert store.catalog.shadows[block.generation].digest == digest(view[:])
        close(store, handle, fd)
        await store.sealing.wait_sealed(block)
        assert block.digest == digest(b"00000002" + bytes(MIB - 8))


async def test_a_promotion_takes_the_memory_of_a_block_that_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.hot_bytes = 64 * MIB
    async with world.store() as store:
        hot = store.catalog.hot
        for name in ("a", "b"):
            await put(store, name, name.encode() * MIB)
            await set_attribute(store, name, "tier", "cold")
            await set_attribute(store, name, "tier", "auto")
        assert len(hot.spares) == 2
        used = hot.used_bytes
        assert await get(store, "a") == b"a" * MIB
        assert store.catalog.counters.recycled == 1
        assert hot.used_bytes == used
        assert len(hot.spares) == 1
        assert hot.try_reserve(hot.room_bytes + MIB)  # they are the first to go
        assert len(hot.spares) == 0
        hot.unreserve(hot.reserved_bytes)


async def test_spares_of_a_former_life_are_gone(world: World) -> None:
    async with world.store() as store:
        await put(store, "a", b"a" * MIB)
        await set_attribute(store, "a", "tier", "cold")
        assert [file.suffix for file in (world.path / "blocks").iterdir()] == [".spare"]
    async with world.store() as store:
        assert not list((world.path / "blocks").iterdir())
        assert await get(store, "a") == b"a" * MIB
