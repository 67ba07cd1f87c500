"""The power fails at each single request, of a write or of a round of reclaiming."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio
import trio.testing

from ctxfs.core.meta import MakeDirectory
from ctxfs.device.engine import Span
from ctxfs.errors import DeviceError, TierFull
from ctxfs.tiers.cold import TablePolicy
from ctxfs.tiers.cold_parts import part_position, part_segment
from tests.fakes import MemoryEngine
from tests.tiers.cold_rig import OFTEN, SEGMENT, Rig, engine, meta

_WITH_AND_WITHOUT_TABLES = pytest.mark.parametrize(
    ("tables", "segments"), [(None, 8), (OFTEN, 12)], ids=["records", "tables"]
)


async def _fill(rig: Rig, size: int) -> None:
    with contextlib.suppress(TierFull):
        while True:
            await rig.put(size)
            if rig.tables is not None:
                await rig.tend()


async def _put_until_the_power_fails(rig: Rig, requests: int, size: int) -> bool:
    """False: it lasted for all of the puts."""
    rig.engines[0].requests_left = requests
    try:
        for _ in range(6):
            await rig.put(size)
            await rig.tier.sync()
            if rig.tables is not None:
                await rig.tend()
    except DeviceError:
        return True
    return False


@_WITH_AND_WITHOUT_TABLES
@pytest.mark.parametrize("seed", range(4))
async def test_synced_blocks_survive_power_loss_at_any_request_of_reclaiming(
    seed: int, tables: TablePolicy | None, segments: int
) -> None:
    requests = 0
    failed = True
    while failed:
        rig = Rig(engine(segments, seed=1000 * seed + requests), tables=tables)
        await rig.open()
        await _fill(rig, 20_000)
        for generation in sorted(rig.blocks)[::2]:
            rig.drop(generation)
        for generation in sorted(rig.blocks)[::3]:
            rig.change(generation, expires_ns=5)
        rig.make_directory()
        await rig.tier.sync()
        synced = dict(rig.blocks)
        failed = await _put_until_the_power_fails(rig, requests, 45_000)
        highest = rig.number
        recovered = await rig.crash()
        assert len(recovered.directories) == 1
        for generation, block in synced.items():
            assert recovered.blocks.get(generation) == block, f"{requests} requests"
        assert set(recovered.blocks) <= set(synced) | set(range(max(synced) + 1, highest + 1))
        for generation in recovered.blocks:
            await rig.check(generation)
        requests += 1
    assert requests > 20


@_WITH_AND_WITHOUT_TABLES
@pytest.mark.parametrize("seed", range(4))
async def test_dropped_blocks_stay_gone_though_power_fails_twice(
    seed: int, tables: TablePolicy | None, segments: int
) -> None:
    """Segments are erased and used again, and what was in them must not come back."""
    for requests in range(0, 40, 3):
        rig = Rig(engine(segments, seed=1000 * seed + requests), tables=tables)
        await rig.open()
        dropped: set[int] = set()
        for turn in range(3):
            await _fill(rig, 30_000)
            for generation in list(rig.blocks):
                rig.drop(generation)
                dropped.add(generation)
            await rig.tier.sync()
            await _put_until_the_power_fails(rig, requests + 3 * turn, 20_000)
            await rig.crash()
            assert not dropped & set(rig.blocks)
            dropped |= set(range(1, rig.number + 1)) - set(rig.blocks)


async def test_sequence_is_never_used_twice() -> None:
    rig = Rig(engine(8))
    used: set[int] = set()
    for turn in range(12):
        await rig.open()
        (log,) = rig.tier._logs
        now: set[int] = set()
        for _ in range(1 + turn % 4):
            rig.drop(await rig.put(60_000))
            assert log.space.open is not None
            now.add(log.space.open.sequence)
        assert not now & used
        used |= now
        rig.engines = [device.crash() for device in rig.engines]


def _landing(device: MemoryEngine) -> None:
    """Writes are reported as failed, but arrive."""
    store = device._store
    device.fail_write = lambda offset: True

    def keep_all(offset: int, sources: object, *, partly: bool) -> None:
        store(offset, sources, partly=False)  # type: ignore[arg-type]

    device._store = keep_all  # type: ignore[method-assign]


async def test_block_whose_write_failed_but_arrived_does_not_come_back() -> None:
    rig = Rig(engine(8))
    await rig.open()
    await rig.put(100)
    _landing(rig.engines[0])
    with pytest.raises(DeviceError):
        await rig.put(5000)
    rig.engines[0].fail_write = lambda offset: False
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == {1}


async def test_block_whose_write_failed_but_arrived_may_be_found_until_the_next_sync() -> None:
    rig = Rig(engine(8))
    await rig.open()
    _landing(rig.engines[0])
    with pytest.raises(DeviceError):
        await rig.put(5000)
    await rig.engines[0].sync()  # as a device may do by itself; the Drop still waits
    assert set((await rig.crash()).blocks) == {1}
    await rig.check(1)
    rig.drop(1)
    await rig.tier.sync()
    assert (await rig.crash()).blocks == {}


@pytest.mark.parametrize("stale", [0, 1])
async def test_copy_that_arrived_on_another_device_does_not_hide_newer_attributes(
    stale: int,
) -> None:
    rig = Rig(engine(16), engine(16, seed=1))
    await rig.open()
    if stale:
        await rig.put(SEGMENT)  # on the first, so that the second has more room
    device = rig.engines[stale]
    works = device.fail_write
    _landing(device)
    with pytest.raises(DeviceError):
        await rig.put(5000)
    failed = rig.number
    device.fail_write = works
    await device.sync()  # the record stays, and the Drop still waits
    await rig.put(2 * SEGMENT)  # there: now the other one has more room
    await rig.put_again(meta(failed, rig.next_stamp(), 5000))
    assert failed in rig.tier._logs[1 - stale].index
    changed = rig.change(failed, expires_ns=7)
    await rig.tier.sync(failed)
    for _ in range(2):
        assert (await rig.crash()).blocks[failed] == changed
        await rig.check(failed)


async def test_earlier_copy_that_arrived_does_not_come_back_after_the_drop_of_the_later() -> None:
    rig = Rig(engine(8))
    await rig.open()
    first = await rig.put(SEGMENT // 2)
    _landing(rig.engines[0])
    with pytest.raises(DeviceError):
        await rig.put(30_000)
    failed = rig.number
    rig.engines[0].fail_write = lambda offset: False
    await rig.put_again(meta(failed, rig.next_stamp(), 30_000))
    await rig.tier.sync()
    rig.drop(failed)
    await rig.tier.sync()
    # The segment of the later copy is reclaimed, with its note; that of the earlier one is not.
    for _ in range(30):
        rig.drop(await rig.put(60_000))
        await rig.tier.sync()
    assert failed not in (await rig.crash()).blocks
    await rig.check(first)


async def _use_segments_again(rig: Rig) -> None:
    """All that are empty, without a sync of the tier."""
    for generation in sorted(rig.blocks)[1:]:
        rig.drop(generation)
    for _ in range(30):
        rig.drop(await rig.put(60_000))


async def test_dropped_block_does_not_come_back_with_attributes_that_were_replaced() -> None:
    rig = Rig(engine(8))
    await rig.open()
    kept, gone = await rig.put(5000), await rig.put(5000)
    await rig.put(SEGMENT)
    changed = rig.change(gone, key=b"renamed")
    await rig.tier.sync()
    # The segment of the note is reclaimed; that of the record is not.
    await _use_segments_again(rig)
    recovered = await rig.crash()
    assert recovered.blocks.get(gone) in (None, changed)
    await rig.check(kept)


async def test_dropped_block_does_not_come_back_as_it_was_after_a_put_that_failed() -> None:
    rig = Rig(engine(8))
    await rig.open()
    kept, gone = await rig.put(5000), await rig.put(5000)
    await rig.put(SEGMENT)
    rig.drop(gone)
    await rig.tier.sync()
    again = meta(gone, rig.next_stamp(), 5000)
    rig.engines[0].fail_write = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.put_again(again)
    rig.engines[0].fail_write = lambda offset: False
    # The segment of the first Drop is reclaimed, and the second Drop waits.
    await _use_segments_again(rig)
    recovered = await rig.crash()
    assert recovered.blocks.get(gone) in (None, again)
    await rig.check(kept)


def _fail_half_way(device: MemoryEngine, number: int) -> None:
    """The write of this number, from now on, is reported as failed; its last sector is missing."""
    store = device._store
    writes = iter(range(number + 1))
    device.fail_write = lambda offset: next(writes, None) == number

    def keep_start(offset: int, sources: Sequence[Span], *, partly: bool) -> None:
        *most, last = sources
        if partly:
            most.append(Span(last.address, last.length - 4096))
        store(offset, most if partly else sources, partly=False)

    device._store = keep_start  # type: ignore[method-assign]


@pytest.mark.parametrize("clean", [True, False])
async def test_block_that_was_carried_half_way_is_found_where_it_was(clean: bool) -> None:
    for number in range(30):
        rig = Rig(engine(8, seed=number))
        await rig.open()
        await _fill(rig, 20_000)
        for generation in sorted(rig.blocks)[::2]:
            rig.drop(generation)
        await rig.tier.sync()
        _fail_half_way(rig.engines[0], number)
        for _ in range(6):
            with contextlib.suppress(DeviceError):
                await rig.put(45_000)
        await rig.tier.sync()
        recovered = await (rig.restart() if clean else rig.crash())
        assert recovered.corrupt == 0
        for generation in rig.blocks:
            await rig.check(generation)


async def test_loser_of_a_name_does_not_come_back_with_the_end_of_the_winner() -> None:
    rig = Rig(engine(16), engine(16, seed=1))
    await rig.open()
    await rig.put(SEGMENT)  # on the first, so that the second has more room
    loser = await rig.put(5000, b"name")
    await rig.put(2 * SEGMENT)  # there: now the first one has
    await rig.tier.sync()
    rig.drop(loser)
    winner = await rig.put(5000, b"name")
    await rig.engines[0].sync()  # the loser's Drop still waits
    assert set((await rig.crash()).blocks) == {1, 3, winner}
    rig.drop(winner)
    await rig.tier._logs[0].sync()  # and the power fails before the other device gets to it
    assert set((await rig.crash()).blocks) == {1, 3}


async def test_device_that_was_left_out_comes_back_with_all_of_its_blocks() -> None:
    rig = Rig(engine(16), engine(16, seed=1))
    await rig.open()
    for _ in range(20):
        await rig.put(5000)
    replaced = rig.number
    await rig.tier.sync()
    before = dict(rig.blocks)
    (absent,) = (at for at in (0, 1) if replaced in rig.tier._logs[at].index)
    rig.number = rig.stamp = 0  # a store knows what it finds, and no more
    rig.engines = [device.crash() for device in rig.engines]
    rig.engines[absent].fail_write = lambda offset: True
    await rig.open()
    while len(rig.blocks) < len(before):
        await rig.put(6000)
    name = before.pop(replaced).key
    assert all(block.key != name for block in rig.blocks.values())
    await rig.put(6000, name)
    await rig.tier.sync()
    await rig.crash()
    before |= rig.blocks
    assert rig.recovered.blocks == before
    assert replaced not in rig.blocks
    for generation in rig.blocks:
        await rig.check(generation)


async def test_torn_header_is_counted_once() -> None:
    rig = Rig(engine(8))
    await rig.open()
    kept, torn = await rig.put(100), await rig.put(5000)
    _damage(rig, torn)
    recovered = await rig.crash()
    assert set(recovered.blocks) == {kept}
    assert (recovered.torn, recovered.corrupt) == (1, 0)
    recovered = await rig.crash()
    assert set(recovered.blocks) == {kept}
    assert (recovered.torn, recovered.corrupt) == (0, 0)


def _damage(rig: Rig, generation: int | None, flipped: int = 1) -> None:
    """Bits of a block's record header, or else of the header of the open segment; it is flushed."""
    (log,) = rig.tier._logs
    assert log.space.open is not None
    index, position = log.space.open.index, 0
    if generation is not None:
        (part,) = log.index.parts(generation)
        index, position = part_segment(part), part_position(part)
    rig.engines[0]._before.clear()
    at = log.space.geometry.segment_offset(index) + position
    rig.engines[0].medium[at] ^= flipped


@pytest.mark.parametrize("of_record", [False, True])
async def test_damaged_start_of_a_header_is_counted(of_record: bool) -> None:
    rig = Rig(engine(8))
    await rig.open()
    block = await rig.put(5000)
    await rig.tier.sync()
    _damage(rig, block if of_record else None)
    recovered = await rig.restart()
    assert recovered.blocks == {}
    assert recovered.corrupt == 1


async def test_segment_of_a_device_that_was_formatted_once_more_is_not_damage() -> None:
    rig = Rig(engine(8))
    await rig.open()
    await rig.put(5000)
    await rig.tier.sync()
    rig.engines[0].medium[:8192] = b"a" * 8192
    recovered = await rig.open(format=True)
    assert (recovered.blocks, recovered.corrupt) == ({}, 0)


async def test_full_tier_is_not_reclaimed_for_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig(engine(8))
    await rig.open()
    await _fill(rig, SEGMENT - 8192)  # each in a segment of its own, and all of it
    rig.change(1, expires_ns=5)
    await rig.tier.sync()
    rig.engines[0].requests_left = 50  # more than enough to tend for a while, if that has an end
    async with trio.open_nursery() as nursery:
        await nursery.start(rig.tier.run)
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert not rig.engines[0].lost


async def test_put_and_sync_by_many_share_flushes() -> None:
    rig = Rig(engine())
    await rig.open()
    before = rig.engines[0].statistics().syncs

    async def put() -> None:
        await rig.put(1000)
        await rig.tier.sync()

    async with trio.open_nursery() as nursery:
        for _ in range(32):
            nursery.start_soon(put)
    assert rig.engines[0].statistics().syncs - before < 16


class _HoldsFirstWrite(MemoryEngine):
    """The next write waits, and then fails if it is told to; those after it go ahead."""

    held: trio.Event | None = None
    fails = False

    async def write(self, offset: int, sources: Sequence[Span]) -> None:
        held, self.held = self.held, None
        if held is not None:
            with trio.CancelScope(shield=True):
                await held.wait()
            if self.fails:
                raise DeviceError("failed as told")
        await super().write(offset, sources)


@pytest.mark.parametrize("fails", [False, True])
async def test_record_is_acknowledged_only_after_those_before_it(fails: bool) -> None:
    whole = engine()
    device = _HoldsFirstWrite(whole.size_bytes)
    rig = Rig(device)
    await rig.open()
    await rig.put(100)
    device.held = held = trio.Event()
    device.fails = fails
    ended: list[int] = []

    async def put(generation: int) -> None:
        with contextlib.suppress(DeviceError):
            await rig.put_again(meta(generation, rig.next_stamp(), 5000))
        ended.append(generation)

    async with trio.open_nursery() as nursery:
        for generation in (11, 12):
            nursery.start_soon(put, generation)
            await trio.testing.wait_all_tasks_blocked()
        ended_before = list(ended)
        held.set()
    assert ended_before == []
    assert rig.tier.holds(11) == rig.tier.holds(12) == (not fails)
    await rig.tier.sync()
    known = set(rig.blocks)
    assert set((await rig.crash()).blocks) == known


async def test_removed_directory_does_not_come_back_with_attributes_that_were_replaced() -> None:
    rig = Rig(engine(8))
    await rig.open()
    inode = rig.make_directory()
    await rig.put(5000)
    await rig.tier.sync()
    await rig.put(SEGMENT)
    changed = replace(rig.directories[inode], stamp=rig.next_stamp(), mtime_ns=5)
    rig.directories[inode] = changed
    rig.tier.note(MakeDirectory(changed))
    await rig.tier.sync()
    (log,) = rig.tier._logs
    later = log.space.segments[log.index.directories[inode].home >> 32]
    assert len(log.index.directories[inode].holders) == 2
    rig.remove_directory(inode)
    log.space.close_open()
    await log._reclaimer.round([later])
    assert (await rig.crash()).directories in ([], [changed])


async def test_failures_that_take_every_free_segment_bring_no_replaced_attributes_back() -> None:
    rig = Rig(engine(8))
    await rig.open()
    kept, gone = await rig.put(5000), await rig.put(5000)
    await rig.put(SEGMENT)
    changed = rig.change(gone, key=b"renamed")
    await rig.tier.sync()
    await rig.put(SEGMENT // 2)
    for generation in sorted(rig.blocks)[1:]:
        rig.drop(generation)
    device, write = rig.engines[0], rig.engines[0].write

    async def only_erase(offset: int, sources: Sequence[Span]) -> None:
        erases = sum(span.length for span in sources) == 4096
        device.fail_write = lambda _: not erases
        await write(offset, sources)

    device.write = only_erase  # type: ignore[method-assign]
    for _ in range(60):
        with contextlib.suppress(DeviceError, TierFull):
            await rig.tier.sync()
    recovered = await rig.crash()
    assert recovered.blocks.get(gone) in (None, changed)
    await rig.check(kept)


async def test_attributes_found_where_nothing_else_is_needed_are_noted_before_that_is_erased() -> (
    None
):
    rig = Rig(engine(8))
    await rig.open()
    block = await rig.put(5000)
    await rig.put(SEGMENT)
    changed = rig.change(block, key=b"renamed")
    await rig.restart()
    (log,) = rig.tier._logs
    # As after a crash in the middle of carrying, where a piece of the new copy has them, too.
    home = log.index._noted.pop(block)
    log.index._leave(home)
    log.index.load_loose(changed)
    await log._reclaimer.round([log.space.segments[home >> 32]])
    assert (await rig.crash()).blocks[block] == changed
