"""Recovery of one cold device: read every record that is there, and trust none unseen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import trio
import xxhash

from ctxfs.device.engine import Engine
from ctxfs.errors import DeviceError, DeviceLost
from ctxfs.ondisk import record
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.layout import ALIGN_BYTES, HEADER_BYTES_MAX
from ctxfs.ondisk.record import Place, RecordHeader
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_replay import Replay
from ctxfs.tiers.cold_space import Segment, Space

VERIFY_NONE: Final = 2**64
_SEGMENTS_AT_ONCE: Final = 16
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
    """Reads the segments of one device, several at a time, into a replay."""

    def __init__(
        self, engine: Engine, space: Space, uuid: bytes, replay: Replay, verify_from: int
    ) -> None:
        """`verify_from`: in segments of this sequence and later the data is checked too."""
        self._engine = engine
        self._space = space
        self._uuid = uuid
        self._salt = record.make_salt(uuid)
        self._replay = replay
        self._verify_from = verify_from
        self.counts = ScanCounts()
        # Records with data that is not what it should be: none of them was ever acknowledged.
        self.torn: list[tuple[Segment, int, RecordHeader]] = []
        # Places of headers that are not what they should be: nothing behind them was, either.
        self.torn_headers: list[tuple[Segment, int]] = []
        self._lost: DeviceLost | None = None

    async def run(self) -> None:
        """Raises DeviceLost; other errors end the segment they happen in."""
        indexes = iter(range(self._space.geometry.segment_count))
        async with trio.open_nursery() as nursery:
            for _ in range(min(_SEGMENTS_AT_ONCE, self._space.geometry.segment_count)):
                nursery.start_soon(self._work, indexes)
        self._space.find_free()
        if self._lost is not None:
            raise self._lost

    async def _work(self, indexes: Iterator[int]) -> None:
        window = _Window(self._engine, self._space)
        for index in indexes:
            if self._lost is not None:
                return
            window.move(index)
            try:
                await self._scan_segment(index, window)
            except DeviceLost as error:
                self._lost = error
            except DeviceError:
                # Nothing new may be written over what could not be read: reclaiming erases it.
                self.counts.unreadable += 1
                self._space.adopt(index, self._space.segments[index].sequence, ALIGN_BYTES)

    async def _scan_segment(self, index: int, window: _Window) -> None:
        start = await window.view(0, SEGMENT_HEADER_BYTES, 4 * ALIGN_BYTES)
        sequence = segment_header.decode(start, self._uuid, index)
        if sequence is None:
            if segment_header.is_damaged(start, self._uuid):
                self.counts.corrupt += 1  # whatever was in it: the segment is free now
            return
        self.counts.highest_sequence = max(self.counts.highest_sequence, sequence)
        segment = self._space.adopt(index, sequence, SEGMENT_HEADER_BYTES)
        segment_bytes = self._space.geometry.segment_bytes
        verified = sequence >= self._verify_from
        position = SEGMENT_HEADER_BYTES
        ahead = _AHEAD_FAR_BYTES
        while position < segment_bytes:
            header = await self._read_record(segment, position, ahead, window, verified)
            if header is None:
                break
            near = header.record_bytes <= _NEAR_BYTES
            ahead = _WINDOW_BYTES if near else _AHEAD_FAR_BYTES
            position += header.record_bytes
            segment.used_bytes = position

    async def _read_record(
        self, segment: Segment, position: int, ahead: int, window: _Window, verified: bool
    ) -> RecordHeader | None:
        """Take in one record; None where the chain of headers ends."""
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
        header, entries = found
        if position + header.record_bytes > self._space.geometry.segment_bytes:
            self._note_bad_header(segment, position, verified)
            return None
        if verified and not await self._is_whole(header, position, ahead, window):
            self._count_bad(verified)
            self.torn.append((segment, position, header))
            return header  # the headers after it are as good as ever
        self.counts.records += 1
        self._replay.add(segment, position, header, entries)
        return header

    async def _is_whole(
        self, header: RecordHeader, position: int, ahead: int, window: _Window
    ) -> bool:
        """Whether the data is what its checksum says. A note has none."""
        if not header.data_bytes:
            return True
        digest = xxhash.xxh3_64()
        at = position + header.header_bytes
        end = at + header.data_bytes
        while at < end:
            length = min(end - at, _WINDOW_BYTES)
            data = await window.view(at, length, max(ahead, length))
            digest.update(data[:length])
            at += length
        return bool(digest.intdigest() == header.data_checksum)

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
        self._count_bad(verified)

    def _count_bad(self, verified: bool) -> None:
        if verified:
            self.counts.torn += 1
        else:
            self.counts.corrupt += 1
