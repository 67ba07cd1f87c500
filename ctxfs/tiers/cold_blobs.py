"""Summaries and checkpoints on a cold device: reading them, and cutting facts into pieces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import trio

from ctxfs.core.columns import I64
from ctxfs.device.engine import Engine
from ctxfs.errors import DeviceError, DeviceLost
from ctxfs.ondisk import blob, facts
from ctxfs.ondisk.blob import BLOB_HEADER_BYTES, BlobHeader, BlobKind
from ctxfs.ondisk.columnar import Array, Ragged, Table, make_table
from ctxfs.ondisk.facts import COVERS, Facts
from ctxfs.ondisk.layout import padded
from ctxfs.ondisk.record import Place
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers import cold_facts
from ctxfs.tiers.cold_buffers import Scratch, checksum
from ctxfs.tiers.cold_space import Segment, SegmentState, Space

_CHUNK_BYTES: Final = 1 << 20  # of a table segment, the first time; then twice as much, and so on
_CHUNK_BYTES_MAX: Final = 16 << 20
_SEGMENTS_AT_ONCE: Final = 4
_COLUMN_BYTES: Final = 64  # of a column beside its data, and then some


@dataclass(frozen=True, slots=True)
class Blob:
    """A good blob, and where it is."""

    header: BlobHeader
    segment: int
    position: int


@dataclass(frozen=True, slots=True)
class FoundBlob:
    """The same, read."""

    blob: Blob
    data: memoryview


@dataclass(frozen=True, slots=True)
class FoundTables:
    """The checkpoint and the summaries that count, and what they say of what is there.

    `covered`: segments whose records need not be read. `named`: sequences of all segments that any
    blob speaks of.
    """

    checkpoint: list[Blob]
    summaries: dict[int, list[Blob]]  # by sequence of the segment
    said: list[Facts]
    covered: set[int]
    named: set[int]


class _Chain:
    """One table segment, read from its start as far as it is needed."""

    def __init__(self, engine: Engine, space: Space, segment: Segment) -> None:
        self._engine = engine
        self._offset = space.geometry.segment_offset(segment.index)
        self._memory = Scratch(space.geometry.segment_bytes, huge=True)
        self._filled = 0
        self._chunk_bytes = _CHUNK_BYTES

    async def view(self, position: int, length: int) -> memoryview:
        """Bytes of the segment; fewer where it ends before."""
        end = min(position + length, self._memory.length_bytes)
        while self._filled < end:
            chunk = min(self._chunk_bytes, self._memory.length_bytes - self._filled)
            await self._engine.read(
                self._offset + self._filled, self._memory.span(self._filled, chunk)
            )
            self._filled += chunk
            self._chunk_bytes = min(2 * self._chunk_bytes, _CHUNK_BYTES_MAX)
        return self._memory.view[position:end]

    async def is_whole(self, position: int, header: BlobHeader) -> bool:
        """Whether the data, which was viewed, is what its checksum says."""
        start = position + BLOB_HEADER_BYTES
        span = self._memory.span(start, header.data_length)
        return await checksum(span) == header.data_checksum


async def read_tables(engine: Engine, space: Space, salt: int) -> list[FoundBlob]:
    """All good blobs of a device. Raises DeviceLost; what cannot be read is left out."""
    segments = [each for each in space.segments if each.state is SegmentState.TABLE]
    found: list[FoundBlob] = []
    lost: list[DeviceLost] = []
    todo = iter(segments)

    async def work() -> None:
        for segment in todo:
            try:
                await _read_chain(engine, space, salt, segment, found)
            except DeviceLost as error:
                lost.append(error)
            except DeviceError:
                continue

    async with trio.open_nursery() as nursery:
        for _ in range(_SEGMENTS_AT_ONCE):
            nursery.start_soon(work)
    if lost:
        raise lost[0]
    return found


async def _read_chain(
    engine: Engine, space: Space, salt: int, segment: Segment, found: list[FoundBlob]
) -> None:
    chain = _Chain(engine, space, segment)
    position = SEGMENT_HEADER_BYTES
    while True:
        page = await chain.view(position, BLOB_HEADER_BYTES)
        header = blob.decode(page, Place(salt, segment.sequence, position))
        if header is None or position + header.blob_bytes > space.geometry.segment_bytes:
            return
        start = position + BLOB_HEADER_BYTES
        data = await chain.view(start, header.data_length)
        if await chain.is_whole(position, header):
            found.append(FoundBlob(Blob(header, segment.index, position), data))
        position += header.blob_bytes


def choose(found: Sequence[FoundBlob], present: I64) -> FoundTables:
    """The newest whole checkpoint, and summaries of what it does not cover.

    `present`: the sequence of each segment whose records may be taken from tables, else -1.
    """
    groups = _whole_groups(found)
    named = _named(found)
    checkpoint: list[FoundBlob] = []
    said: list[Facts] = []
    covered: set[int] = set()
    numbers = sorted(number for kind, number in groups if kind is BlobKind.CHECKPOINT)
    for number in reversed(numbers):
        pieces = groups[BlobKind.CHECKPOINT, number]
        decoded = _facts_of(pieces, present)
        if decoded:
            checkpoint, said = pieces, decoded
            covered = set(decoded[0].covers.array("segment").tolist())
            break
    summaries: dict[int, list[Blob]] = {}
    for (kind, number), pieces in groups.items():
        decoded = _facts_of(pieces, present) if kind is BlobKind.SUMMARY else []
        segments = set(decoded[0].covers.array("segment").tolist()) if decoded else set()
        if segments and not segments & covered:
            covered |= segments
            said += decoded
            summaries[number] = [each.blob for each in pieces]
    return FoundTables([each.blob for each in checkpoint], summaries, said, covered, named)


def _named(found: Iterable[FoundBlob]) -> set[int]:
    """The sequences of the segments that are spoken of, in what is whole and in what is not."""
    first = [each.data for each in found if not each.blob.header.piece]
    decoded = [facts.decode(data) for data in first]
    said = [each.covers.array("sequence").tolist() for each in decoded if each is not None]
    return {sequence for sequences in said for sequence in sequences}


def _whole_groups(found: Iterable[FoundBlob]) -> dict[tuple[BlobKind, int], list[FoundBlob]]:
    """What has all of its pieces, in their order."""
    groups: dict[tuple[BlobKind, int], dict[int, FoundBlob]] = {}
    for each in found:
        header = each.blob.header
        groups.setdefault((header.kind, header.number), {})[header.piece] = each
    whole: dict[tuple[BlobKind, int], list[FoundBlob]] = {}
    for key, pieces in groups.items():
        last = max(pieces)
        if pieces[last].blob.header.last and len(pieces) == last + 1:
            whole[key] = [pieces[piece] for piece in range(last + 1)]
    return whole


def _facts_of(pieces: Iterable[FoundBlob], present: I64) -> list[Facts]:
    """What is said in these of records that are there, one by one; nothing if one is no good."""
    decoded = [facts.decode(piece.data) for piece in pieces]
    known = [each for each in decoded if each is not None]
    if len(known) < len(decoded):
        return []
    covers = known[0].covers
    restricted = [cold_facts.restrict(replace(each, covers=covers), present) for each in known]
    without = make_table(COVERS)
    return [restricted[0], *(replace(each, covers=without) for each in restricted[1:])]


async def read_blob(engine: Engine, space: Space, each: Blob) -> Facts | None:
    """What a blob holds now; None where it is not what it was. Raises DeviceError."""
    memory = Scratch(padded(each.header.data_length))
    start = space.geometry.segment_offset(each.segment) + each.position + BLOB_HEADER_BYTES
    await engine.read(start, memory.span(0, memory.length_bytes))
    if await checksum(memory.span(0, each.header.data_length)) != each.header.data_checksum:
        return None
    return facts.decode(memory.view[: each.header.data_length])


def cut(whole: Facts, first: int, length_bytes: int) -> list[tuple[int, Facts]]:
    """Pieces that take at most so much each, with the number from which on each speaks.

    The first one says what all of them cover. What is said of one number stays together, be it
    longer.
    """
    at = cold_facts.middle(whole) if bytes_max(whole) > length_bytes else None
    if at is None:
        return [(first, whole)]
    below = replace(cold_facts.between(whole, first, at), covers=whole.covers, seen=whole.seen)
    above = cold_facts.between(whole, at, None)
    return cut(below, first, length_bytes) + cut(above, at, length_bytes)


def bytes_max(whole: Facts) -> int:
    """No encoding of these facts is longer."""
    tables: list[Table] = [getattr(whole, name) for name in Facts.__slots__]
    return sum(_column_bytes(column) for table in tables for column in table.columns.values())


def _column_bytes(column: Array | Ragged) -> int:
    if isinstance(column, Ragged):
        return _COLUMN_BYTES + 4 * len(column) + len(column.data)
    return _COLUMN_BYTES + int(column.nbytes)
