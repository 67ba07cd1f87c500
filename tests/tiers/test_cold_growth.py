"""A device becomes larger, or one more comes: in use, and with the power failing."""

import contextlib

import pytest
import trio
import trio.testing

from ctxfs.errors import ConfigError, DeviceError, ForeignSignature, HoldsBlocks, TierFull
from ctxfs.ondisk import superblock
from ctxfs.ondisk.layout import SEGMENTS_OFFSET
from ctxfs.tiers.cold import ColdDevice, ColdTier
from ctxfs.tiers.cold_leaving import LeavingState
from tests.tiers.cold_devices import Power, add, check_all, drain, homes
from tests.tiers.cold_rig import SEGMENT, Rig, engine

SIZES = (0, 1, 5000, 40_000, 100_000, 200_000, 4096)
LARGER = SEGMENTS_OFFSET + 40 * SEGMENT


async def _rig(*, segments: int = 16, seed: int = 0) -> Rig:
    rig = Rig(engine(segments, seed=seed))
    await rig.open()
    for size in SIZES:
        await rig.put(size)
    rig.make_directory()
    await rig.tier.sync()
    return rig


async def _grow(rig: Rig, size_bytes: int = LARGER) -> bool:
    rig.engines[0].grow(size_bytes)
    return await rig.tier.grow_device("memory0", size_bytes)


async def _fill(rig: Rig) -> int:
    count = 0
    with contextlib.suppress(TierFull):
        while True:
            await rig.put(100_000)
            count += 1
    return count


# -- growing


async def test_grown_device_has_room_at_once_and_after_a_restart() -> None:
    rig = await _rig()
    await _fill(rig)
    before = rig.tier.statistics()[0]
    assert await _grow(rig)
    after = rig.tier.statistics()[0]
    assert (after.segments, after.capacity_bytes > 2 * before.capacity_bytes) == (40, True)
    assert await _fill(rig) > 10
    rig.check_accounts()
    await rig.tier.sync()
    known = dict(rig.blocks)
    assert (await rig.crash()).blocks == known
    assert rig.tier.statistics()[0].segments == 40
    await check_all(rig)


async def test_growth_by_less_than_a_segment_changes_nothing() -> None:
    rig = await _rig()
    assert not await _grow(rig, SEGMENTS_OFFSET + 17 * SEGMENT - 4096)
    assert rig.tier.statistics()[0].segments == 16


async def test_both_superblocks_know_of_the_growth_before_a_new_segment_is_used() -> None:
    rig = await _rig()
    await _grow(rig)
    medium = rig.engines[0].medium
    for offset in superblock.SUPERBLOCK_OFFSETS:
        found = superblock.decode(medium[offset : offset + 4096])
        assert found is not None
        assert found.geometry.segment_count == 40
        assert not found.clean


async def test_growth_that_cannot_be_written_down_does_not_happen() -> None:
    rig = await _rig()
    rig.engines[0].fail_write = lambda offset: offset < SEGMENTS_OFFSET
    with pytest.raises(DeviceError):
        await _grow(rig)
    assert rig.tier.statistics()[0].segments == 16
    rig.engines[0].fail_write = lambda offset: False
    assert await _grow(rig)
    await check_all(rig)


@pytest.mark.parametrize("seed", range(4))
async def test_power_loss_at_any_request_of_growing_loses_nothing(seed: int) -> None:
    requests = 0
    failed = True
    while failed:
        rig = await _rig(seed=1000 * seed + requests)
        known = dict(rig.blocks)
        power = Power(requests, *rig.engines)
        with contextlib.suppress(DeviceError):
            await _grow(rig)
            for _ in range(3):
                generation = await rig.put(120_000)
                await rig.tier.sync()
                known[generation] = rig.blocks[generation]
        failed = power.failed
        recovered = await rig.crash()
        assert known.items() <= recovered.blocks.items()
        await check_all(rig)
        assert rig.tier.statistics()[0].segments == 40
        requests += 1
    assert requests > 8


async def test_size_to_be_used_grows_at_the_start_and_never_shrinks() -> None:
    device = engine(40)
    rig = Rig()

    async def open_with(size_bytes: int | None) -> int:
        device.lost = False
        rig.tier = await ColdTier.open(
            [ColdDevice("memory0", device, segment_bytes=SEGMENT, size_bytes=size_bytes)],
            describe=rig.blocks.get,
            describe_directory=rig.directories.get,
        )
        assert (await rig.tier.recover()).blocks == rig.blocks
        return rig.tier.statistics()[0].segments

    assert await open_with(SEGMENTS_OFFSET + 16 * SEGMENT) == 16
    await rig.put(100_000)
    await rig.tier.close()
    assert await open_with(SEGMENTS_OFFSET + 24 * SEGMENT) == 24
    await rig.tier.close()
    assert await open_with(None) == 40
    await rig.check(1)
    await rig.tier.close()
    with pytest.raises(ConfigError, match="more than the"):
        await open_with(SEGMENTS_OFFSET + 16 * SEGMENT)


# -- adding


async def test_added_device_takes_blocks_and_knows_the_directories() -> None:
    rig = await _rig()
    await add(rig, engine(64, seed=1))
    assert [each.state for each in rig.tier.statistics()] == ["ok", "ok"]
    assert homes(rig, await rig.put(100_000)) == ["memory1"]
    rig.make_directory()
    await rig.tier.sync()
    known = dict(rig.blocks)
    assert (await drain(rig)).state is LeavingState.DRAINED
    rig.engines = rig.engines[1:]
    recovered = await rig.crash()
    assert recovered.blocks == known
    assert len(recovered.directories) == 2


async def test_added_device_is_left_out_by_a_start_without_it_and_found_by_one_with_it() -> None:
    rig = await _rig()
    first = set(rig.blocks)
    await add(rig, engine(64, seed=1))
    second = {await rig.put(100_000) for _ in range(3)}
    await rig.tier.close()
    both = [each.reopen() for each in rig.engines]
    rig.engines = both[:1]
    assert set((await rig.open()).blocks) == first
    await rig.tier.close()
    rig.engines = [both[0].reopen(), both[1]]
    assert set((await rig.open()).blocks) == first | second
    await check_all(rig)


async def test_device_with_blocks_of_a_cold_tier_is_refused_and_keeps_them() -> None:
    other = await _rig(seed=5)
    await other.tier.close()
    known = dict(other.blocks)
    rig = await _rig()
    with pytest.raises(HoldsBlocks, match="holds 7 blocks"):
        await add(rig, other.engines[0].reopen())
    assert len(rig.tier.statistics()) == 1
    other.engines = [other.engines[0].reopen()]
    assert (await other.open()).blocks == known


async def test_leftovers_of_a_device_without_live_blocks_are_forgotten() -> None:
    other = await _rig(seed=5)
    for generation in list(other.blocks):
        other.drop(generation)
    await other.tier.close()
    rig = await _rig()
    rig.make_directory()
    await add(rig, other.engines[0].reopen())
    assert rig.tier.statistics()[1].blocks == 0
    await rig.tier.sync()
    known, directories = dict(rig.blocks), set(rig.directories)
    recovered = await rig.crash()
    assert recovered.blocks == known
    assert {each.inode for each in recovered.directories} == directories


async def test_drained_device_can_be_added_again() -> None:
    rig = await _rig(segments=32)
    await add(rig, engine(32, seed=1))
    assert (await drain(rig, "memory1")).state is LeavingState.DRAINED
    again = rig.engines.pop().reopen()
    await add(rig, again)
    assert [each.state for each in rig.tier.statistics()] == ["ok", "ok"]
    await rig.put(5000)
    await check_all(rig)


async def test_foreign_data_is_refused_by_name_and_the_tier_goes_on() -> None:
    rig = await _rig()
    foreign = engine(seed=1)
    foreign.medium[1080:1082] = b"\x53\xef"
    before = bytes(foreign.medium)
    with pytest.raises(ForeignSignature, match="memory1 holds an ext2, ext3 or ext4 file system"):
        await add(rig, foreign)
    assert foreign.medium == before
    assert len(rig.tier.statistics()) == 1
    await check_all(rig)


@pytest.mark.parametrize("seed", range(4))
async def test_power_loss_at_any_request_of_adding_loses_nothing(seed: int) -> None:
    requests = 0
    failed = True
    while failed:
        rig = await _rig(seed=1000 * seed + requests)
        known = dict(rig.blocks)
        power = Power(requests, *rig.engines)
        fresh = engine(64, seed=seed + 1)
        power.engines += (fresh,)
        with contextlib.suppress(DeviceError):
            await add(rig, fresh, power=power)
            for _ in range(3):
                generation = await rig.put(60_000)
                await rig.tier.sync()
                known[generation] = rig.blocks[generation]
        failed = power.failed
        recovered = await rig.crash()
        assert known.items() <= recovered.blocks.items()
        assert len(recovered.directories) == 1
        await check_all(rig)
        requests += 1
    assert requests > 8


# -- several at once


async def test_readers_of_one_device_do_not_wait_for_another_that_stands_still() -> None:
    rig = Rig(engine(32), engine(32, seed=1))
    await rig.open()
    for _ in range(8):
        await rig.put(60_000)
    held: dict[str, list[int]] = {"memory0": [], "memory1": []}
    for generation in rig.blocks:
        held[homes(rig, generation)[0]].append(generation)
    assert all(held.values())
    gate = rig.engines[0].gate = trio.Event()
    done: list[int] = []

    async def read(generation: int) -> None:
        await rig.check(generation)
        done.append(generation)

    async with trio.open_nursery() as nursery:
        for generation in rig.blocks:
            nursery.start_soon(read, generation)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(done) == held["memory1"]
        gate.set()
    assert sorted(done) == sorted(rig.blocks)
