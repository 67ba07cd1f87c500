"""An offline check of one cold device: what is on it, and what of it is damaged.

It reads as a start does, and then what a start would not: every record, and what no chain leads to.
Nothing here writes.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import trio

from ctxfs.core.columns import I64
from ctxfs.device.engine import Engine
from ctxfs.errors import ConfigError, DeviceError, DeviceLost
from ctxfs.ondisk import foreign, record, structs, superblock
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.columnar import Table
from ctxfs.ondisk.facts import Facts
from ctxfs.ondisk.layout import ALIGN_BYTES, SEGMENTS_OFFSET
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.ondisk.superblock import SUPERBLOCK_OFFSETS, Superblock
from ctxfs.tiers import cold_compare
from ctxfs.tiers.cold_blobs import FoundTables, choose, read_tables
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_errands import FoundErrand
from ctxfs.tiers.cold_faults import DeviceReport, Fault, FaultKind, Tell
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_scan import VERIFY_NONE
from ctxfs.tiers.cold_space import Segment, SegmentState, Space
from ctxfs.tiers.cold_walk import Chain, Walker

_HEADERS_AT_ONCE: Final = 32
_EPOCH_SHIFT: Final = 32  # of a sequence: what is above counts openings of the device
_SEGMENTS_AT_ONCE: Final = 3  # each takes memory as long as a segment

Advance = Callable[[int], None]


@dataclass(slots=True)
class DamagedSegment:
    """Its header is no good. `sequence`: as its records have it; None where none is left."""

    index: int
    sequence: int | None = None


class Examination:
    """One device. In this order: `look`, `find`, `walk`; what comes then is a `Verdict`."""

    def __init__(self, path: str, engine: Engine, tell: Tell) -> None:
        self.path = path
        self.engine = engine
        self.report = DeviceReport(path=path)
        self._tell = tell
        self.is_usable = False  # once `look` saw that it is
        self.found: Superblock
        self.space: Space
        self.index: ColdIndex  # empty until the verdict
        self.live: Table  # then, of what is live: rows of facts.METAS
        self.errands: list[FoundErrand] = []
        self.damaged: list[DamagedSegment] = []
        self.chains: list[Chain] = []  # those with something that is not as it should be
        self.compared: array[int] = array("Q")  # parts that are blocks, with the right content
        self.verify_from = VERIFY_NONE
        self.tables: FoundTables
        self.covered: list[Facts] = []  # slim, of segments that tables cover
        self.others: list[Facts] = []  # of all others

    def tell(
        self,
        kind: FaultKind,
        what: str,
        offset: int | None = None,
        *,
        key: bytes | None = None,
        generation: int | None = None,
        expected: bool = False,
    ) -> None:
        """Tell and count a fault."""
        counted = self.report.expected if expected else self.report.faults
        counted[kind] += 1
        self._tell(
            Fault(
                kind=kind,
                path=self.path,
                what=what,
                offset=offset,
                key=key,
                generation=generation,
                expected=expected,
            )
        )

    def offset(self, index: int, position: int = 0) -> int:
        """On the device, of a position in a segment."""
        return self.space.geometry.segment_offset(index) + position

    # -- superblocks

    async def look(self) -> None:
        """Read the superblocks, and see whether the device can be used.

        Raises ConfigError where it holds nothing of ours, or a later format; DeviceError.
        """
        length = SEGMENTS_OFFSET + ALIGN_BYTES
        if self.engine.size_bytes < length:
            raise ConfigError(f"{self.path} is too small: {self.engine.size_bytes} bytes")
        start = Scratch(length)
        await self.engine.read(0, start.span(0, length))
        try:
            found = superblock.newest(start.view)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        if found is None and not superblock.has_magic(start.view):
            kind = structs.kind_of(start.view[SEGMENTS_OFFSET:])
            if kind is None or kind.fields is not structs.SEGMENT:
                name = foreign.name_of(start.view) or "nothing at all"
                raise ConfigError(f"{self.path} is no cold device: it holds {name}")
        for name, offset in zip("AB", SUPERBLOCK_OFFSETS, strict=True):
            if superblock.decode(start.view[offset : offset + ALIGN_BYTES]) is None:
                self.tell(FaultKind.SUPERBLOCK, f"superblock {name} is damaged", offset)
        if found is None:
            self.tell(FaultKind.SIZE, "no superblock is good, so nothing can be found")
            return
        self.found = found
        self.report.uuid = found.uuid.hex()
        self.report.clean = found.clean
        if found.geometry.size_bytes > self.engine.size_bytes:
            made, size = found.geometry.size_bytes, self.engine.size_bytes
            self.tell(FaultKind.SIZE, f"it has {size} bytes, but was made with {made}")
            return
        self.verify_from = VERIFY_NONE if found.clean else found.good_sequence
        self.space = Space(found.geometry)
        self.index = ColdIndex(self.space)
        self.is_usable = True

    # -- segments

    async def find(self) -> None:
        """Read the header of every segment. Raises DeviceLost."""
        count = self.found.geometry.segment_count
        readers = [
            partial(self._see_header, Scratch(ALIGN_BYTES))
            for _ in range(min(_HEADERS_AT_ONCE, count))
        ]
        await _share(range(count), readers)
        self.space.find_free()
        self.damaged.sort(key=lambda each: each.index)
        walker = self._walker()
        for each in self.damaged:
            await self._look_into(each, walker)

    async def _see_header(self, page: Scratch, index: int) -> None:
        try:
            await self.engine.read(self.offset(index), page.span(0, ALIGN_BYTES))
        except DeviceLost:
            raise
        except DeviceError as error:
            self.tell(FaultKind.UNREADABLE, str(error), self.offset(index))
            self.space.adopt(index, 0, SEGMENT_HEADER_BYTES)
            self.space.segments[index].unreadable = True
            return
        uuid = self.found.uuid
        for magic in (segment_header.MAGIC, segment_header.TABLE_MAGIC):
            sequence = segment_header.decode(page.view, uuid, index, magic)
            if sequence is not None:
                holds_tables = magic == segment_header.TABLE_MAGIC
                self.space.adopt(index, sequence, SEGMENT_HEADER_BYTES, holds_tables)
                return
        kind = structs.kind_of(page.view)
        is_one = kind is not None and kind.fields is structs.SEGMENT
        is_ours = structs.state(page.view, structs.SEGMENT_KIND).uuid == uuid
        # One that is good, of another device, is what this one held before it was formatted.
        if is_ours or (is_one and not structs.has_good_sum(page.view)):
            self.damaged.append(DamagedSegment(index))

    async def _look_into(self, each: DamagedSegment, walker: Walker) -> None:
        """Tell what is lost with a segment's header."""
        each.sequence = await walker.guess(each.index)
        what = f"the header of segment {each.index} is damaged"
        # Without records it may have been torn by a crash, as it was begun.
        expected = not self.found.clean
        if each.sequence is not None:
            chain = await walker.records(each.index, each.sequence, trusted=True)
            expected = each.sequence >= self.verify_from
            what += f", and {chain.records + len(chain.behind)} records are in it"
        self.tell(FaultKind.SEGMENT, what, self.offset(each.index), expected=expected)

    def _walker(self, *, content: bool = False) -> Walker:
        salt = record.make_salt(self.found.uuid)
        return Walker(self.engine, self.found.geometry, salt, content=content)

    # -- records and tables

    @property
    def work_bytes(self) -> int:
        """What `walk` will read, at most."""
        return len(self._used()) * self.found.geometry.segment_bytes

    def _used(self) -> list[Segment]:
        return [
            each
            for each in self.space.segments
            if each.state is not SegmentState.FREE and not each.unreadable
        ]

    async def walk(self, advance: Advance, *, content: bool) -> None:
        """Read all segments that are not free. Raises DeviceLost.

        `content`: also compare blocks with their digests, where a record is a block as it is.
        """
        blobs = await read_tables(self.engine, self.space, record.make_salt(self.found.uuid))
        self.tables = await trio.to_thread.run_sync(choose, blobs, self._present())
        del blobs
        used = self._used()
        readers = [
            partial(self._read, self._walker(content=content), advance)
            for _ in range(min(_SEGMENTS_AT_ONCE, len(used)))
        ]
        await _share([each.index for each in used], readers)

    def _present(self) -> I64:
        """The sequence of segments whose records a start takes from tables, else -1."""
        return np.array(
            [
                each.sequence
                if each.state is SegmentState.CLOSED and each.sequence < self.verify_from
                else -1
                for each in self.space.segments
            ],
            np.int64,
        )

    async def _read(self, walker: Walker, advance: Advance, index: int) -> None:
        segment = self.space.segments[index]
        if segment.state is SegmentState.TABLE:
            await self._read_table(walker, segment)
        else:
            trusted = segment.sequence < self.verify_from
            chain = await walker.records(index, segment.sequence, trusted=trusted)
            self._take(chain)
        advance(self.found.geometry.segment_bytes)

    async def _read_table(self, walker: Walker, segment: Segment) -> None:
        chain = await walker.blobs(segment.index, segment.sequence)
        if chain.error is not None:
            self.tell(FaultKind.UNREADABLE, str(chain.error), self.offset(segment.index))
        newest = max(
            each.sequence for each in self.space.segments if each.state is SegmentState.TABLE
        )
        for position, is_followed in chain.bad:
            # A crash tears what was not flushed, this time or before an earlier start.
            earlier = segment.sequence >> _EPOCH_SHIFT < newest >> _EPOCH_SHIFT
            write_failed = segment.sequence < newest and not is_followed
            self.tell(
                FaultKind.TABLE,
                "a summary or a piece of a checkpoint is damaged",
                self.offset(segment.index, position),
                expected=not self.found.clean or earlier or write_failed,
            )

    def _take(self, chain: Chain) -> None:
        self.report.records += chain.records
        self.space.segments[chain.index].used_bytes = chain.end
        if chain.error is not None:
            self.tell(FaultKind.UNREADABLE, str(chain.error), self.offset(chain.index, chain.end))
        if chain.index in self.tables.covered:
            self.covered.append(cold_compare.slim(chain.facts))
        else:
            self.others.append(chain.facts)
        chain.facts = Facts()  # it is long
        self.compared.extend(chain.compared)
        if chain.bad or chain.damaged or chain.behind:
            self.chains.append(chain)


async def _share(todo: Iterable[int], workers: Sequence[Callable[[int], Awaitable[None]]]) -> None:
    """Have each of these numbers worked on by one of the workers. Raises DeviceLost."""
    left = iter(todo)
    lost: list[DeviceLost] = []

    async def work(do: Callable[[int], Awaitable[None]]) -> None:
        for number in left:
            if lost:
                return
            try:
                await do(number)
            except DeviceLost as error:
                lost.append(error)

    async with trio.open_nursery() as nursery:
        for do in workers:
            nursery.start_soon(work, do)
    if lost:
        raise lost[0]
