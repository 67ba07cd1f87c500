"""Reading one segment of a cold device as a check does: all of it, and what no chain leads to."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import trio
import xxhash

from ctxfs.core.meta import BlockMeta, Entry, Put
from ctxfs.device.engine import Engine
from ctxfs.errors import DeviceError, DeviceLost
from ctxfs.ondisk import blob, record, structs
from ctxfs.ondisk.facts import Facts, FactsBuilder
from ctxfs.ondisk.layout import ALIGN_BYTES, Geometry, padded
from ctxfs.ondisk.record import Place, RecordHeader
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers.cold_buffers import Scratch, checksum, is_whole
from ctxfs.tiers.cold_parts import pack_part
from ctxfs.tiers.cold_scan import add_record

_CHUNK_BYTES: Final = 4 << 20
_INLINE_BYTES_MAX: Final = 256 << 10  # hashing less takes less time than the way to a thread
_RECORD_MAGIC: Final = int.from_bytes(record.MAGIC, "little")
_BLOB_MAGIC: Final = int.from_bytes(blob.MAGIC, "little")
_WORDS_IN_PAGE: Final = ALIGN_BYTES // 8


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record at `position` of its segment. `meta`: of the block whose data it holds."""

    position: int
    header: RecordHeader
    meta: BlockMeta | None


@dataclass(slots=True)
class Chain:
    """What one segment of records holds.

    `damaged`: at the end of the chain a record of this life of the segment was, and is no good.
    `behind`: good records of this life that the chain does not lead to any more.
    """

    index: int
    sequence: int
    end: int = SEGMENT_HEADER_BYTES  # position, bytes
    records: int = 0
    facts: Facts = field(default_factory=Facts)
    bad: list[FoundRecord] = field(default_factory=list)  # their data is not what it should be
    damaged: bool = False
    behind: list[FoundRecord] = field(default_factory=list)
    # Parts that are whole blocks, whose content was compared with its digest and is right.
    compared: "array[int]" = field(default_factory=lambda: array("Q"))
    error: DeviceError | None = None  # reading failed there


@dataclass(slots=True)
class BlobChain:
    """What one table segment holds.

    `bad`: positions of blobs that are no good, and whether a good one is behind it. What is torn,
    by a crash or a write that failed, is mostly the last in its segment.
    """

    blobs: int = 0
    bad: list[tuple[int, bool]] = field(default_factory=list)
    error: DeviceError | None = None


class Walker:
    """Reads one segment at a time into memory as large as a segment."""

    def __init__(
        self, engine: Engine, geometry: Geometry, salt: int, *, content: bool = False
    ) -> None:
        """`content`: also compare blocks with their digests, where a record is one as it is."""
        self._content = content
        self._engine = engine
        self._geometry = geometry
        self._salt = salt
        self._memory = Scratch(geometry.segment_bytes, huge=True)
        self._index = 0
        self._filled = 0

    async def records(self, index: int, sequence: int, *, trusted: bool) -> Chain:
        """All records of a segment. Where not `trusted`, as behind the good sequence after a
        crash, those with bad data say nothing. Raises DeviceLost."""
        self._move(index)
        chain = Chain(index, sequence)
        builder = FactsBuilder(index)
        try:
            await self._follow(chain, builder, trusted=trusted)
            await self._look_behind(chain)
        except DeviceLost:
            raise
        except DeviceError as error:
            chain.error = error
        chain.facts = builder.finish(sequence, chain.end)
        return chain

    async def blobs(self, index: int, sequence: int) -> BlobChain:
        """All summaries and checkpoints of a table segment. Raises DeviceLost."""
        self._move(index)
        chain = BlobChain()
        try:
            await self._follow_blobs(chain, sequence)
        except DeviceLost:
            raise
        except DeviceError as error:
            chain.error = error
        return chain

    async def guess(self, index: int) -> int | None:
        """The sequence of a segment whose own header is damaged, as its good records have it.

        Raises DeviceError.
        """
        self._move(index)
        view = await self._view(0, self._geometry.segment_bytes)
        for position in self._magics(SEGMENT_HEADER_BYTES):
            page = view[position : position + ALIGN_BYTES]
            stated = structs.state(page, structs.RECORD_KIND)
            place = Place(self._salt, stated["sequence"], position)
            if record.decode(view[position:], place) is not None:
                return place.sequence
        return None

    # -- memory

    def _move(self, index: int) -> None:
        self._index, self._filled = index, 0

    async def _view(self, position: int, length: int) -> memoryview:
        """Bytes of the segment; fewer where it ends."""
        end = min(position + length, self._memory.length_bytes)
        while self._filled < end:
            chunk = min(_CHUNK_BYTES, self._memory.length_bytes - self._filled)
            offset = self._geometry.segment_offset(self._index) + self._filled
            await self._engine.read(offset, self._memory.span(self._filled, chunk))
            self._filled += chunk
        return self._memory.view[position:end]

    # -- records

    async def _follow(self, chain: Chain, builder: FactsBuilder, *, trusted: bool) -> None:
        while chain.end < self._geometry.segment_bytes:
            position = chain.end
            place = Place(self._salt, chain.sequence, position)
            start = await self._view(position, ALIGN_BYTES)
            header_bytes = record.peek_header_bytes(start)
            found = None
            if 0 < header_bytes <= self._geometry.header_bytes_max:
                start = await self._view(position, header_bytes)
                found = record.decode(start, place)
            if found is None or position + found[0].record_bytes > self._geometry.segment_bytes:
                chain.damaged = structs.is_damaged_here(start, structs.RECORD_KIND, place)
                return
            header, entries = found
            good = await self._is_whole(position, header)
            if not good:
                chain.bad.append(_found(position, header, entries))
            if good or trusted:
                add_record(builder, chain.index, position, header, entries)
            if good and self._content:
                await self._compare(chain, position, header, entries)
            chain.records += 1
            chain.end += header.record_bytes

    async def _is_whole(self, position: int, header: RecordHeader) -> bool:
        """Whether the data is what its checksum says; a note has none."""
        if not header.data_bytes or header.kind is record.RecordKind.NOTE:
            return True
        start = position + header.header_bytes
        await self._view(start, header.data_bytes)
        return await is_whole(self._memory.span(start, header.data_bytes), header)

    async def _compare(
        self, chain: Chain, position: int, header: RecordHeader, entries: Iterable[Entry]
    ) -> None:
        """Take down a block whose content is in memory now, if it is right."""
        meta = _found(position, header, entries).meta
        if meta is None or header.encoded_bytes or header.part_length != meta.size:
            return
        start = position + header.header_bytes
        data = self._memory.view[start : start + header.part_length]
        if header.part_length <= _INLINE_BYTES_MAX:
            digest = xxhash.xxh3_128_digest(data)
        else:
            digest = await trio.to_thread.run_sync(xxhash.xxh3_128_digest, data)
        if digest == meta.digest:
            chain.compared.append(
                pack_part(chain.index, position, header.header_bytes, header.data_bytes)
            )

    async def _look_behind(self, chain: Chain) -> None:
        """Find what the chain would lead to, had it not ended too early."""
        if chain.end >= self._geometry.segment_bytes:
            return
        view = await self._view(0, self._geometry.segment_bytes)
        covered = chain.end
        for position in self._magics(chain.end):
            place = Place(self._salt, chain.sequence, position)
            found = record.decode(view[position:], place) if position >= covered else None
            if found is not None:
                header, entries = found
                chain.behind.append(_found(position, header, entries))
                covered = position + header.record_bytes

    def _magics(self, start: int, magic: int = _RECORD_MAGIC) -> Iterator[int]:
        """Positions at which a record, or a blob, may begin, of a segment that is in memory."""
        words = np.frombuffer(self._memory.view, "<u8")[::_WORDS_IN_PAGE]
        for page in np.flatnonzero(words[start // ALIGN_BYTES :] == magic).tolist():
            yield start + page * ALIGN_BYTES

    # -- tables

    async def _follow_blobs(self, chain: BlobChain, sequence: int) -> None:
        bad: list[int] = []
        last_good = 0
        position = SEGMENT_HEADER_BYTES
        while position < self._geometry.segment_bytes:
            place = Place(self._salt, sequence, position)
            page = await self._view(position, ALIGN_BYTES)
            header = blob.decode(page, place)
            if header is None or position + header.blob_bytes > self._geometry.segment_bytes:
                if structs.is_damaged_here(page, structs.BLOB_KIND, place):
                    bad.append(position)
                    last_good = await self._last_blob(position, sequence)
                break
            start = position + ALIGN_BYTES
            await self._view(start, padded(header.data_length))
            found = await checksum(self._memory.span(start, header.data_length))
            if found == header.data_checksum:
                last_good = position
            else:
                bad.append(position)
            chain.blobs += 1
            position += header.blob_bytes
        chain.bad = [(each, each < last_good) for each in bad]

    async def _last_blob(self, start: int, sequence: int) -> int:
        """Position of the last header of a blob that is good, from `start` on; 0 for none."""
        view = await self._view(0, self._geometry.segment_bytes)
        last = 0
        for position in self._magics(start, _BLOB_MAGIC):
            place = Place(self._salt, sequence, position)
            if blob.decode(view[position : position + ALIGN_BYTES], place) is not None:
                last = position
        return last


def _found(position: int, header: RecordHeader, entries: Iterable[Entry]) -> FoundRecord:
    meta = next((entry.meta for entry in entries if isinstance(entry, Put)), None)
    return FoundRecord(position, header, meta if header.generation else None)
