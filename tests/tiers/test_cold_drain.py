"""Emptying a device while the tier is used: nothing is lost, nothing is there twice."""

import pytest
import trio
import trio.testing

from ctxfs.errors import DeviceLost, NoSuchDevice, TierFull
from ctxfs.tiers.cold_leaving import LeavingState
from tests.tiers.cold_devices import Power, add, check_all, damage, drain, homes
from tests.tiers.cold_rig import SEGMENT, Rig, engine

SIZES = (0, 1, 5000, 40_000, 100_000, 200_000, 4096, 70_000)


async def _two(seed: int = 0, segments: int = 32) -> Rig:
    """Blocks of all kinds and two directories on two devices."""
    rig = Rig(engine(segments, seed=seed), engine(segments, seed=seed + 1))
    await rig.open()
    for size in SIZES:
        await rig.put(size)
    rig.change(3, expires_ns=2**62)
    rig.make_directory()
    rig.make_directory()
    await rig.tier.sync()
    return rig


async def test_drained_device_has_nothing_and_the_others_have_all() -> None:
    rig = await _two()
    known = dict(rig.blocks)
    assert {path for each in known for path in homes(rig, each)} == {"memory0", "memory1"}
    leaving = await drain(rig)
    assert leaving.state is LeavingState.DRAINED
    assert leaving.moved_blocks > 0
    await check_all(rig)
    first, last = rig.tier.statistics()
    assert (first.path, first.state) == ("memory1", "ok")
    assert (last.path, last.state, last.left_blocks) == ("memory0", "drained", 0)
    assert rig.tier.takes_blocks
    rig.engines = rig.engines[1:]  # it is pulled out
    recovered = await rig.crash()
    assert recovered.blocks == known
    assert len(recovered.directories) == 2
    await check_all(rig)
    rig.check_accounts()


async def test_directory_that_only_the_drained_device_knew_of_is_kept() -> None:
    rig = await _two()
    rig.engines[1].requests_left = 0
    inode = rig.make_directory()
    with pytest.raises(DeviceLost):
        await rig.tier.sync()
    assert inode in {each.inode for each in (await rig.crash()).directories}
    assert (await drain(rig)).state is LeavingState.DRAINED
    rig.engines = rig.engines[1:]
    assert inode in {each.inode for each in (await rig.crash()).directories}


async def test_drained_device_is_empty_to_whoever_opens_it_next() -> None:
    rig = await _two()
    await drain(rig)
    alone = Rig(rig.engines[0].reopen())
    recovered = await alone.open()
    assert (recovered.blocks, recovered.directories, recovered.records) == ({}, [], 0)
    await alone.put(5000)
    await check_all(alone)


async def test_blocks_that_a_codec_made_stay_as_they_are_stored() -> None:
    rig = await _two()
    made = {each: rig.tier.method(each) for each in rig.blocks}
    assert {0, 3} == set(made.values())
    await drain(rig)
    assert {each: rig.tier.method(each) for each in rig.blocks} == made


async def test_no_new_block_goes_to_a_device_that_leaves() -> None:
    rig = await _two()
    log = rig.tier.begin_drain("memory0")
    room = rig.tier.room_bytes
    assert 0 < room < sum(each.space.room_bytes for each in rig.tier._logs)
    for _ in range(4):
        assert homes(rig, await rig.put(5000)) == ["memory1"]
    assert rig.tier.statistics()[0].free_bytes == 0
    assert rig.tier.statistics()[0].capacity_bytes == log.space.live_bytes


async def test_device_that_is_kept_after_all_takes_blocks_again() -> None:
    rig = await _two()
    rig.tier.begin_drain("memory0")
    rig.tier.end_drain("memory0")
    assert {homes(rig, await rig.put(60_000))[0] for _ in range(8)} == {"memory0", "memory1"}


async def test_last_device_and_one_that_is_not_there_are_refused() -> None:
    rig = await _two()
    with pytest.raises(NoSuchDevice, match="memory7"):
        rig.tier.begin_drain("memory7")
    assert (await drain(rig)).state is LeavingState.DRAINED
    with pytest.raises(TierFull, match="only cold device"):
        rig.tier.begin_drain("memory1")
    with pytest.raises(NoSuchDevice):
        rig.tier.begin_drain("memory0")


async def test_blocks_go_and_change_while_they_are_moved() -> None:
    rig = await _two()
    gate = rig.engines[1].gate = trio.Event()
    on_first = [each for each in rig.blocks if homes(rig, each) == ["memory0"]]
    dropped, changed = on_first[:2]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, rig)
        await trio.testing.wait_all_tasks_blocked()
        rig.drop(dropped)
        rig.change(changed, expires_ns=2**61)
        await rig.check(changed)
        gate.set()
    await check_all(rig)
    known = dict(rig.blocks)
    await rig.tier.sync()
    rig.engines = rig.engines[1:]
    assert (await rig.crash()).blocks == known


async def test_changes_between_copy_and_drop_reach_both_places() -> None:
    rig = await _two()
    gate = trio.Event()
    sync = rig.engines[1].sync

    async def slow_sync() -> None:
        await gate.wait()
        await sync()

    rig.engines[1].sync = slow_sync  # type: ignore[method-assign]
    on_first = [each for each in rig.blocks if homes(rig, each) == ["memory0"]]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, rig)
        await trio.testing.wait_all_tasks_blocked()
        assert homes(rig, on_first[0]) == homes(rig, on_first[1]) == ["memory0", "memory1"]
        rig.drop(on_first[0])
        assert homes(rig, on_first[0]) == []
        rig.change(on_first[1], expires_ns=2**61)
        gate.set()
    known = dict(rig.blocks)
    await check_all(rig)
    await rig.tier.sync()
    rig.engines = rig.engines[1:]
    assert (await rig.crash()).blocks == known


async def test_blocks_are_evicted_for_room_and_the_drain_goes_on() -> None:
    rig = Rig(engine(12), engine(12, seed=1))
    await rig.open()
    for _ in range(20):
        await rig.put(60_000)
    before = set(rig.blocks)

    def evict_oldest(need_bytes: int) -> bool:
        rig.drop(min(rig.blocks))
        return True

    leaving = await drain(rig, make_room=evict_oldest)
    assert leaving.state is LeavingState.DRAINED
    assert before > set(rig.blocks) > set()
    assert max(before) in rig.blocks
    await check_all(rig)


async def test_drain_stops_where_nothing_may_go_and_goes_on_when_there_is_room() -> None:
    rig = Rig(engine(12), engine(12, seed=1))
    await rig.open()
    for _ in range(20):
        await rig.put(60_000)
    known = dict(rig.blocks)
    leaving = await drain(rig)
    assert leaving.state is LeavingState.NEEDS_ROOM
    told = rig.tier.statistics()[0]
    assert told.state == "needs room"
    assert told.why is not None
    assert "full" in told.why
    assert told.left_blocks == len(rig.tier.log_at("memory0").index) > 0
    assert told.left_bytes is not None
    assert told.left_bytes > 60_000
    await check_all(rig)
    await add(rig, engine(32, seed=2))
    assert (await drain(rig)).state is LeavingState.DRAINED
    rig.engines = rig.engines[1:]
    assert (await rig.crash()).blocks == known


async def test_nobody_is_evicted_for_a_block_that_no_other_device_could_take() -> None:
    rig = Rig(engine(64))
    await rig.open()
    await rig.put(30 * SEGMENT)
    await add(rig, engine(16, seed=1))
    asked: list[int] = []
    leaving = await drain(rig, make_room=lambda need: not asked.append(need))  # type: ignore[func-returns-value]
    assert (leaving.state, asked) == (LeavingState.NEEDS_ROOM, [])
    assert leaving.why is not None
    assert "can ever take" in leaving.why
    await check_all(rig)


async def test_target_that_cannot_flush_leaves_every_block_in_one_place() -> None:
    rig = await _two()
    rig.engines[1].fail_sync = lambda offset: True
    assert (await drain(rig)).state is LeavingState.FAILED
    await check_all(rig)
    rig.engines[1].fail_sync = lambda offset: False
    assert (await drain(rig)).state is LeavingState.DRAINED
    await check_all(rig)


@pytest.mark.parametrize("turns", range(0, 60, 2))
async def test_drain_that_is_ended_at_any_moment_leaves_every_block_in_one_place(
    turns: int,
) -> None:
    rig = await _two()
    known = dict(rig.blocks)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, rig)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    await check_all(rig)
    if len(rig.tier._logs) == 2:
        rig.tier.end_drain("memory0")
    rig.check_accounts()
    assert (await rig.restart()).blocks == known
    await check_all(rig)


async def test_what_cannot_be_read_is_told_and_stays_counted() -> None:
    rig = await _two()
    on_first = [
        each
        for each in rig.blocks
        if homes(rig, each) == ["memory0"] and rig.blocks[each].size > 4096 and each % 3
    ]
    bad = on_first[0]
    damage(rig, 0, bad)
    leaving = await drain(rig)
    assert (leaving.state, leaving.unreadable) == (LeavingState.UNREADABLE, {bad})
    told = rig.tier.statistics()[0]
    assert (told.state, told.left_blocks, told.unreadable_blocks) == ("unreadable", 1, 1)
    assert told.why == "1 of its blocks cannot be read"
    assert homes(rig, bad) == ["memory0"]
    rig.drop(bad)  # what its store does when it finds out
    assert (await drain(rig)).state is LeavingState.DRAINED
    await check_all(rig)


async def test_device_whose_reads_fail_keeps_what_it_has() -> None:
    rig = await _two()
    held = [each for each in rig.blocks if homes(rig, each) == ["memory0"]]
    rig.engines[0].fail_read = lambda offset: True
    leaving = await drain(rig)
    assert (leaving.state, leaving.unreadable) == (LeavingState.UNREADABLE, set(held))
    rig.engines[0].fail_read = lambda offset: False
    assert (await drain(rig)).state is LeavingState.DRAINED
    await check_all(rig)


async def test_device_that_cannot_be_written_gives_its_blocks_but_is_not_called_drained() -> None:
    rig = await _two()
    rig.engines[0].fail_write = lambda offset: True
    leaving = await drain(rig)
    assert leaving.state is LeavingState.FAILED
    assert rig.tier.statistics()[0].left_blocks == 0
    await check_all(rig)
    rig.engines[0].fail_write = lambda offset: False
    assert (await drain(rig)).state is LeavingState.DRAINED


async def test_device_that_goes_while_it_is_drained_is_lost_and_what_was_left_is_counted() -> None:
    rig = await _two()
    held = [each for each in rig.blocks if homes(rig, each) == ["memory0"]]
    rig.engines[0].lost = True
    leaving = await drain(rig)
    assert leaving.state is LeavingState.FAILED
    told = rig.tier.statistics()[0]
    assert (told.state, told.left_blocks) == ("lost", len(held))
    assert told.left_bytes
    for generation in rig.blocks.keys() - set(held):
        await rig.check(generation)
    with pytest.raises(DeviceLost):
        rig.tier.begin_drain("memory0")


async def test_failing_target_is_passed_over_for_another() -> None:
    rig = Rig(engine(32))
    await rig.open()
    for size in SIZES:
        await rig.put(size)
    await add(rig, engine(64, seed=1))
    await add(rig, engine(32, seed=2))
    rig.engines[1].fail_write = lambda offset: True
    assert (await drain(rig)).state is LeavingState.DRAINED
    assert rig.tier.statistics()[0].state == "failing"
    await check_all(rig)


async def test_copy_that_reads_back_otherwise_is_not_trusted() -> None:
    rig = await _two()
    target = rig.engines[1]
    store = target._store

    def flip(offset: int, sources: object, *, partly: bool) -> None:
        store(offset, sources, partly=partly)  # type: ignore[arg-type]
        if offset > SEGMENT * 8:
            target.medium[offset + 4096] ^= 1

    target._store = flip  # type: ignore[method-assign]
    held = [each for each in rig.blocks if homes(rig, each) == ["memory0"]]
    leaving = await drain(rig)
    assert leaving.state is LeavingState.FAILED
    assert leaving.why is not None
    assert "not what was written" in leaving.why
    target._store = store  # type: ignore[method-assign]
    assert any(homes(rig, each) == ["memory0"] for each in held)
    await check_all(rig)


@pytest.mark.parametrize("seed", range(4))
async def test_power_loss_at_any_request_of_a_drain_loses_nothing(seed: int) -> None:
    requests = 0
    failed = True
    while failed:
        rig = await _two(seed=1000 * seed + requests)
        known = dict(rig.blocks)
        power = Power(requests, *rig.engines)
        await drain(rig)
        failed = power.failed
        recovered = await rig.crash()
        assert recovered.blocks == known, f"{requests} requests"
        assert len(recovered.directories) == 2
        await check_all(rig)
        rig.check_accounts()
        requests += 1 if requests < 30 else 3
    assert requests > 10


async def _drained_in_part(seed: int, requests: int) -> Rig:
    rig = await _two(seed=seed)
    Power(requests, *rig.engines)
    await drain(rig)
    await rig.crash()
    return rig


@pytest.mark.parametrize("seed", range(3))
async def test_blocks_dropped_after_a_drain_that_was_cut_short_stay_gone(seed: int) -> None:
    for requests in range(2, 40, 4):
        rig = await _drained_in_part(seed, requests)
        gone = sorted(rig.blocks)[::2]
        for generation in gone:
            rig.drop(generation)
        await rig.tier.sync()
        known = dict(rig.blocks)
        assert (await rig.crash()).blocks == known
        await drain(rig)
        await check_all(rig)
        assert (await rig.crash()).blocks == known
