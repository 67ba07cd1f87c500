"""Recovery of one cold device: read every record that is there, and trust none unseen."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from ctxfs.core.meta import Entry, Put
from ctxfs.device.engine import Engine
from ctxfs.errors import DeviceError, DeviceLost
from ctxfs.ondisk import ledger, record
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.facts import Facts, FactsBuilder
from ctxfs.ondisk.layout import ALIGN_BYTES, HEADER_BYTES_MAX
from ctxfs.ondisk.record import DataSum, Place, RecordHeader, RecordKind
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_parts import pack_part
from ctxfs.tiers.cold_space import Segment, Space

VERIFY_NONE: Final = 2**64
_SEGMENTS_AT_ONCE: Final = 16
_HEADERS_AT_ONCE: Final = 64
_WINDOW_BYTES: Final = 512 << 10
# Where records are far apart only their headers are read; where they are near, all is.
_NEAR_BYTES: Final = 64 << 10
_AHEAD_FAR_BYTES: Final = 2 * ALIGN_BYTES


@dataclass(slots=True)
class ScanCounts:
    """`torn`: in segments that were being written when the device was left. `corrupt`: others."""

    records: int = 0
    torn: int = 0
    corrupt: int = 0
    unreadable: int = 0  # segments that a read error ended
    highest_sequence: int = 0


class _Window:
    """A stretch of one segment in memory."""

    def __init__(self, engine: Engine, space: Space) -> None:
        self._engine = engine
        self._geometry = space.geometry
        self._scratch = Scratch(max(_WINDOW_BYTES, HEADER_BYTES_MAX))
        self._index = 0
        self._start = self._end = 0

    def move(self, index: int) -> None:
        """To another segment."""
        self._index = index
        self._start = self._end = 0

    async def view(self, position: int, length: int, ahead: int) -> memoryview:
        """Bytes of the segment from `position` on, at least `length` unless it ends before.

        What is not there yet is read, and up to `ahead` bytes with it.
        """
        length = min(length, self._geometry.segment_bytes - position)
        if not self._start <= position <= position + length <= self._end:
            wanted = max(length, min(ahead, self._geometry.segment_bytes - position))
            self._start = self._end = position
            offset = self._geometry.segment_offset(self._index) + position
            await self._engine.read(offset, self._scratch.span(0, wanted))
            self._end = position + wanted
        return self._scratch.view[position - self._start : self._end - self._start]


class Scan:
    """Reads the segments of one device, several at a time: first what they are, then those whose
    records nothing else tells of."""

    def __init__(self, engine: Engine, space: Space, uuid: bytes, verify_from: int) -> None:
        """`verify_from`: in segments of this sequence and later the data is checked too."""
        self._engine = engine
        self._space = space
        self._uuid = uuid
        self._salt = record.make_salt(uuid)
        self._verify_from = verify_from
        self.counts = ScanCounts()
        # Records with data that is not what it should be: none of them was ever acknowledged.
        self.torn: list[tuple[Segment, int, RecordHeader]] = []
        # Places of headers that are not what they should be: nothing behind them was, either.
        self.torn_headers: list[tuple[Segment, int]] = []
        self._lost: DeviceLost | None = None
        self._bad_segments: set[int] = set()  # by index: something in them is not what it should be
        self.facts: dict[int, Facts] = {}  # of the segments that were read through

    async def find(self) -> None:
        """Read the header of every segment. Raises DeviceLost."""

        async def look(index: int, window: _Window) -> None:
            start = await window.view(0, SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES)
            is_known = False
            for magic in (segment_header.MAGIC, segment_header.TABLE_MAGIC):
                sequence = segment_header.decode(start, self._uuid, index, magic)
                if sequence is not None:
                    self.counts.highest_sequence = max(self.counts.highest_sequence, sequence)
                    holds_tables = magic == segment_header.TABLE_MAGIC
                    self._space.adopt(index, sequence, SEGMENT_HEADER_BYTES, holds_tables)
                    is_known = True
            if not is_known and segment_header.is_damaged(start, self._uuid):
                self.counts.corrupt += 1  # whatever was in it: the segment is free now

        await self._each(range(self._space.geometry.segment_count), look, _HEADERS_AT_ONCE)
        self._space.find_free()

    async def read(self, indexes: Iterable[int]) -> None:
        """Read every record of these segments. Raises DeviceLost; other errors end the segment
        they happen in."""
        await self._each(indexes, self._read_segment, _SEGMENTS_AT_ONCE)

    def can_read(self, index: int) -> bool:
        """Whether the header of this segment could be read."""
        return index not in self._bad_segments

    def is_good(self, index: int) -> bool:
        """Whether nothing in this segment, which was read, was other than it should be."""
        return index in self.facts and index not in self._bad_segments

    async def _each(
        self,
        indexes: Iterable[int],
        work: Callable[[int, _Window], Awaitable[None]],
        at_once: int,
    ) -> None:
        todo = iter(indexes)
        async with trio.open_nursery() as nursery:
            for _ in range(min(at_once, self._space.geometry.segment_count)):
                nursery.start_soon(self._work, todo, work)
        if self._lost is not None:
            raise self._lost

    async def _work(
        self, indexes: Iterator[int], work: Callable[[int, _Window], Awaitable[None]]
    ) -> None:
        window = _Window(self._engine, self._space)
        for index in indexes:
            if self._lost is not None:
                return
            window.move(index)
            try:
                await work(index, window)
            except DeviceLost as error:
                self._lost = error
            except DeviceError:
                # Nothing new may be written over what could not be read: reclaiming erases it.
                self.counts.unreadable += 1
                self._bad_segments.add(index)
                self._space.adopt(index, self._space.segments[index].sequence, ALIGN_BYTES)

    async def _read_segment(self, index: int, window: _Window) -> None:
        segment = self._space.segments[index]
        builder = FactsBuilder(index)
        segment_bytes = self._space.geometry.segment_bytes
        verified = segment.sequence >= self._verify_from
        position = SEGMENT_HEADER_BYTES
        ahead = _AHEAD_FAR_BYTES
        try:
            while position < segment_bytes:
                found = await self._read_record(segment, position, ahead, window, verified)
                if found is None:
                    break
                header, entries = found
                if entries is not None:
                    self.counts.records += 1
                    add_record(builder, index, position, header, entries)
                near = header.record_bytes <= _NEAR_BYTES
                ahead = _WINDOW_BYTES if near else _AHEAD_FAR_BYTES
                position += header.record_bytes
                segment.used_bytes = position
        finally:
            self.facts[index] = builder.finish(segment.sequence, segment.used_bytes)

    async def _read_record(
        self, segment: Segment, position: int, ahead: int, window: _Window, verified: bool
    ) -> tuple[RecordHeader, list[Entry] | None] | None:
        """One record, without entries if its data is torn; None where the chain of headers ends."""
        place = Place(self._salt, segment.sequence, position)
        data = await window.view(position, ALIGN_BYTES, ahead)
        header_bytes = record.peek_header_bytes(data)
        if header_bytes > self._space.geometry.header_bytes_max:
            header_bytes = 0
        if header_bytes > len(data):
            data = await window.view(position, header_bytes, header_bytes)
        found = record.decode(data, place) if header_bytes else None
        if found is None:
            if record.belongs(data, place):
                self._note_bad_header(segment, position, verified)
            return None
        header, _ = found
        if position + header.record_bytes > self._space.geometry.segment_bytes:
            self._note_bad_header(segment, position, verified)
            return None
        if verified and not await self._is_whole(header, position, ahead, window):
            self._count_bad(segment, verified)
            self.torn.append((segment, position, header))
            return header, None  # the headers after it are as good as ever
        return found

    async def _is_whole(
        self, header: RecordHeader, position: int, ahead: int, window: _Window
    ) -> bool:
        """Whether the data is what its checksum says. A note has none."""
        if not header.data_bytes or header.kind is RecordKind.NOTE:
            return True
        found = DataSum(by_digest=header.by_digest)
        at = position + header.header_bytes
        end = at + header.data_bytes
        checked_end = at + header.checked_bytes
        while at < end:
            length = min(end - at, _WINDOW_BYTES)
            data = await window.view(at, length, max(ahead, length))
            found.update(data[: min(length, checked_end - at)])
            at += length
        return found.value() == header.data_checksum

    async def void_torn(self) -> None:
        """Make sure that no later recovery, which may look less closely, takes a torn record, or
        takes one for damage. Raises DeviceError.
        """
        zeros = Scratch(ALIGN_BYTES)
        for segment, position in self.torn_headers:
            offset = self._space.geometry.segment_offset(segment.index) + position
            await self._engine.write(offset, [zeros.span(0, ALIGN_BYTES)])
        for segment, position, header in self.torn:
            scratch = Scratch(header.header_bytes)
            place = Place(self._salt, segment.sequence, position)
            record.encode_into(scratch.view, record.void(header), place, b"")
            offset = self._space.geometry.segment_offset(segment.index) + position
            await self._engine.write(offset, [scratch.span(0, header.header_bytes)])

    def _note_bad_header(self, segment: Segment, position: int, verified: bool) -> None:
        if verified:
            self.torn_headers.append((segment, position))
        self._count_bad(segment, verified)

    def _count_bad(self, segment: Segment, verified: bool) -> None:
        self._bad_segments.add(segment.index)
        if verified:
            self.counts.torn += 1
        else:
            self.counts.corrupt += 1


def add_record(
    builder: FactsBuilder,
    segment: int,
    position: int,
    header: RecordHeader,
    entries: Sequence[Entry],
) -> None:
    """Tell the builder of a good record at `position` of `segment`."""
    builder.see_stamp(header.stamp)
    if header.kind is RecordKind.NOTE:
        for entry in entries:
            builder.add_note(header.stamp, entry, len(ledger.encode(entry)))
        return
    meta = next((e.meta for e in entries if isinstance(e, Put)), None)
    if meta is None or meta.generation != header.generation:
        return  # of a kind this version does not write
    part = pack_part(
        segment, position, header.header_bytes, header.data_bytes, method=header.method
    )
    builder.add_data(meta, header, part)
