"""What the log of a cold device is asked to write, and how it is cut into records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from ctxfs.core.meta import BlockMeta, Entry, Put
from ctxfs.device.engine import Span
from ctxfs.errors import BadValue
from ctxfs.ondisk import ledger
from ctxfs.ondisk.layout import Geometry
from ctxfs.ondisk.record import FRAMES_AT, RecordHeader, checksum_of_digest, header_bytes_for
from ctxfs.tiers.cold_buffers import checksum
from ctxfs.tiers.cold_space import FLOOR_CARRY, FLOOR_WRITE


class Group:
    """Requests that one caller waits for."""

    def __init__(self, count: int) -> None:
        self.left = count  # how many are not finished
        self.finished = trio.Event()


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One thing to write. `taken`: it lies partly on the device, and is carried to its end."""

    floor: int = FLOOR_WRITE
    group: Group | None = None
    taken: bool = False
    placed: bool = False  # all of it has its place
    unsettled: int = 0  # batches in flight that it is in
    error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        """No more will be written for it; `error` where it is not (all) on the device."""
        if error is not None and self.error is None:
            self.error = error
        group, self.group = self.group, None
        if group is not None:
            group.left -= 1
            if not group.left:
                group.finished.set()


@dataclass(slots=True, kw_only=True, eq=False)
class DataRequest(Request):
    """A block, or a part of one that is carried over.

    `source` is padded; `content_length` bytes of it count, and they begin at `content_offset` of
    the block, or of what a codec made of it: then that is `encoded_bytes` long. `data_checksum`:
    of all of `source`, as a record's header has it. `unnamed`: the block that it was written for is
    gone, and this must not bring it back; others refer to it.
    """

    meta: BlockMeta
    source: Span
    content_offset: int
    content_length: int
    data_checksum: int
    by_digest: bool
    frames: bytes
    encoded_bytes: int = 0
    method: int = 0
    unnamed: bool = False
    replaces: int | None = None  # the part that is carried over
    stamp: int = 0  # the highest in any record of it
    placed_bytes: int = 0  # of `source`
    parts: list[int] = field(default_factory=list)  # as ColdIndex keeps them
    tried: set[int] = field(default_factory=set)  # segments

    @property
    def header_bytes(self) -> int:
        return header_bytes_for(len(self.frames))


@dataclass(slots=True, kw_only=True, eq=False)
class NoteRequest(Request):
    """Entries without data, in any number. `whole`: in one record, which can hold them."""

    entries: Sequence[Entry]
    frames: Sequence[bytes]
    whole: bool = False
    next: int = 0  # the first that has no place yet


_NOTE_BYTES: Final = 64 << 10  # about what one note record holds, so that none wastes much


def take_frames(frames: Sequence[bytes], start: int, room_bytes: int) -> int:
    """How many frames from `start` on go into one note record of at most `room_bytes`."""
    length = FRAMES_AT
    count = 0
    for at in range(start, len(frames)):
        length += len(frames[at])
        if length > room_bytes or (count and length > _NOTE_BYTES):
            break
        count += 1
    return count


def check_frame(frame: bytes, geometry: Geometry) -> bytes:
    """The frame itself. Raises BadValue where no record header of this device takes it."""
    if header_bytes_for(len(frame)) > geometry.header_bytes_max:
        raise BadValue(
            f"key and attributes take {len(frame)} bytes; "
            f"the cold tier keeps {geometry.header_bytes_max - FRAMES_AT}"
        )
    return frame


async def block_request(
    meta: BlockMeta, source: Span, frame: bytes, *, method: int, unnamed: bool = False
) -> DataRequest:
    """A whole block, or what a codec made of it."""
    # Of the content the digest is known, so nobody need look at all of it once more.
    known = None if method else checksum_of_digest(meta.digest)
    return DataRequest(
        meta=meta,
        source=source,
        content_offset=0,
        content_length=source.length if method else meta.size,
        encoded_bytes=source.length if method else 0,
        method=method,
        unnamed=unnamed,
        data_checksum=await checksum(source) if known is None else known,
        by_digest=known is not None,
        frames=frame,
    )


def carried_request(
    meta: BlockMeta, source: Span, former: RecordHeader, part: int, *, unnamed: bool
) -> DataRequest:
    """What the record `former`, at `part`, held; its data lies in `source`."""
    return DataRequest(
        meta=meta,
        source=source,
        content_offset=former.part_offset,
        content_length=former.part_length,
        data_checksum=former.data_checksum,
        by_digest=former.by_digest,
        encoded_bytes=former.encoded_bytes,
        method=former.method,
        unnamed=unnamed,
        replaces=part,
        frames=ledger.encode(Put(meta)),
        floor=FLOOR_CARRY,
    )


def note_request(entries: Sequence[Entry], floor: int = FLOOR_WRITE) -> NoteRequest:
    return NoteRequest(
        entries=entries, frames=[ledger.encode(entry) for entry in entries], floor=floor
    )
