"""Devices that fail, lie or hang: never a wrong byte, never a wait without end."""

from dataclasses import replace

import pytest
import trio

from ctxfs.errors import BlockNotFound, CopyCorrupt, DeadlineExceeded, DeviceError
from ctxfs.store.store import Store
from tests.fakes import MemoryEngine
from tests.store.world import MIB, World, get, get_attribute, put, set_attribute


def engine_of(world: World) -> MemoryEngine:
    assert world.engine is not None
    return world.engine


async def put_cold(store: Store, name: str, content: bytes) -> None:
    await put(store, name, content)
    await set_attribute(store, name, "tier", "cold")
    assert get_attribute(store, name, "copies") == "cold"


def flip(world: World, content: bytes) -> None:
    medium = engine_of(world).medium
    at = medium.find(content)
    assert at > 0
    medium[at + len(content) // 2] ^= 1


async def test_a_flipped_bit_is_never_served(world: World) -> None:
    async with world.store() as store:
        await put_cold(store, "k", bytes(range(256)) * 64)
        flip(world, bytes(range(256)) * 64)
        with pytest.raises(CopyCorrupt):
            await get(store, "k")
        with pytest.raises(BlockNotFound):
            await get(store, "k")
        assert store.catalog.counters.corrupt == 1
        assert store.catalog.counters.promoted == 0
        assert store.catalog.hot.reserved_bytes == 0


async def test_a_bad_cold_copy_does_not_harm_the_hot_one(world: World) -> None:
    async with world.store() as store:
        content = bytes(range(256)) * 64
        block = await put(store, "k", content)
        await store.sealing.sync(block)
        flip(world, content)
        with pytest.raises(CopyCorrupt):
            await set_attribute(store, "k", "verify", "1")


async def test_verify_of_good_copies_says_nothing(world: World) -> None:
    async with world.store() as store:
        block = await put(store, "k", b"x" * 300_000)
        await store.sealing.sync(block)
        await set_attribute(store, "k", "verify", "1")
        assert get_attribute(store, "k", "copies") == "hot,cold"


async def test_a_failing_read_is_an_error_and_not_zeros(world: World) -> None:
    # LMCache#3022: unfilled buffers returned
    async with world.store() as store:
        await put_cold(store, "k", b"x" * 100_000)
        engine_of(world).fail_read = lambda offset: True
        with pytest.raises(DeviceError):
            await get(store, "k")
        assert store.catalog.counters.hits_cold == 0  # dynamo#15079


async def test_a_device_that_hangs_costs_one_deadline(world: World) -> None:
    # vllm#54363: no I/O deadline
    world.limits = replace(world.limits, read_deadline_s=0.05)
    async with world.store() as store:
        await put_cold(store, "k", b"x" * 100_000)
        engine_of(world).gate = trio.Event()
        with pytest.raises(DeadlineExceeded):
            await get(store, "k")
        gate = engine_of(world).gate
        assert gate is not None
        gate.set()
        store.mover.limits = replace(world.limits, read_deadline_s=5.0)
        assert await get(store, "k") == b"x" * 100_000


async def test_many_openers_of_a_cold_block_share_one_read(world: World) -> None:
    async with world.store() as store:
        await put_cold(store, "k", b"x" * 100_000)
        before = engine_of(world).statistics().reads
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(get, store, "k")
        assert engine_of(world).statistics().reads - before <= 2
        assert store.catalog.counters.promoted == 1


async def test_the_hot_copy_goes_only_after_the_cold_one_is_written(world: World) -> None:
    # Mooncake PR#1869: the only copy dropped
    async with world.store() as store:
        await put(store, "k", b"x" * 100_000)
        engine_of(world).fail_write = lambda offset: True
        with pytest.raises(DeviceError):
            await set_attribute(store, "k", "tier", "cold")
        assert get_attribute(store, "k", "copies") == "hot"
        assert await get(store, "k") == b"x" * 100_000


async def test_a_full_hot_tier_over_a_failing_device_evicts(world: World) -> None:
    async with world.store() as store:
        engine_of(world).fail_write = lambda offset: True
        await put(store, "pinned", b"p" * MIB)
        await set_attribute(store, "pinned", "pin", "1")
        for number in range(40):
            await put(store, f"k{number}", b"%08d" % number * (MIB // 8))
        assert await get(store, "pinned") == b"p" * MIB
        assert await get(store, "k39") == b"%08d" % 39 * (MIB // 8)


async def test_a_lost_device_leaves_the_hot_tier_working(world: World) -> None:
    async with world.store() as store:
        await put_cold(store, "cold", b"c" * 10_000)
        engine_of(world).lost = True
        with pytest.raises(DeviceError):
            await get(store, "cold")
        for number in range(40):
            await put(store, f"k{number}", b"%08d" % number * (MIB // 8))
        assert await get(store, "k39") == b"%08d" % 39 * (MIB // 8)
        store.rename(await put(store, "a", b"1"), store.catalog.names.root, b"b")
        assert await get(store, "b") == b"1"


async def test_unlink_while_a_block_is_promoted_leaves_nothing_behind(world: World) -> None:
    # LMCache#5263
    async with world.store() as store:
        await put_cold(store, "k", b"x" * 100_000)
        engine_of(world).gate = gate = trio.Event()
        async with trio.open_nursery() as nursery:

            async def reader() -> None:
                with pytest.raises(BlockNotFound):
                    await get(store, "k")

            nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked(0.02)
            store.unlink(store.catalog.names.root, b"k", 1)
            gate.set()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert store.catalog.hot.reserved_bytes == 0
        assert list((world.path / "blocks").iterdir()) == []


async def test_unlink_while_a_block_is_demoted_does_not_bring_it_back(world: World) -> None:
    async with world.store() as store:
        await put(store, "k", b"x" * 100_000)
        engine_of(world).gate = gate = trio.Event()
        async with trio.open_nursery() as nursery:

            async def demoter() -> None:
                with pytest.raises(BlockNotFound):
                    await set_attribute(store, "k", "tier", "cold")

            nursery.start_soon(demoter)
            await trio.testing.wait_all_tasks_blocked(0.02)
            store.unlink(store.catalog.names.root, b"k", 1)
            gate.set()
        cold = store.catalog.cold
        assert cold is not None
        await cold.sync()
    world.reboot()
    async with world.store() as store:
        assert store.catalog.block_count == 0


async def test_a_hot_file_removed_behind_our_back_is_a_miss(world: World) -> None:
    # LMCache#1313, s3fs#715
    async with world.store() as store:
        block = await put(store, "k", b"x" * 100_000)
        (world.path / "blocks" / f"{block.generation:016x}").unlink()
        with pytest.raises(BlockNotFound):
            await get(store, "k")
        assert store.catalog.counters.trouble == 1
