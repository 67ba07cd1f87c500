"""The writing end of one cold device: batches of records, in order, into the open segment.

There is no task of its own. Whoever comes first writes, also what others bring meanwhile, until
its own requests are done; then the next in the queue is appointed. So there is one batch in
flight at a time, and what is acknowledged has every earlier record of its segment on the device:
a scan never stops before it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from ctxfs.device.engine import Engine, Span
from ctxfs.errors import DeviceError, TierFull
from ctxfs.ondisk import record
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.record import Place, RecordHeader, RecordKind, header_bytes_for
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers.cold_buffers import Scratch, checksum, slice_span
from ctxfs.tiers.cold_health import Health
from ctxfs.tiers.cold_index import ColdIndex, pack_part
from ctxfs.tiers.cold_requests import DataRequest, Group, NoteRequest, Request, take_frames
from ctxfs.tiers.cold_space import Segment, Space

BATCH_BYTES: Final = 16 << 20
_ARENA_BYTES: Final = 2 << 20  # headers of one batch
# Small neighbours go out as one write, up to so much; where it fails, so much is lost.
_MERGE_BYTES_MAX: Final = 1 << 20
_MERGE_SHARE: Final = 8  # of a segment: one in so many
_MERGE_SPANS: Final = 256


@dataclass(slots=True)
class _Item:
    """One record, or a segment's own header, that has its place."""

    segment: Segment
    position: int
    spans: list[Span]
    length_bytes: int
    request: Request | None
    part: int = 0  # of a data record
    notes: Sequence[int] = ()  # of a note record: which of the request's entries


@dataclass(slots=True)
class _Batch:
    items: list[_Item] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    left: list[Segment] = field(default_factory=list)  # there was too little room in them
    length_bytes: int = 0
    headers_used: int = 0

    def header(self, length_bytes: int, arena: Scratch) -> tuple[memoryview, Span]:
        start = self.headers_used
        self.headers_used += length_bytes
        return arena.view[start : start + length_bytes], arena.span(start, length_bytes)

    def takes(self, header_bytes: int) -> bool:
        """Whether one more record, and a segment header before it, still go in."""
        most = self.headers_used + header_bytes + SEGMENT_HEADER_BYTES
        return self.length_bytes < BATCH_BYTES and most <= _ARENA_BYTES


class ColdWriter:
    """Raises nothing of its own but what `submit` leaves in each request's `error`."""

    def __init__(
        self,
        engine: Engine,
        health: Health,
        space: Space,
        index: ColdIndex,
        uuid: bytes,
    ) -> None:
        self._engine = engine
        self._health = health
        self._space = space
        self._index = index
        self._uuid = uuid
        self._salt = record.make_salt(uuid)
        self._merge_bytes = min(_MERGE_BYTES_MAX, space.geometry.segment_bytes // _MERGE_SHARE)
        self._next_sequence = 0
        self._queue: deque[Request] = deque()
        self._leading = False
        self._arena = Scratch(_ARENA_BYTES)
        self.stamp = 0  # the highest of any entry that went through here
        self.batches = 0  # finished
        self.writing = False  # a batch is in flight
        self.batch_ended = trio.lowlevel.ParkingLot()
        # Every record in a segment of a lower sequence has been written or has failed.
        self.settled_sequence = 0

    @property
    def next_sequence(self) -> int:
        """Higher than that of any segment begun so far."""
        return self._next_sequence

    def start_with(self, sequence: int) -> None:
        """The next segment gets this sequence: higher than any on the medium, now or ever."""
        self._next_sequence = self.settled_sequence = sequence

    async def submit(self, requests: Sequence[Request]) -> None:
        """Return when all are finished; each says in `error` how it went.

        Cancelled: what is not begun is withdrawn, what is begun is finished first, so memory is
        no longer touched. Cancelled is raised only where something was withdrawn.
        """
        group = Group()
        group.left = len(requests)
        for request in requests:
            request.group = group
        self._queue.extend(requests)
        if self._leading:
            try:
                await group.wake.wait()
            except trio.Cancelled:
                withdrawn = self._withdraw(requests)
                if group.left:
                    with trio.CancelScope(shield=True):
                        await group.wake.wait()
                await self._lead(group)
                if withdrawn:
                    raise
                return
        else:
            self._leading = group.appointed = True
        await self._lead(group)

    def _withdraw(self, requests: Sequence[Request]) -> bool:
        untaken = [request for request in requests if request.group and not request.taken]
        for request in untaken:
            self._queue.remove(request)
            request.finish(DeviceError("withdrawn"))
        return bool(untaken)

    async def _lead(self, group: Group) -> None:
        """Write until the group is done, if it is this one's turn, and appoint the next."""
        if not group.appointed:
            return
        try:
            with trio.CancelScope(shield=True):
                while group.left:
                    await self._write_batch()
        finally:
            following = self._queue[0].group if self._queue else None
            if following is None:
                self._leading = False
            else:
                following.appointed = True
                following.wake.set()

    # -- one batch

    async def _write_batch(self) -> None:
        batch = _Batch()
        self.writing = True
        try:
            await self._fill(batch)
            failures = await self._write(batch)
        except BaseException as error:  # a bug: nobody may wait for ever because of it
            for request in batch.requests:
                request.finish(DeviceError(f"the writer failed: {error!r}"))
            raise
        else:
            self._settle(batch, failures)
        finally:
            self.writing = False
            self.batch_ended.unpark_all()

    async def _fill(self, batch: _Batch) -> None:
        """Give places to what is queued, until the batch is full."""
        while self._queue:
            request = self._queue[0]
            if request.error is None:  # else a part of it failed, and it is finished
                request.taken = True
                batch.requests.append(request)
                try:
                    if isinstance(request, DataRequest):
                        await self._place_data(request, batch)
                    elif isinstance(request, NoteRequest):
                        self._place_notes(request, batch)
                except TierFull as error:
                    request.error = error
                if not request.placed and request.error is None:
                    return  # the rest of it comes with the next batch
            self._queue.popleft()

    async def _place_data(self, request: DataRequest, batch: _Batch) -> None:
        header_bytes = request.header_bytes
        total = request.source.length
        while not request.placed:
            if not batch.takes(header_bytes):
                return
            left = total - request.placed_bytes
            least = header_bytes + min(left, self._space.geometry.split_bytes_min)
            segment = self._segment_with(least, request.floor, batch)
            data_bytes = min(left, self._space.rest_bytes - header_bytes)
            start = request.placed_bytes
            data = slice_span(request.source, start, data_bytes)
            whole = data_bytes == total
            header = RecordHeader(
                kind=RecordKind.DATA,
                header_bytes=header_bytes,
                stamp=self.stamp + 1,
                generation=request.meta.generation,
                part_offset=request.content_offset + start,
                part_length=min(data_bytes, request.content_length - start),
                data_bytes=data_bytes,
                data_checksum=request.data_checksum if whole else await checksum(data),
            )
            item = self._place(segment, header, request.frames, batch, request)
            if data_bytes:
                item.spans.append(data)
            item.part = pack_part(segment.index, item.position, header_bytes, data_bytes)
            segment.generations.append(request.meta.generation)
            request.tried.add(segment.index)
            request.stamp = max(request.stamp, header.stamp)
            request.placed_bytes += data_bytes
            request.placed = request.placed_bytes == total

    def _place_notes(self, request: NoteRequest, batch: _Batch) -> None:
        frames = request.frames
        while request.next < len(frames):
            least = header_bytes_for(len(frames[request.next]))
            if not batch.takes(max(least, self._space.geometry.header_bytes_max)):
                return
            segment = self._segment_with(least, request.floor, batch)
            room = min(self._space.rest_bytes, self._space.geometry.header_bytes_max)
            count = take_frames(frames, request.next, room)
            taken = range(request.next, request.next + count)
            data = b"".join(frames[at] for at in taken)
            header = RecordHeader(
                kind=RecordKind.NOTE,
                header_bytes=header_bytes_for(len(data)),
                stamp=self.stamp + 1,
            )
            self._place(segment, header, data, batch, request).notes = taken
            request.next += count
        request.placed = True

    def _place(
        self,
        segment: Segment,
        header: RecordHeader,
        frames: bytes,
        batch: _Batch,
        request: Request,
    ) -> _Item:
        view, span = batch.header(header.header_bytes, self._arena)
        place = Place(self._salt, segment.sequence, segment.used_bytes)
        record.encode_into(view, header, place, frames)
        item = _Item(segment, segment.used_bytes, [span], header.record_bytes, request)
        segment.used_bytes += header.record_bytes
        batch.items.append(item)
        batch.length_bytes += header.record_bytes
        return item

    def _segment_with(self, least_bytes: int, floor: int, batch: _Batch) -> Segment:
        """The open segment, a new one if it has less room. Raises TierFull where none is free."""
        if self._space.open is not None and self._space.rest_bytes >= least_bytes:
            return self._space.open
        left = self._space.open
        segment = self._space.open_next(self._next_sequence, floor)
        if segment is None:
            raise TierFull("no segment is free")
        if left is not None:
            batch.left.append(left)
        self._next_sequence += 1
        view, span = batch.header(SEGMENT_HEADER_BYTES, self._arena)
        view[:] = segment_header.encode(self._uuid, segment.index, segment.sequence)
        batch.items.append(_Item(segment, 0, [span], SEGMENT_HEADER_BYTES, None))
        return segment

    async def _write(self, batch: _Batch) -> dict[int, tuple[int, DeviceError]]:
        """Per segment index: the position from which on its records are lost, and why."""
        failures: dict[int, tuple[int, DeviceError]] = {}

        async def write(items: Sequence[_Item]) -> None:
            first = items[0]
            offset = self._space.geometry.segment_offset(first.segment.index) + first.position
            try:
                self._health.check_present()
                await self._engine.write(offset, [span for item in items for span in item.spans])
            except DeviceError as error:
                known = failures.get(first.segment.index)
                if known is None or first.position < known[0]:
                    failures[first.segment.index] = (first.position, error)
                self._health.note_failure(error)

        async with trio.open_nursery() as nursery:
            for run in _merge(batch.items, self._merge_bytes):
                nursery.start_soon(write, run)
        if not failures:
            self._health.note_success()
        return failures

    def _settle(self, batch: _Batch, failures: dict[int, tuple[int, DeviceError]]) -> None:
        """Tell the index what is on the device now, and the callers how it went."""
        for item in batch.items:
            failure = failures.get(item.segment.index)
            lost = failure is not None and item.position >= failure[0]
            request = item.request
            if isinstance(request, NoteRequest):
                self._settle_notes(request, item, lost)
            elif isinstance(request, DataRequest) and not lost:
                request.parts.append(item.part)
            if lost and failure is not None and request is not None and request.error is None:
                request.error = failure[1]
        if self._space.open is not None and self._space.open.index in failures:
            self._space.close_open()
        self._space.settle(batch.left)
        for request in batch.requests:
            if request.placed or request.error is not None:
                self._finish(request)
        self.batches += 1
        opened = self._space.open
        self.settled_sequence = opened.sequence if opened else self._next_sequence

    def _settle_notes(self, request: NoteRequest, item: _Item, lost: bool) -> None:
        for at in item.notes:
            entry = request.entries[at]
            if lost:
                self._index.add_holder(entry, item.segment)
            else:
                self._index.add_note(entry, item.segment, len(request.frames[at]))

    def _finish(self, request: Request) -> None:
        if isinstance(request, DataRequest):
            generation = request.meta.generation
            written = request.error is None
            if request.replaces is None and written:
                self._index.add_block(generation, tuple(request.parts))
            elif request.replaces is not None and generation in self._index:
                if written:
                    self._index.replace_part(generation, request.replaces, tuple(request.parts))
                else:
                    self._index.add_holders(generation, request.tried)
            else:  # failed, or dropped while it was carried over; yet it may be on the medium
                self.stamp = max(self.stamp, request.stamp)
                self._index.bury_remains(generation, request.stamp, request.tried)
        request.finish()


def _merge(items: Sequence[_Item], merge_bytes: int) -> list[list[_Item]]:
    """Runs of neighbours that are better written at once."""
    runs: list[list[_Item]] = []
    length = spans = 0
    for item in items:
        last = runs[-1][-1] if runs else None
        if (
            last is None
            or last.segment is not item.segment
            or last.position + last.length_bytes != item.position
            or length + item.length_bytes > merge_bytes
            or spans + len(item.spans) > _MERGE_SPANS
        ):
            runs.append([])
            length = spans = 0
        runs[-1].append(item)
        length += item.length_bytes
        spans += len(item.spans)
    return runs
