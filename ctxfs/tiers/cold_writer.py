"""The writing end of one cold device: batches of records, in order, into the open segment.

Some batches may be in flight, so that the device never waits for the next one; they are settled in
their order. So what is acknowledged has every earlier record of its segment on the device, and a
scan never stops before it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import trio

from ctxfs.core.meta import Alias
from ctxfs.device.engine import Engine
from ctxfs.errors import DeviceError, TierFull
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_health import Health
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_placing import ARENA_BYTES, Batch, Item, Placer
from ctxfs.tiers.cold_requests import DataRequest, Group, NoteRequest, Request
from ctxfs.tiers.cold_space import Segment, Space

BATCHES_AT_ONCE: Final = 4
# Small neighbours go out as one write, up to so much; where it fails, so much is lost.
_MERGE_BYTES_MAX: Final = 1 << 20
_MERGE_SHARE: Final = 8  # of a segment: one in so many
_MERGE_SPANS: Final = 256


class ColdWriter:
    """Raises nothing of its own: how it went is left in each request's `error`.

    Who finds nobody writing writes its own batch. For what comes meanwhile there is a task, until
    nothing is left. It is a system task, for it works for many callers, none of whom owns it; it
    does not outlive them, since each waits, shielded, until what it asked for is finished.
    """

    def __init__(
        self, engine: Engine, health: Health, space: Space, index: ColdIndex, uuid: bytes
    ) -> None:
        self._engine = engine
        self._health = health
        self._space = space
        self._index = index
        self.placer = Placer(space, uuid)
        self._merge_bytes = min(_MERGE_BYTES_MAX, space.geometry.segment_bytes // _MERGE_SHARE)
        self._queue: deque[Request] = deque()
        self._inflight: deque[Batch] = deque()
        self._arenas = [Scratch(ARENA_BYTES) for _ in range(BATCHES_AT_ONCE)]
        # By sequence of a segment: the position from which on its records are lost, and why.
        self._failures: dict[int, tuple[int, DeviceError]] = {}
        # The same, until nothing can be found there any more: by sequence, the segment and where.
        self.broken: dict[int, tuple[Segment, int]] = {}
        self._signal = trio.Event()  # something was queued, or a batch is written
        self._filling = False  # a batch, in which failures must not show half way
        self._leads = False  # a caller writes
        self._works = False  # the task does
        self.batches = 0  # settled
        self.batch_ended = trio.lowlevel.ParkingLot()
        # Every record in a segment of a lower sequence has been written or has failed.
        self.settled_sequence = 0

    def start_with(self, sequence: int) -> None:
        """The next segment gets this sequence: higher than any on the medium, now or ever."""
        self.placer.next_sequence = self.settled_sequence = sequence

    async def submit(self, requests: Sequence[Request]) -> None:
        """Return when all are finished.

        Cancelled: what is not begun is withdrawn, what is begun is finished first, so memory is
        no longer touched. Cancelled is raised only where something was withdrawn.
        """
        group = Group(len(requests))
        for request in requests:
            request.group = group
        self._queue.extend(requests)
        self._signal.set()
        if not self.writing:
            with trio.CancelScope(shield=True):
                await self._lead()
        else:
            self._begin_work()
        try:
            await group.finished.wait()
        except trio.Cancelled:
            withdrawn = self._withdraw(requests)
            with trio.CancelScope(shield=True):
                await group.finished.wait()
            if withdrawn:
                raise

    def _withdraw(self, requests: Sequence[Request]) -> bool:
        untaken = [request for request in requests if request.group and not request.taken]
        for request in untaken:
            self._queue.remove(request)
            request.finish(DeviceError("withdrawn"))
        return bool(untaken)

    @property
    def writing(self) -> bool:
        """Whether anything is queued or in flight."""
        return self._leads or self._works

    async def _lead(self) -> None:
        """Write the first batch: a task for it would begin some turns of the loop later."""
        self._leads = True
        try:
            batch = await self._next_batch()
            if self._queue:
                self._begin_work()
            await self._write(batch)
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            self._leads = False
            self.batch_ended.unpark_all()

    def _begin_work(self) -> None:
        if self._works:
            return
        self._works = True
        trio.lowlevel.spawn_system_task(self._work, name="ctxfs cold writer")

    async def _work(self) -> None:
        """Write until nothing is queued or in flight."""
        try:
            with trio.CancelScope(shield=True):
                while self._queue:  # leaving the nursery takes a turn, and more may come in it
                    async with trio.open_nursery() as nursery:
                        await self._write_all(nursery)
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            self._works = False
            self.batch_ended.unpark_all()

    def _fail_all(self, error: BaseException) -> None:
        """A bug: it ends the daemon, and nobody waits for ever."""
        for request in {request for batch in self._inflight for request in batch.requests}:
            request.finish(DeviceError(f"the writer failed: {error!r}"))
        for request in self._queue:
            request.finish(DeviceError(f"the writer failed: {error!r}"))

    async def _write_all(self, nursery: trio.Nursery) -> None:
        while self._queue or self._inflight:
            self._settle_written()
            if self._queue and len(self._inflight) < BATCHES_AT_ONCE and not self._filling:
                batch = await self._next_batch()
                nursery.start_soon(self._write, batch)
            elif self._inflight:
                self._signal = trio.Event()
                await self._signal.wait()

    async def _next_batch(self) -> Batch:
        """Take from the queue. One at a time: places are given in order."""
        batch = Batch(self._arenas.pop())
        self._inflight.append(batch)
        self._filling = True
        await self._fill(batch)
        self._filling = False
        self._signal.set()
        return batch

    async def _fill(self, batch: Batch) -> None:
        """Give places to what is queued, until the batch is full."""
        while self._queue:
            request = self._queue[0]
            if request.error is None:  # else a part of it failed, and the rest is not tried
                request.taken = True
                request.unsettled += 1
                batch.requests.append(request)
                try:
                    await self.placer.place(request, batch)
                except TierFull as error:
                    request.error = error
                if not request.placed and request.error is None:
                    return  # the rest of it comes with the next batch
            self._queue.popleft()

    async def _write(self, batch: Batch) -> None:
        runs = _merge(batch.items, self._merge_bytes)
        if len(runs) == 1:
            await self._write_run(batch, runs[0])
        else:
            async with trio.open_nursery() as nursery:
                for run in runs:
                    nursery.start_soon(self._write_run, batch, run)
        if batch.items and not batch.failures:
            self._health.note_success()
        batch.written = True
        if not self._filling:  # those that wait need not wait for another turn of the loop
            self._settle_written()
        self._signal.set()

    async def _write_run(self, batch: Batch, items: Sequence[Item]) -> None:
        first = items[0]
        offset = self._space.geometry.segment_offset(first.segment.index) + first.position
        try:
            self._health.check_present()
            await self._engine.write(offset, [span for item in items for span in item.spans])
        except DeviceError as error:
            batch.failures.append((first, error))
            self._health.note_failure(error)

    # -- what became of it

    def _settle_written(self) -> None:
        """In the order of the batches."""
        while self._inflight and self._inflight[0].written:
            self._settle(self._inflight.popleft())

    def _settle(self, batch: Batch) -> None:
        """Tell the index what is on the device now, and the callers how it went."""
        self._note_failures(batch)
        for item in batch.items:
            failure = self._failures.get(item.segment.sequence)
            lost = failure is not None and item.position >= failure[0]
            item.segment.kept |= not lost and item.request is not None
            request = item.request
            if isinstance(request, NoteRequest):
                self._settle_notes(request, item, lost)
            elif isinstance(request, DataRequest) and not lost:
                request.parts.append(item.part)
            if lost and failure is not None and request is not None and request.error is None:
                request.error = failure[1]
        self._space.settle(batch.left)
        for request in batch.requests:
            request.unsettled -= 1
            if not request.unsettled and (request.placed or request.error is not None):
                self._finish(request)
        self._arenas.append(batch.arena)
        self.batches += 1
        self.settled_sequence = self._first_unsettled_sequence()
        if not self._inflight:
            self._failures.clear()
        self.batch_ended.unpark_all()

    def _note_failures(self, batch: Batch) -> None:
        """Behind a record that failed nothing in its segment is found again: close it there."""
        for item, error in batch.failures:
            known = self._failures.get(item.segment.sequence)
            if known is None or item.position < known[0]:
                self._failures[item.segment.sequence] = item.position, error
                self.broken[item.segment.sequence] = item.segment, item.position
            item.segment.facts = None  # what arrived of it is for a scan to find out
            if self._space.open is item.segment:
                self._space.open = None
                # The next batch, if there is one, may be writing to it still.
                (self._inflight[-1] if self._inflight else batch).left.append(item.segment)

    def _first_unsettled_sequence(self) -> int:
        sequences = [item.segment.sequence for batch in self._inflight for item in batch.items]
        opened = self._space.open
        sequences.append(opened.sequence if opened else self.placer.next_sequence)
        return min(sequences)

    def _settle_notes(self, request: NoteRequest, item: Item, lost: bool) -> None:
        for at in item.notes:
            entry = request.entries[at]
            if lost:
                self._index.add_holder(entry, item.segment)
            else:
                self._index.add_note(entry, item.segment, len(request.frames[at]))
            if isinstance(entry, Alias):
                self._settle_alias(entry, item, lost)

    def _settle_alias(self, entry: Alias, item: Item, lost: bool) -> None:
        """One that failed, or is not what counts any more, may be on the medium all the same."""
        generation = entry.meta.generation
        if generation not in self._index:
            self._revoke(generation, item.stamp, [item.segment.index])
        elif lost or not self._index.is_alias_of(generation, entry.holder):
            self._index.add_holders(generation, [item.segment.index])

    def _revoke(self, generation: int, stamp: int, tried: Iterable[int]) -> None:
        """Records of a block that is not here may be on the medium."""
        self.placer.stamp = max(self.placer.stamp, stamp)
        self._index.bury_remains(generation, stamp, tried)

    def _finish(self, request: Request) -> None:
        if isinstance(request, DataRequest):
            generation = request.meta.generation
            parts = tuple(request.parts)
            if request.replaces is not None:
                self._finish_carried(request, request.replaces)
            elif request.error is not None:  # yet it may be on the medium
                if not request.unnamed:
                    self._revoke(generation, request.stamp, request.tried)
            elif request.unnamed:
                self._index.add_content(generation, parts)
            else:
                self._index.add_block(generation, parts)
        request.finish()

    def _finish_carried(self, request: DataRequest, replaced: int) -> None:
        generation = request.meta.generation
        if request.error is None:
            self._index.replace_part(generation, replaced, tuple(request.parts))
        if generation in self._index:
            self._index.add_holders(generation, request.tried)
        elif not request.unnamed:  # dropped meanwhile
            self._revoke(generation, request.stamp, request.tried)


def _merge(items: Sequence[Item], merge_bytes: int) -> list[list[Item]]:
    """Runs of neighbours that are better written at once."""
    runs: list[list[Item]] = []
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
