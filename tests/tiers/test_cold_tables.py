"""Summaries and checkpoints on a device in memory: spared reading, and never a lost block."""

import contextlib
import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import trio

from ctxfs.device.engine import Span
from ctxfs.errors import DeviceError, TierFull
from ctxfs.ondisk import blob, record, superblock
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.layout import SEGMENTS_OFFSET
from ctxfs.tiers.cold import TablePolicy
from ctxfs.tiers.cold_blobs import choose, read_tables
from ctxfs.tiers.cold_parts import part_header_bytes, part_position, part_segment
from ctxfs.tiers.cold_scan import Scan
from ctxfs.tiers.cold_space import SegmentState, Space
from tests.fakes import MemoryEngine
from tests.tiers.cold_rig import OFTEN, SEGMENT, Rig, engine

# Summaries of all segments, and no checkpoint before there are very many.
SUMMARIES = TablePolicy(segments_min=1, segments_share=1, summaries_share=1)


def _table_segments(rig: Rig) -> list[int]:
    (log,) = rig.tier._logs
    return [each.index for each in log.space.segments if each.state is SegmentState.TABLE]


def _scanned_bytes(rig: Rig) -> int:
    """What the last opening read of the segments that hold records."""
    (log,) = rig.tier._logs
    heads = (len(log.space.segments) + 1) * 4096
    tables = sum(
        log.space.geometry.segment_bytes
        for each in log.space.segments
        if each.state is SegmentState.TABLE
    )
    return max(0, rig.engines[0].statistics().read_bytes - SEGMENTS_OFFSET - heads - tables)


async def _filled(tables: TablePolicy, segments: int = 24) -> Rig:
    """A device with blocks, whole and split, dropped and changed, and directories."""
    rig = Rig(engine(segments), tables=tables)
    await rig.open()
    kept = rig.make_directory()
    gone = rig.make_directory()
    for size in (0, 100, 5000, 60_000, 90_000, 200_000) * 3:
        await rig.put(size)
        await rig.tend()
    for generation in sorted(rig.blocks)[::4]:
        rig.drop(generation)
    for generation in sorted(rig.blocks)[::3]:
        rig.change(generation, expires_ns=5, attributes=((b"a", b"b"),), parent=b"before")
    rig.remove_directory(gone)
    await rig.tend()
    assert kept in rig.directories
    return rig


@pytest.mark.parametrize("tables", [SUMMARIES, OFTEN])
async def test_clean_start_reads_no_segment_that_holds_records(tables: TablePolicy) -> None:
    rig = await _filled(tables)
    before = dict(rig.blocks)
    recovered = await rig.restart()
    assert recovered.blocks == before
    assert _scanned_bytes(rig) == 0
    for generation in before:
        await rig.check(generation)
    rig.check_accounts()


async def test_device_without_tables_is_read_and_has_them_the_next_time() -> None:
    rig = await _filled(TablePolicy(segments_min=1000))
    before = dict(rig.blocks)
    assert _table_segments(rig) == []
    rig.tables = OFTEN
    assert (await rig.restart()).blocks == before
    assert _scanned_bytes(rig) > 0
    await rig.tend()
    assert _table_segments(rig) != []
    assert (await rig.restart()).blocks == before
    assert _scanned_bytes(rig) == 0


async def test_device_with_tables_is_read_by_a_version_that_knows_none() -> None:
    rig = await _filled(OFTEN)
    before = dict(rig.blocks)
    await rig.tier.close()
    device = rig.engines[0]
    for start in range(SEGMENTS_OFFSET, device.size_bytes, SEGMENT):
        if device.medium[start : start + 8] == segment_header.TABLE_MAGIC:
            device.medium[start : start + SEGMENT] = bytes(SEGMENT)  # free, to that version
    rig.engines = [device.reopen()]
    assert (await rig.open()).blocks == before


@pytest.mark.parametrize("tables", [SUMMARIES, OFTEN])
async def test_no_page_of_a_table_segment_is_needed(tables: TablePolicy) -> None:
    """Each page of 4096 bytes alone is lost, as where a write is torn, and nothing is missing."""
    rig = await _filled(tables)
    before = dict(rig.blocks)
    held = _table_segments(rig)
    await rig.tier.close()
    device = rig.engines[0]
    pristine = bytes(device.medium)
    for index in sorted({*held, *_table_segments(rig)}):
        first = SEGMENTS_OFFSET + index * SEGMENT
        for page in range(first, first + SEGMENT, 4096):
            if not any(pristine[page : page + 4096]):
                continue
            device.medium[:] = pristine
            device.medium[page : page + 4096] = bytes(4096)
            rig.engines = [device.reopen()]
            assert (await rig.open()).blocks == before
            rig.check_accounts()


async def test_flipped_bits_in_tables_cost_nothing() -> None:
    rig = await _filled(OFTEN)
    before = dict(rig.blocks)
    await rig.tier.close()
    held = _table_segments(rig)
    device = rig.engines[0]
    pristine = bytes(device.medium)
    for _ in range(100):
        device.medium[:] = pristine
        start = SEGMENTS_OFFSET + device.random.choice(held) * SEGMENT
        device.medium[start + device.random.randrange(SEGMENT)] ^= 1 << device.random.randrange(8)
        rig.engines = [device.reopen()]
        assert (await rig.open()).blocks == before


async def test_checkpoint_that_names_a_segment_begun_anew_does_not_bring_back_what_was_in_it() -> (
    None
):
    rig = await _filled(OFTEN)
    for _ in range(60):
        for generation in sorted(rig.blocks)[: len(rig.blocks) // 3]:
            rig.drop(generation)
        rig.change(await rig.put(50_000), mode=0o600)
        await rig.put(20_000)
        await rig.tier.sync()
        rig.engines = [device.copy() for device in rig.engines]
        before = dict(rig.blocks)
        assert (await rig.open()).blocks == before
        if rig.number % 3:
            await rig.tend()
    rig.check_accounts()


@pytest.mark.parametrize("seed", range(3))
async def test_power_may_fail_at_each_request_while_tables_are_written(seed: int) -> None:
    requests = 0
    failed = True
    while failed:
        rig = Rig(engine(16, seed=1000 * seed + requests), tables=OFTEN)
        await rig.open()
        rig.make_directory()
        first, second, *_ = [await rig.put(size) for size in (30_000, 0, 200_000, 60_000)]
        await rig.tend()
        rig.drop(second)
        rig.change(first, expires_ns=9)
        for size in (5000, 100_000, 70_000):
            await rig.put(size)
        await rig.tier.sync()
        synced = dict(rig.blocks)
        rig.engines[0].requests_left = requests
        with contextlib.suppress(DeviceError):
            await rig.tend()
            await rig.tier.close()
        failed = rig.engines[0].lost
        recovered = await rig.crash()
        assert recovered.blocks == synced, f"{requests} requests"
        assert len(recovered.directories) == 1
        requests += 1
    assert requests > 5


async def _named(rig: Rig) -> set[int]:
    """Sequences of the segments that any table on the medium speaks of."""
    found = superblock.newest(rig.engines[0].medium)
    assert found is not None
    space = Space(found.geometry)
    await Scan(rig.engines[0], space, found.uuid, 0).find()
    blobs = await read_tables(rig.engines[0], space, record.make_salt(found.uuid))
    return choose(blobs, np.full(found.geometry.segment_count, -1, np.int64)).named


@pytest.mark.parametrize("requests", range(10, 70, 3))
async def test_tables_speak_only_of_segments_that_no_start_verifies(requests: int) -> None:
    """A record that is found torn is made void: nothing may say later that it is there."""
    rig = Rig(engine(24, seed=requests), tables=OFTEN)
    await rig.open()
    rig.engines[0].requests_left = requests

    async def put() -> None:
        with contextlib.suppress(DeviceError, TierFull):
            for _ in range(5):
                await rig.put(50_000)

    async def tend() -> None:
        with contextlib.suppress(DeviceError, TierFull):
            for _ in range(20):
                await rig.tend()

    async with trio.open_nursery() as nursery:
        for work in (put, put, put, put, tend):
            nursery.start_soon(work)
    rig.engines = [device.crash() for device in rig.engines]
    found = superblock.newest(rig.engines[0].medium)
    assert found is not None
    assert all(sequence < found.good_sequence for sequence in await _named(rig))
    await rig.open()


async def test_record_that_was_made_void_is_not_brought_back_by_a_summary() -> None:
    """The newer superblock is lost, and data that it called good is damaged."""
    rig = Rig(engine(), tables=SUMMARIES)
    await rig.open()
    for _ in range(7):
        lost = await rig.put(57_000)  # two fill a segment
        await rig.tend()
    (log,) = rig.tier._logs
    lost -= 1
    (part,) = log.index.parts(lost)
    offset = log.space.geometry.segment_offset(part_segment(part)) + part_position(part)
    device = rig.engines[0].copy()
    newest = superblock.newest(device.medium)
    assert newest is not None
    device.medium[newest.offset + 100] ^= 1
    older = superblock.newest(device.medium)
    assert older is not None
    assert older.good_sequence <= log.space.segments[part_segment(part)].sequence
    device.medium[offset + part_header_bytes(part)] ^= 1
    rig.engines = [device]
    rig.tables = None  # that device is no copy of what it is compared with
    assert lost not in (await rig.open()).blocks
    assert _table_segments(rig) == []
    assert lost not in (await rig.restart()).blocks


async def test_segment_in_which_a_write_failed_has_no_summary_until_it_was_read() -> None:
    rig = Rig(engine(), tables=SUMMARIES)
    await rig.open()
    await rig.put(30_000)
    rig.engines[0].fail_write = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.put(30_000)
    rig.engines[0].fail_write = lambda offset: False
    await rig.put(30_000)
    before = dict(rig.blocks)
    assert (await rig.restart()).blocks == before
    assert _scanned_bytes(rig) > 0
    await rig.tend()
    assert (await rig.restart()).blocks == before
    assert _scanned_bytes(rig) == 0


async def test_tables_are_no_room_for_blocks_and_give_theirs_back() -> None:
    rig = Rig(engine(32), tables=OFTEN)
    await rig.open()
    (log,) = rig.tier._logs
    space = log.space
    usable = len(space.segments) - space.reserve_count
    held: set[int] = set()
    for turn in range(120):
        await rig.put(40_000)
        if turn > 20:
            rig.drop(min(rig.blocks))
        await rig.tend()
        tables = space.table_count + space.table_wanted
        assert space.capacity_bytes == (usable - tables) * space.geometry.content_bytes
        assert len(_table_segments(rig)) == space.table_count <= 4
        held.update(_table_segments(rig))
    assert len(held) > 8  # they wander, as other segments do
    rig.check_accounts()


async def test_full_device_takes_no_block_in_place_of_a_checkpoint() -> None:
    rig = Rig(engine(16), tables=OFTEN)
    await rig.open()
    with contextlib.suppress(TierFull):
        while True:
            await rig.put(20_000)
            await rig.tend()
    rig.check_accounts()
    assert _table_segments(rig)
    before = dict(rig.blocks)
    assert (await rig.restart()).blocks == before
    assert _scanned_bytes(rig) == 0


async def test_tables_are_given_up_where_they_would_take_too_much() -> None:
    rig = Rig(engine(16), tables=TablePolicy(segments_min=1, segments_share=16))
    await rig.open()
    (log,) = rig.tier._logs
    for _ in range(8):
        await rig.put(60_000)
        await rig.tend()
    await rig.tend()
    assert _table_segments(rig) == []
    assert log.space.table_count == log.space.table_wanted == 0
    before = dict(rig.blocks)
    assert (await rig.restart()).blocks == before


async def test_device_of_few_segments_has_no_tables() -> None:
    rig = Rig(engine(), tables=TablePolicy())
    await rig.open()
    (log,) = rig.tier._logs
    for _ in range(8):
        await rig.put(60_000)
        await rig.tend()
    assert _table_segments(rig) == []
    assert log.space.table_wanted == 0
    assert all(segment.facts is None for segment in log.space.segments)


class _HoldsBlobs(MemoryEngine):
    """Writes of summaries and checkpoints wait."""

    held: trio.Event | None = None
    reached: trio.Event

    async def write(self, offset: int, sources: Sequence[Span]) -> None:
        begins = ctypes.string_at(sources[0].address, len(blob.MAGIC))
        if self.held is not None and begins == blob.MAGIC:
            self.reached.set()
            await self.held.wait()
        await super().write(offset, sources)


async def test_blocks_are_written_read_and_synced_while_a_checkpoint_is_being_written() -> None:
    device = _HoldsBlobs(engine(24).size_bytes)
    rig = Rig(device, tables=OFTEN)
    await rig.open()
    for size in (30_000, 100_000, 90_000):
        await rig.put(size)
    device.held, device.reached = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.tend)
        await device.reached.wait()
        for _ in range(8):
            generation = await rig.put(60_000)
            await rig.tier.sync()
            await rig.check(generation)
        device.held.set()
    before = dict(rig.blocks)
    assert (await rig.restart()).blocks == before


async def test_facts_that_find_no_room_are_forgotten_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(engine(160), tables=SUMMARIES)
    await rig.open()
    (log,) = rig.tier._logs
    take = log.space.take_for_tables
    monkeypatch.setattr(log.space, "take_for_tables", lambda sequence: None)
    for _ in range(90):
        await rig.put(110_000)
    await rig.tend()
    assert len(log.space.finished) == 64
    assert sum(segment.facts is not None for segment in log.space.segments) <= 65
    monkeypatch.setattr(log.space, "take_for_tables", take)
    await rig.tend()
    assert not log.space.finished
    before = dict(rig.blocks)
    assert (await rig.restart()).blocks == before
