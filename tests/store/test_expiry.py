"""TTL: true over restarts and clock steps, in every tier."""

import pytest

from ctxfs.errors import BlockNotFound
from tests.store.world import World, get, get_attribute, put, set_attribute


async def test_a_block_expires_at_its_deadline_and_its_room_comes_back(world: World) -> None:
    async with world.store() as store:
        await put(store, "k", b"x" * 8192)
        await set_attribute(store, "k", "ttl", "10s")
        before = store.catalog.hot.used_bytes
        world.clock.pass_s(9)
        store.upkeep.expire_due()
        assert await get(store, "k") == b"x" * 8192
        world.clock.pass_s(1)
        store.upkeep.expire_due()
        with pytest.raises(BlockNotFound):
            await get(store, "k")
        assert store.catalog.hot.used_bytes < before
        assert store.catalog.counters.expired == 1


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
async def test_setting_the_wall_clock_neither_expires_nor_keeps_a_block(
    world: World, step_s: float
) -> None:
    async with world.store() as store:
        await put(store, "k", b"x")
        await set_attribute(store, "k", "ttl", "10s")
        world.clock.step_wall_s(step_s)
        store.upkeep.expire_due()
        assert float(get_attribute(store, "k", "ttl")) == pytest.approx(10)
        world.clock.pass_s(11)
        store.upkeep.expire_due()
        with pytest.raises(BlockNotFound):
            await get(store, "k")


async def test_a_deadline_holds_over_a_killed_daemon(world: World) -> None:
    async with world.store() as store:
        await put(store, "k", b"x")
        await set_attribute(store, "k", "ttl", "10s")
    world.clock.pass_s(4)
    async with world.store() as store:
        assert float(get_attribute(store, "k", "ttl")) == pytest.approx(6)
        world.clock.pass_s(7)
        store.upkeep.expire_due()
        with pytest.raises(BlockNotFound):
            await get(store, "k")


async def test_a_deadline_holds_over_a_reboot_that_starts_boot_time_anew(world: World) -> None:
    async with world.store() as store:
        block = await put(store, "k", b"x")
        await set_attribute(store, "k", "ttl", "1h")
        await store.sealing.sync(block)
    world.reboot(away_s=1800)
    async with world.store() as store:
        assert float(get_attribute(store, "k", "ttl")) == pytest.approx(1800)
        assert await get(store, "k") == b"x"
        world.clock.pass_s(1801)
        store.upkeep.expire_due()
        with pytest.raises(BlockNotFound):
            await get(store, "k")


async def test_reading_does_not_extend_a_ttl_and_a_new_generation_starts_over(
    world: World,
) -> None:
    async with world.store() as store:
        store.catalog.names.root.default_ttl_ns = 10 * 10**9
        await put(store, "k", b"x")
        world.clock.pass_s(6)
        await get(store, "k")
        assert float(get_attribute(store, "k", "ttl")) == pytest.approx(4)
        await put(store, "k", b"y")
        assert float(get_attribute(store, "k", "ttl")) == pytest.approx(10)


async def test_an_expired_block_that_somebody_reads_stays_valid_until_closed(
    world: World,
) -> None:
    async with world.store() as store:
        block = await put(store, "k", b"x" * 5000)
        await set_attribute(store, "k", "ttl", "1s")
        handle = await store.open_for_read(block, owner=1)
        world.clock.pass_s(2)
        store.upkeep.expire_due()
        assert bytes(store.content.read(handle, 0, 5000)) == b"x" * 5000
        used = store.catalog.hot.used_bytes
        store.release(handle)
        assert store.catalog.hot.used_bytes < used


async def test_a_thousand_deadlines_at_once_do_not_hold_the_loop_for_long(world: World) -> None:
    async with world.store() as store:
        for number in range(300):
            await put(store, f"k{number}", b"")
            await set_attribute(store, f"k{number}", "ttl", "1s")
        world.clock.pass_s(2)
        store.upkeep.expire_due(at_once_max=256)
        assert store.catalog.counters.expired == 256
        store.upkeep.expire_due(at_once_max=256)
        assert store.catalog.counters.expired == 300


async def test_blocks_of_a_together_directory_expire_as_one(world: World) -> None:
    async with world.store() as store:
        names = store.catalog.names
        directory = store.catalog.make_directory(names.root, b"d")
        directory.together = True
        for name in ("a", "b"):
            block = await put(store, name, b"x")
            store.rename(block, directory, name.encode())
        await set_attribute(store, "d/a", "ttl", "1s")
        world.clock.pass_s(2)
        store.upkeep.expire_due()
        assert names.find(names.root, b"d") is None
        assert store.catalog.counters.expired == 2
