"""Giving records their places in the open segment, in the order in which they were asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ctxfs.device.engine import Span
from ctxfs.errors import DeviceError, TierFull
from ctxfs.ondisk import record
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.record import UNNAMED, Place, RecordHeader, RecordKind, header_bytes_for
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers.cold_buffers import Scratch, checksum, slice_span
from ctxfs.tiers.cold_parts import pack_part
from ctxfs.tiers.cold_requests import DataRequest, NoteRequest, Request, take_frames
from ctxfs.tiers.cold_space import Segment, Space

BATCH_BYTES: Final = 4 << 20
ARENA_BYTES: Final = 2 << 20  # headers of one batch


@dataclass(slots=True, eq=False)
class Item:
    """One record, or a segment's own header, that has its place."""

    segment: Segment
    position: int
    spans: list[Span]
    length_bytes: int
    request: Request | None
    part: int = 0  # of a data record
    notes: Sequence[int] = ()  # of a note record: which of the request's entries
    stamp: int = 0  # of the record


@dataclass(slots=True, eq=False)
class Batch:
    """Records that are written at once. `arena` holds their headers."""

    arena: Scratch
    items: list[Item] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    left: list[Segment] = field(default_factory=list)  # nothing is placed in them after this
    failures: list[tuple[Item, DeviceError]] = field(default_factory=list)
    written: bool = False  # all of it has been tried
    length_bytes: int = 0
    headers_used: int = 0

    def header(self, length_bytes: int) -> tuple[memoryview, Span]:
        """Memory for a header: as a view, and as the engine takes it."""
        start = self.headers_used
        self.headers_used += length_bytes
        return self.arena.view[start : self.headers_used], self.arena.span(start, length_bytes)

    def takes(self, header_bytes: int) -> bool:
        """Whether one more record, and a segment header before it, still go in."""
        most = self.headers_used + header_bytes + SEGMENT_HEADER_BYTES
        return self.length_bytes < BATCH_BYTES and most <= ARENA_BYTES


class Placer:
    """Fills the open segment, and opens the next one."""

    def __init__(self, space: Space, uuid: bytes) -> None:
        self._space = space
        self._uuid = uuid
        self._salt = record.make_salt(uuid)
        self.next_sequence = 0  # higher than that of any segment begun so far
        self.stamp = 0  # the highest of any entry that went through here

    async def place(self, request: Request, batch: Batch) -> None:
        """Place what goes into the batch; `request.placed` says whether that is all.

        Raises TierFull where no segment is free.
        """
        if isinstance(request, DataRequest):
            await self._place_data(request, batch)
        elif isinstance(request, NoteRequest):
            self._place_notes(request, batch)

    async def _place_data(self, request: DataRequest, batch: Batch) -> None:
        header_bytes = request.header_bytes
        total = request.source.length
        while not request.placed:
            if not batch.takes(header_bytes):
                return
            start = request.placed_bytes
            least = min(total - start, self._space.geometry.split_bytes_min)
            segment = self._segment_with(header_bytes + least, request.floor, batch)
            data_bytes = min(total - start, self._space.rest_bytes - header_bytes)
            data = slice_span(request.source, start, data_bytes)
            part_length = min(data_bytes, request.content_length - start)
            if data_bytes == total:
                data_checksum = request.data_checksum
            else:
                of = Span(data.address, part_length) if request.by_digest else data
                data_checksum = await checksum(of, by_digest=request.by_digest)
            header = RecordHeader(
                kind=RecordKind.DATA,
                header_bytes=header_bytes,
                stamp=UNNAMED if request.unnamed else self.stamp + 1,
                generation=request.meta.generation,
                part_offset=request.content_offset + start,
                part_length=part_length,
                data_bytes=data_bytes,
                data_checksum=data_checksum,
                by_digest=request.by_digest,
                encoded_bytes=request.encoded_bytes,
                method=request.method,
            )
            item = self._place(segment, header, request.frames, batch, request)
            if data_bytes:
                item.spans.append(data)
            item.part = pack_part(
                segment.index,
                item.position,
                header_bytes,
                data_bytes,
                method=request.method,
            )
            if segment.facts is not None:
                segment.facts.add_data(request.meta, header, item.part)
            segment.generations.append(request.meta.generation)
            request.tried.add(segment.index)
            request.stamp = max(request.stamp, header.stamp)
            request.placed_bytes += data_bytes
            request.placed = request.placed_bytes == total

    def _place_notes(self, request: NoteRequest, batch: Batch) -> None:
        frames = request.frames
        longest = self._space.geometry.header_bytes_max
        while request.next < len(frames):
            if not batch.takes(longest):
                return
            first = frames if request.whole else frames[request.next : request.next + 1]
            least = header_bytes_for(sum(map(len, first)))
            segment = self._segment_with(least, request.floor, batch)
            room = min(self._space.rest_bytes, longest)
            count = len(first) if request.whole else take_frames(frames, request.next, room)
            taken = range(request.next, request.next + count)
            data = b"".join(frames[at] for at in taken)
            header = RecordHeader(
                kind=RecordKind.NOTE,
                header_bytes=header_bytes_for(len(data)),
                stamp=self.stamp + 1,
            )
            self._place(segment, header, data, batch, request).notes = taken
            if segment.facts is not None:
                for at in taken:
                    segment.facts.add_note(header.stamp, request.entries[at], len(frames[at]))
            request.next += count
        request.placed = True

    def _place(
        self,
        segment: Segment,
        header: RecordHeader,
        frames: bytes,
        batch: Batch,
        request: Request,
    ) -> Item:
        view, span = batch.header(header.header_bytes)
        place = Place(self._salt, segment.sequence, segment.used_bytes)
        record.encode_into(view, header, place, frames)
        item = Item(
            segment,
            segment.used_bytes,
            [span],
            header.record_bytes,
            request,
            stamp=header.stamp,
        )
        segment.used_bytes += header.record_bytes
        batch.items.append(item)
        batch.length_bytes += header.record_bytes
        return item

    def _segment_with(self, least_bytes: int, floor: int, batch: Batch) -> Segment:
        """The open segment, a new one if it has less room. Raises TierFull where none is free."""
        left = self._space.open
        if left is not None and self._space.rest_bytes >= least_bytes:
            return left
        segment = self._space.open_next(self.next_sequence, floor)
        if segment is None:
            raise TierFull("no segment is free")
        if left is not None:
            batch.left.append(left)
        self.next_sequence += 1
        view, span = batch.header(SEGMENT_HEADER_BYTES)
        view[:] = segment_header.encode(self._uuid, segment.index, segment.sequence)
        batch.items.append(Item(segment, 0, [span], SEGMENT_HEADER_BYTES, None))
        return segment
