"""The hot tier's cap, what leaves for room, and what never does."""

import os
from dataclasses import replace

import pytest
import trio

from ctxfs.errors import BlockNotFound, TierFull
from ctxfs.store.store import NewOwner
from ctxfs.tiers.hot import HotFile
from tests.store.world import MIB, OWNER, World, get, get_attribute, put, set_attribute


def content(number: int, size: int = MIB) -> bytes:
    return b"%08d" % number * (size // 8)


async def test_filling_three_times_the_cap_never_exceeds_it(hot_world: World) -> None:
    # LMCache#1454: 460 GB used with a 250 GB cap
    async with hot_world.store() as store:
        for number in range(48):
            await put(store, f"k{number}", content(number))
            assert store.catalog.hot.used_bytes <= store.catalog.hot.capacity_bytes
        assert store.catalog.counters.evicted > 30
        assert await get(store, "k47") == content(47)
        with pytest.raises(BlockNotFound):
            await get(store, "k0")


async def test_a_full_hot_tier_demotes_and_loses_nothing(world: World) -> None:
    async with world.store() as store:
        for number in range(40):
            await put(store, f"k{number}", content(number))
        assert store.catalog.counters.evicted == 0
        for number in range(40):
            assert await get(store, f"k{number}") == content(number)
        assert store.catalog.counters.promoted > 0


async def test_the_block_opened_longest_ago_leaves_first(hot_world: World) -> None:
    # Mooncake#2187: looking is not use
    async with hot_world.store() as store:
        for number in range(12):
            await put(store, f"k{number}", content(number))
        await get(store, "k0")
        get_attribute(store, "k1", "story")
        store.find(store.catalog.names.root, b"k1", None)
        for number in range(12, 18):
            await put(store, f"k{number}", content(number))
        assert await get(store, "k0") == content(0)
        with pytest.raises(BlockNotFound):
            await get(store, "k1")


async def test_pinned_block_survives_full_tier(hot_world: World) -> None:
    async with hot_world.store() as store:
        await put(store, "pinned", content(1))
        await set_attribute(store, "pinned", "pin", "1")
        for number in range(40):
            await put(store, f"k{number}", content(number))
        assert await get(store, "pinned") == content(1)


async def test_a_pin_with_a_duration_lapses(hot_world: World) -> None:
    async with hot_world.store() as store:
        await put(store, "pinned", content(1))
        await set_attribute(store, "pinned", "pin", "10s")
        assert float(get_attribute(store, "pinned", "pin")) == pytest.approx(10)
        hot_world.clock.pass_s(11)
        assert get_attribute(store, "pinned", "pin") == "0"
        for number in range(20):
            await put(store, f"k{number}", content(number))
        with pytest.raises(BlockNotFound):
            await get(store, "pinned")


async def test_when_everything_is_pinned_a_put_fails_at_once(
    hot_world: World, autojump_clock: object
) -> None:
    async with hot_world.store() as store:
        for number in range(14):
            await put(store, f"k{number}", content(number))
            await set_attribute(store, f"k{number}", "pin", "1")
        before = trio.current_time()
        with pytest.raises(TierFull):
            await put(store, "one more", content(99, 4 * MIB))
        assert trio.current_time() - before <= hot_world.limits.room_wait_s + 2


async def test_a_block_larger_than_the_tier_is_refused_at_once(hot_world: World) -> None:
    async with hot_world.store() as store:
        await put(store, "small", b"x")
        root = store.catalog.names.root
        handle = await store.create(root, b"big", NewOwner(0, 0, 0o600), OWNER, os.O_WRONLY)
        big = content(1, 32 * MIB)
        with pytest.raises(TierFull):
            await store.content.write(handle, 0, big)
        store.release(handle)
        assert store.catalog.hot.reserved_bytes == 0
        await put(store, "after", content(1))


async def test_a_leased_block_is_not_evicted_and_waiters_get_its_room(hot_world: World) -> None:
    hot_world.limits = replace(hot_world.limits, room_wait_s=30.0)
    async with hot_world.store() as store:
        blocks = [await put(store, f"k{number}", content(number)) for number in range(14)]
        handles = [await store.open_for_read(block, owner=1) for block in blocks]
        done = trio.Event()

        async def waiter() -> None:
            await put(store, "late", content(77, 4 * MIB))
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiter)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not done.is_set()
            for number, handle in enumerate(handles):
                assert bytes(store.content.read(handle, 0, MIB)) == content(number)
                store.release(handle)
        assert await get(store, "late") == content(77, 4 * MIB)


async def test_a_temporary_name_is_not_moved_before_it_is_renamed(world: World) -> None:
    async with world.store() as store:
        await put(store, "a.tmp.1", content(1))
        for number in range(20):
            await put(store, f"k{number}", content(number))
        assert get_attribute(store, "a.tmp.1", "copies") == "hot"
        world.clock.pass_s(31)
        for number in range(20, 40):
            await put(store, f"k{number}", content(number))
        assert get_attribute(store, "a.tmp.1", "copies") == "cold"


async def test_a_full_cold_tier_evicts_its_least_recently_used(world: World) -> None:
    async with world.store() as store:
        for number in range(120):
            await put(store, f"k{number}", content(number))
        assert store.catalog.counters.evicted > 0
        assert store.catalog.counters.no_space == 0
        assert await get(store, "k119") == content(119)
        with pytest.raises(BlockNotFound):
            await get(store, "k0")
        found = 0
        for number in range(119, 0, -1):  # reading promotes, which makes others go
            try:
                assert await get(store, f"k{number}") == content(number)
            except BlockNotFound:
                continue
            found += 1
        assert found > 40


async def test_a_together_directory_is_evicted_whole(hot_world: World) -> None:
    # vLLM ExampleConnector takes the directory as the hit
    async with hot_world.store() as store:
        names = store.catalog.names
        directory = store.catalog.make_directory(names.root, b"prompt")
        directory.together = True
        for number in range(4):
            block = await put(store, f"layer{number}", content(number))
            store.rename(block, directory, b"layer%d" % number)
        for number in range(14):
            await put(store, f"k{number}", content(number))
        assert names.find(names.root, b"prompt") is None
        assert directory.removed


async def test_a_tier_without_inodes_left_evicts_empty_blocks(
    hot_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hot_world.store() as store:
        hot = store.catalog.hot
        create = hot.create

        def create_among_few(generation: int) -> HotFile:
            if store.catalog.block_count > 100:
                raise TierFull("no inode")
            return create(generation)

        monkeypatch.setattr(hot, "create", create_among_few)
        for number in range(150):
            await put(store, f"k{number}", b"")
        assert store.catalog.counters.evicted >= 50
        assert await get(store, "k149") == b""
