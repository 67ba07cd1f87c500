"""What a start reads of one cold device, and what it makes of it."""

from dataclasses import dataclass

import numpy as np
import trio

from ctxfs.device.engine import Engine
from ctxfs.ondisk import record
from ctxfs.ondisk.facts import Facts
from ctxfs.ondisk.layout import ALIGN_BYTES
from ctxfs.tiers import cold_facts
from ctxfs.tiers.cold_blobs import FoundTables, choose, read_tables
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_scan import Scan, ScanCounts
from ctxfs.tiers.cold_space import SegmentState, Space


@dataclass(frozen=True, slots=True)
class Reading:
    """All that is known of the records of a device, and whence."""

    facts: Facts
    tables: FoundTables
    scanned: dict[int, Facts]  # by segment: read through, and good
    counts: ScanCounts


async def read_device(engine: Engine, space: Space, uuid: bytes, verify_from: int) -> Reading:
    """Fill `space` and learn of every record.

    In segments of sequence `verify_from` and later all data is read and verified; of the others
    what summaries and checkpoints tell is enough, and those without are read from record to record.
    Raises DeviceError.
    """
    scan = Scan(engine, space, uuid, verify_from)
    await scan.find()
    present = np.array(
        [
            each.sequence
            if each.state is SegmentState.CLOSED and each.sequence < verify_from
            else -1
            for each in space.segments
        ],
        np.int64,
    )
    blobs = await read_tables(engine, space, record.make_salt(uuid))
    tables = await trio.to_thread.run_sync(choose, blobs, present)
    del blobs
    closed = [each.index for each in space.segments if each.state is SegmentState.CLOSED]
    await scan.read(
        [index for index in closed if index not in tables.covered and scan.can_read(index)]
    )
    if any(segment.sequence in tables.named for segment, _, _ in scan.torn):
        await _erase_tables(engine, space)
        tables.checkpoint.clear()
        tables.summaries.clear()
    await scan.void_torn()
    said = [*tables.said, *scan.facts.values()]
    facts = await trio.to_thread.run_sync(cold_facts.merge, said or [Facts()])
    scan.counts.records += sum(len(each.parts) for each in tables.said)
    tables.said.clear()  # it is long
    pairs = (facts.covers.array("segment").tolist(), facts.covers.array("used_bytes").tolist())
    for index, used in zip(*pairs, strict=True):
        space.segments[index].used_bytes = used
    good = {index: said for index, said in scan.facts.items() if scan.is_good(index)}
    return Reading(facts, tables, good, scan.counts)


async def _erase_tables(engine: Engine, space: Space) -> None:
    """Erase what says of records that they are there, before these are made void.

    That happens only where the newer superblock was lost, and with it how far all is good.
    """
    zeros = Scratch(ALIGN_BYTES)
    held = [each.index for each in space.segments if each.state is SegmentState.TABLE]
    for index in held:
        offset = space.geometry.segment_offset(index)
        await engine.write(offset, [zeros.span(0, ALIGN_BYTES)])
    await engine.sync()
    for index in held:
        space.release(index)
