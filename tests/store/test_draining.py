"""Who goes, and who stays, when a cold device is drained and the others are full."""

from __future__ import annotations

import os
from dataclasses import replace

from ctxfs.core.block import Directory
from ctxfs.store.coding import CodingSettings
from ctxfs.store.draining import Draining
from ctxfs.store.store import Store
from ctxfs.tiers.cold import ColdDevice, ColdTier
from ctxfs.tiers.cold_leaving import LeavingState
from tests.fakes import MemoryEngine
from tests.store.world import MIB, World, get, put, set_attribute

COUNT = 20


async def put_cold(store: Store, count: int = COUNT, size: int = MIB) -> list[bytes]:
    """Blocks that only the cold tier has, the first used longest ago."""
    contents = [os.urandom(size) for _ in range(count)]
    for number, content in enumerate(contents):
        block = await put(store, f"b{number}", content)
        await store.mover.demoter.demote(block)
    return contents


async def add(store: Store, size_bytes: int) -> ColdTier:
    cold = store.catalog.cold
    assert cold is not None
    await cold.add_device(ColdDevice("second", MemoryEngine(size_bytes)), list)
    return cold


async def drain(store: Store) -> LeavingState:
    run = Draining(store.catalog, store.mover).begin("memory")
    await run.run()
    return run.leaving.state


def there(store: Store) -> set[str]:
    return {name.decode() for name in store.catalog.names.root.entries}


async def test_longest_unused_blocks_go_for_room(world: World) -> None:
    async with world.store() as store:
        contents = await put_cold(store)
        cold = await add(store, 20 * MIB)
        assert await drain(store) is LeavingState.DRAINED
        left = there(store)
        assert 0 < len(left) < COUNT
        assert left == {f"b{number}" for number in range(COUNT - len(left), COUNT)}
        assert store.catalog.counters.evicted == COUNT - len(left)
        assert await get(store, f"b{COUNT - 1}") == contents[-1]
        assert sum(each.blocks for each in cold.statistics()) == len(left)


async def test_pinned_blocks_and_those_placed_on_cold_stay(world: World) -> None:
    async with world.store() as store:
        contents = await put_cold(store)
        await set_attribute(store, "b0", "pin", "1")
        await set_attribute(store, "b1", "tier", "cold")
        await add(store, 20 * MIB)
        assert await drain(store) is LeavingState.DRAINED
        assert {"b0", "b1"} < there(store)
        assert "b2" not in there(store)
        assert await get(store, "b1") == contents[1]


async def test_drain_needs_room_where_nobody_may_go_and_nobody_does(world: World) -> None:
    async with world.store() as store:
        contents = await put_cold(store)
        for number in range(COUNT):
            await set_attribute(store, f"b{number}", "pin", "1")
        await add(store, 20 * MIB)
        assert await drain(store) is LeavingState.NEEDS_ROOM
        assert len(there(store)) == COUNT
        for number, content in enumerate(contents):
            assert await get(store, f"b{number}") == content
        for number in range(COUNT):
            await set_attribute(store, f"b{number}", "pin", "0")
        assert await drain(store) is LeavingState.DRAINED


async def test_block_in_a_together_directory_stays_with_one_that_is_placed_here(
    world: World,
) -> None:
    async with world.store() as store:
        await put_cold(store)
        root = store.catalog.names.root
        directory = store.catalog.make_directory(root, b"d")
        assert isinstance(directory, Directory)
        directory.together = True
        store.catalog.record_directory(directory)
        for number in (0, 1):
            block = root.entries[b"b%d" % number]
            assert not isinstance(block, Directory)
            store.catalog.publish(block, directory, b"%d" % number)
        await set_attribute(store, "d/1", "tier", "cold")
        await add(store, 20 * MIB)
        assert await drain(store) is LeavingState.DRAINED
        assert set(directory.entries) == {b"0", b"1"}


async def test_encoded_blocks_are_read_as_ever_after_they_moved(world: World) -> None:
    world = replace(world, coding=CodingSettings(compress=True))
    async with world.store() as store:
        content = bytes(range(256)) * 4096
        block = await put(store, "b", content)
        await store.mover.demoter.demote(block)
        cold = await add(store, 64 * MIB)
        before = cold.encoded_bytes(block.generation)
        assert 0 < before < MIB
        assert await drain(store) is LeavingState.DRAINED
        assert cold.encoded_bytes(block.generation) == before
        assert await get(store, "b") == content
