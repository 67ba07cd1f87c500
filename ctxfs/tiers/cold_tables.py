"""Writing summaries and checkpoints, so that the next start need not read every record.

All here is spared effort for later, never a promise: where it cannot be done, the next start takes
longer.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import trio

from ctxfs.core.columns import I64
from ctxfs.device.engine import Engine, Span
from ctxfs.errors import DeviceError, TierFull
from ctxfs.ondisk import blob, facts, record
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.blob import BLOB_HEADER_BYTES, BlobHeader, BlobKind
from ctxfs.ondisk.columnar import Table, make_table
from ctxfs.ondisk.facts import COVERS, Facts
from ctxfs.ondisk.layout import ALIGN_BYTES, padded
from ctxfs.ondisk.record import Place
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers import cold_facts
from ctxfs.tiers.cold_blobs import Blob, FoundTables, bytes_max, cut, read_blob
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_health import Health
from ctxfs.tiers.cold_placing import Placer
from ctxfs.tiers.cold_space import Segment, SegmentState, Space

_FINISHED_MAX: Final = 64  # segments whose facts wait for room

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePolicy:
    """When there are tables at all, and when a checkpoint takes the place of summaries.

    On a device of few segments reading all of them takes no time worth the room.
    """

    segments_min: int = 64
    summaries_max: int = 1024  # more are read too slowly one by one
    summaries_share: int = 4  # bytes of them, of a segment: one in so many, or as the checkpoint
    segments_share: int = 8  # where tables would take more than one segment in so many: none
    piece_bytes: int = 8 << 20  # of a checkpoint, made, written and read at a time


@dataclass(slots=True)
class _Scanned:
    """Facts about a segment that this start had to read."""

    segment: Segment
    sequence: int
    facts: Facts


class Tables:
    """The table segments of one device. `tend` from time to time, one at a time."""

    def __init__(
        self,
        engine: Engine,
        health: Health,
        space: Space,
        placer: Placer,
        uuid: bytes,
        policy: TablePolicy,
    ) -> None:
        self._engine = engine
        self._health = health
        self._space = space
        self._placer = placer
        self._uuid = uuid
        self._salt = record.make_salt(uuid)
        self._policy = policy
        self._tending = trio.Lock()
        self._open: Segment | None = None
        self._checkpoint: list[Blob] = []
        self._summaries: dict[int, list[Blob]] = {}  # by sequence of the segment
        self._scanned: deque[_Scanned] = deque()
        self._page = Scratch(ALIGN_BYTES)
        # The longest data that a table segment takes.
        self._blob_bytes_max = (
            space.geometry.segment_bytes - SEGMENT_HEADER_BYTES - BLOB_HEADER_BYTES
        )
        self._piece_bytes = min(policy.piece_bytes, self._blob_bytes_max)
        self.enabled = space.geometry.segment_count >= policy.segments_min
        space.keeps_facts = self.enabled
        self._space.table_wanted = self._wanted()

    def adopt(self, found: FoundTables, scanned: dict[int, Facts]) -> None:
        """What a recovery found; `scanned` is of segments that are to be summarised."""
        self._checkpoint = found.checkpoint
        self._summaries = found.summaries
        if self.enabled:
            for index, each in scanned.items():
                segment = self._space.segments[index]
                self._scanned.append(_Scanned(segment, segment.sequence, each))
        self._space.table_wanted = self._wanted()

    def _wanted(self) -> int:
        """Segments to keep back for the next checkpoint and the summaries after it."""
        if not self.enabled:
            return 0
        usable = self._space.geometry.segment_bytes - SEGMENT_HEADER_BYTES
        return 1 + -(-(_bytes_of(self._checkpoint) + self._summary_bytes) // usable)

    @property
    def _summary_bytes(self) -> int:
        return sum(_bytes_of(blobs) for blobs in self._summaries.values())

    async def tend(self, good_sequence: int) -> None:
        """Summarise what was closed, write a checkpoint where it is time. Raises DeviceError.

        Only of segments below `good_sequence`, which the superblock says are good. Records of
        others may yet be found torn and made void, and then nothing may say that they are there.
        """
        async with self._tending:
            if not self.enabled:
                if self._space.table_count:
                    await self._release()
                return
            try:
                await self._summarise(good_sequence)
                if self._is_due():
                    await self._write_checkpoint()
                self._check_share()
            except TierFull:
                _logger.debug("no room for tables now")
                self._forget_oldest()
                await self._release()
            finally:
                self._space.table_wanted = self._wanted()

    def _forget_oldest(self) -> None:
        """Facts that wait for room take memory: the next start reads these segments instead."""
        while len(self._space.finished) > _FINISHED_MAX:
            self._space.finished.popleft().facts = None

    def _check_share(self) -> None:
        """Give tables up, until the next start, where they would take too much."""
        share = (self._space.table_count + self._wanted()) * self._policy.segments_share
        if share > len(self._space.segments):
            _logger.warning("no more checkpoints: there are too many small blocks for the room")
            self.enabled = self._space.keeps_facts = False
            self._checkpoint, self._summaries, self._open = [], {}, None
            self._scanned.clear()
            self._space.finished.clear()

    # -- summaries

    async def _summarise(self, good_sequence: int) -> None:
        while self._scanned:
            each = self._scanned[0]
            if self._is_there(each.segment, each.sequence):
                await self._write_summary(each.sequence, each.facts)
            self._scanned.popleft()
        while self._space.finished and self._space.finished[0].sequence < good_sequence:
            segment = self._space.finished[0]
            builder = segment.facts
            if builder is not None and self._is_there(segment, segment.sequence):
                finish = builder.finish
                said = await trio.to_thread.run_sync(finish, segment.sequence, segment.used_bytes)
                await self._write_summary(segment.sequence, said)
                segment.facts = None
            self._space.finished.popleft()

    def _is_there(self, segment: Segment, sequence: int) -> bool:
        """Whether it is still the segment it was."""
        return self._space.segments[segment.index] is segment and segment.sequence == sequence

    async def _write_summary(self, sequence: int, said: Facts) -> None:
        pieces = await trio.to_thread.run_sync(cut, said, 0, self._piece_bytes)
        if any(bytes_max(piece) > self._blob_bytes_max for _, piece in pieces):
            return  # the segment will be read through
        kind, last = BlobKind.SUMMARY, len(pieces) - 1
        self._summaries[sequence] = [
            await self.write_blob(kind, sequence, number, number == last, first, piece)
            for number, (first, piece) in enumerate(pieces)
        ]

    # -- checkpoints

    def _is_due(self) -> bool:
        policy, segment_bytes = self._policy, self._space.geometry.segment_bytes
        if len(self._summaries) >= policy.summaries_max:
            return True
        before, since = _bytes_of(self._checkpoint), self._summary_bytes
        if since >= max(before, segment_bytes // policy.summaries_share):
            return True
        # Each start begins a table segment of its own.
        return self._space.table_count > 3 + 2 * -(-(before + since) // segment_bytes)

    async def _write_checkpoint(self) -> None:
        """Lay the last checkpoint and the summaries since together. Raises TierFull."""
        if self._space.ready_bytes(self._space.block_floor) < 0:
            raise TierFull("no room for a checkpoint")
        present = self._present()
        since = await self._read_summaries(present)
        self._open = None
        output = _Output(self, self._piece_bytes)
        bounds: list[int | None] = [each.header.first for each in self._checkpoint] or [0]
        covers = make_table(COVERS)
        for at, (first, end) in enumerate(pairwise([*bounds, None])):
            before = await self._read_piece(at)
            if before is None:
                return
            if at == 0:
                covers = before.covers
            before = replace(before, covers=covers)
            piece = await trio.to_thread.run_sync(_fold, before, since, first or 0, end, present)
            if at == 0:
                said = (cold_facts.restrict(before, present).covers, since.covers)
                piece = replace(piece, covers=Table.concat(said))
            await output.add(piece)
        written = await output.finish()
        await self._flush()
        self._checkpoint, self._summaries = written, {}
        await self._release()

    def _present(self) -> I64:
        """The sequence of each segment that holds records, else -1."""
        without = (SegmentState.FREE, SegmentState.TABLE)
        return np.array(
            [-1 if each.state in without else each.sequence for each in self._space.segments],
            np.int64,
        )

    async def _read_summaries(self, present: I64) -> Facts:
        """All of them together; one that cannot be read is forgotten: its segment will be."""
        said: list[Facts] = []
        for sequence, blobs in list(self._summaries.items()):
            pieces = [await read_blob(self._engine, self._space, each) for each in blobs]
            known = [each for each in pieces if each is not None]
            if len(known) == len(pieces):
                said.append(cold_facts.restrict(cold_facts.merge(known), present))
            else:
                del self._summaries[sequence]
        return await trio.to_thread.run_sync(cold_facts.merge, said or [Facts()])

    async def _read_piece(self, at: int) -> Facts | None:
        """One of the last checkpoint. None, and the checkpoint is forgotten, if it is damaged."""
        if not self._checkpoint:
            return Facts()
        piece = await read_blob(self._engine, self._space, self._checkpoint[at])
        if piece is None:
            _logger.warning("a checkpoint is damaged: its segments will be read through")
            self._checkpoint = []
        return piece

    async def _release(self) -> None:
        """Make the segments free that hold nothing that counts."""
        needed = {each.segment for each in self._checkpoint}
        needed.update(each.segment for blobs in self._summaries.values() for each in blobs)
        held = [each for each in self._space.segments if each.state is SegmentState.TABLE]
        idle = [each for each in held if each.index not in needed and each is not self._open]
        if not idle:
            return
        self._page.view[:] = bytes(ALIGN_BYTES)
        for each in idle:
            await self._write(each, 0, [self._page.span(0, ALIGN_BYTES)])
        await self._flush()
        for each in idle:
            self._space.release(each.index)

    # -- blobs

    async def write_blob(
        self, kind: BlobKind, number: int | None, piece: int, last: bool, first: int, said: Facts
    ) -> Blob:
        """Write one piece; without a number it begins something, and that is numbered by its place.

        Raises TierFull, DeviceError.
        """
        memory, length, data_checksum = await trio.to_thread.run_sync(_blob_memory, said)
        segment = await self._segment_with(memory.length_bytes)
        header = BlobHeader(
            kind=kind,
            number=segment.sequence if number is None else number,
            piece=piece,
            last=last,
            first=first,
            data_length=length,
            data_checksum=data_checksum,
        )
        position = segment.used_bytes
        place = Place(self._salt, segment.sequence, position)
        memory.view[:BLOB_HEADER_BYTES] = blob.encode(header, place)
        await self._write(segment, position, [memory.span(0, memory.length_bytes)])
        segment.used_bytes += memory.length_bytes
        return Blob(header, segment.index, position)

    async def _segment_with(self, length_bytes: int) -> Segment:
        """The open table segment, a new one if it has less room. Raises TierFull."""
        segment_bytes = self._space.geometry.segment_bytes
        if self._open is not None and self._open.used_bytes + length_bytes <= segment_bytes:
            return self._open
        segment = self._space.take_for_tables(self._placer.next_sequence)
        if segment is None:
            raise TierFull("no segment is free for tables")
        self._placer.next_sequence += 1
        self._page.view[:] = segment_header.encode(
            self._uuid, segment.index, segment.sequence, segment_header.TABLE_MAGIC
        )
        await self._write(segment, 0, [self._page.span(0, ALIGN_BYTES)])
        self._open = segment
        return segment

    async def _write(self, segment: Segment, position: int, spans: Sequence[Span]) -> None:
        self._health.check_present()
        offset = self._space.geometry.segment_offset(segment.index) + position
        try:
            await self._engine.write(offset, spans)
        except DeviceError as error:
            # A reader stops here: what follows goes elsewhere.
            self._open = None
            self._health.note_failure(error)
            raise

    async def _flush(self) -> None:
        try:
            await self._engine.sync()
        except DeviceError as error:
            self._health.note_failure(error)
            raise


class _Output:
    """Pieces of a checkpoint on their way out: short ones together, long ones cut."""

    def __init__(self, tables: Tables, length_bytes: int) -> None:
        self._tables = tables
        self._length_bytes = length_bytes
        self._gathered: list[Facts] = []
        self._gathered_bytes = 0
        self._first = 0
        self._waiting: tuple[int, Facts] | None = None  # it may be the last, and must say so
        self._written: list[Blob] = []

    async def add(self, piece: Facts) -> None:
        """What is said of the next numbers."""
        self._gathered.append(piece)
        self._gathered_bytes += bytes_max(piece)
        if self._gathered_bytes > self._length_bytes // 2:
            await self._let_out()

    async def finish(self) -> list[Blob]:
        """All is written; where it lies."""
        await self._let_out()
        await self._write(last=True)
        return self._written

    async def _let_out(self) -> None:
        if not self._gathered:
            return
        whole = await trio.to_thread.run_sync(cold_facts.merge, self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        pieces = await trio.to_thread.run_sync(cut, whole, self._first, self._length_bytes)
        for first, piece in pieces:
            await self._write(last=False)
            self._waiting = first, piece
        # Whatever comes now is about higher numbers.
        self._first = max(self._waiting[0] if self._waiting else 0, cold_facts.end(whole))

    async def _write(self, *, last: bool) -> None:
        if self._waiting is None:
            return
        (first, piece), self._waiting = self._waiting, None
        number = self._written[0].header.number if self._written else None
        self._written.append(
            await self._tables.write_blob(
                BlobKind.CHECKPOINT, number, len(self._written), last, first, piece
            )
        )


def _blob_memory(said: Facts) -> tuple[Scratch, int, int]:
    """Memory for a blob with its data in it; the length and checksum of that."""
    data = facts.encode(said)
    memory = Scratch(BLOB_HEADER_BYTES + padded(len(data)))
    memory.view[BLOB_HEADER_BYTES : BLOB_HEADER_BYTES + len(data)] = data
    return memory, len(data), blob.data_checksum(data)


def _fold(before: Facts, since: Facts, first: int, end: int | None, present: I64) -> Facts:
    """What is said of these numbers: a piece of a checkpoint and what came since. Pure."""
    there = replace(cold_facts.restrict(before, present), covers=make_table(COVERS))
    newer = replace(cold_facts.between(since, first, end), seen=since.seen)
    return cold_facts.sort(cold_facts.prune(cold_facts.merge([there, newer])))


def _bytes_of(blobs: Iterable[Blob]) -> int:
    return sum(each.header.blob_bytes for each in blobs)
