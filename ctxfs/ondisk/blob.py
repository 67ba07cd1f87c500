"""Blobs: what lies in a table segment, each a header of 4096 bytes and columns behind it."""

import enum
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from ctxfs.ondisk.layout import ALIGN_BYTES, Bytes, padded
from ctxfs.ondisk.record import Place

MAGIC: Final = b"CTXFSBLB"
VERSION: Final = 1
BLOB_HEADER_BYTES: Final = ALIGN_BYTES

# magic, checksum, salt, sequence, position, version, kind, flags, piece, number, first number,
# data length, data checksum
_HEADER: Final = struct.Struct("<8sQQQQIHHIxxxxQQQQ")
_CHECKED_FROM: Final = 16
_LAST: Final = 1


class BlobKind(enum.IntEnum):
    """Summary: of one segment. Checkpoint: of all segments that it names."""

    SUMMARY = 1
    CHECKPOINT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobHeader:
    """One piece of a summary or of a checkpoint; the last one says so.

    `number` is the sequence of the segment that is summarised, or of the table segment in which
    the checkpoint begins. The pieces of one thing hold what is said of blocks and directories in
    ascending order of their numbers, this one from `first` on.
    """

    kind: BlobKind
    number: int
    piece: int
    last: bool
    first: int
    data_length: int  # bytes
    data_checksum: int  # XXH3-64 of these

    @property
    def blob_bytes(self) -> int:
        """What it takes in its segment."""
        return BLOB_HEADER_BYTES + padded(self.data_length)


def data_checksum(data: Bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data))


def encode(header: BlobHeader, place: Place) -> bytes:
    """4096 bytes."""
    page = bytearray(BLOB_HEADER_BYTES)
    _HEADER.pack_into(
        page,
        0,
        MAGIC,
        0,
        place.salt,
        place.sequence,
        place.position,
        VERSION,
        header.kind,
        _LAST if header.last else 0,
        header.piece,
        header.number,
        header.first,
        header.data_length,
        header.data_checksum,
    )
    checksum = xxhash.xxh3_64_intdigest(memoryview(page)[_CHECKED_FROM:])
    struct.pack_into("<Q", page, 8, checksum)
    return bytes(page)


def decode(data: Bytes, place: Place) -> BlobHeader | None:
    """None where no good header of this place starts here, or one of a later version."""
    view = memoryview(data)[:BLOB_HEADER_BYTES]
    if len(view) < BLOB_HEADER_BYTES:
        return None
    magic, checksum, *found, version, kind, flags, piece, number, first, length, of_data = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC or tuple(found) != (place.salt, place.sequence, place.position):
        return None
    if version != VERSION or checksum != xxhash.xxh3_64_intdigest(view[_CHECKED_FROM:]):
        return None
    if kind not in (BlobKind.SUMMARY, BlobKind.CHECKPOINT):
        return None
    return BlobHeader(
        kind=BlobKind(kind),
        number=number,
        piece=piece,
        last=bool(flags & _LAST),
        first=first,
        data_length=length,
        data_checksum=of_data,
    )
