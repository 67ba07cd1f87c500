"""Record headers: what one item of a segment is, and that it belongs where it was found."""

import enum
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from ctxfs.core.meta import Entry, Transient
from ctxfs.ondisk import ledger
from ctxfs.ondisk.layout import ALIGN_BYTES, Bytes, padded, resembles

MAGIC: Final = b"CTXFSREC"
VERSION: Final = 1
VERSION_ENCODED: Final = 2  # of records of blocks that are stored encoded
VERSION_BY_DIGEST: Final = 3  # of records whose data is checked by the digest of the content
UNNAMED: Final = 0  # stamp of a data record that only aliases need: its own block is gone

# magic, checksum, header length, version, kind, method, salt, sequence, position, stamp,
# generation, part offset, part length, data length, data checksum, frames length, pages of the
# encoded block
_HEADER: Final = struct.Struct("<8sQIHBBQQQQQQQQQII")
_PEEK: Final = struct.Struct("<8sQI")
_CHECKED_FROM: Final = 16
_FACTS: Final = struct.Struct("<8sQQ")  # magic, salt, position: known of each header beforehand
_U64_MAX: Final = (1 << 64) - 1
FRAMES_AT: Final = _HEADER.size


class RecordKind(enum.IntEnum):
    """Data: a block or a part of one, with its Put. Note: entries and nothing else."""

    DATA = 1
    NOTE = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is: part of what its checksum covers, so that no stale one passes."""

    salt: int
    sequence: int  # of the segment
    position: int  # of the record in the segment, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """`stamp`: higher than that of every Drop of this generation written before it, or UNNAMED."""

    kind: RecordKind
    header_bytes: int
    stamp: int
    generation: int = 0
    part_offset: int = 0  # of this part in the block's content, bytes
    part_length: int = 0  # of its content, bytes
    data_bytes: int = 0  # the same, padded
    data_checksum: int = 0  # XXH3-64 of the padded data, or
    by_digest: bool = False  # the low half of the XXH3-128 of the content, which a digest is
    # Length of the block as it is stored, padded, where that is not its content (docs/codec.md):
    # then parts are of what is stored. 0: the content itself.
    encoded_bytes: int = 0
    method: int = 0  # how it was made; 0 exactly where `encoded_bytes` is

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.data_bytes

    @property
    def checked_bytes(self) -> int:
        """How much of the data `data_checksum` is of."""
        return self.part_length if self.by_digest else self.data_bytes

    @property
    def version(self) -> int:
        if self.encoded_bytes:
            return VERSION_ENCODED
        return VERSION_BY_DIGEST if self.by_digest else VERSION


class DataSum:
    """The checksum of a record's data, piece by piece."""

    def __init__(self, *, by_digest: bool) -> None:
        self._hash = xxhash.xxh3_128() if by_digest else xxhash.xxh3_64()

    def update(self, data: Bytes) -> None:
        """Lets other threads run where `data` is long."""
        self._hash.update(data)

    def value(self) -> int:
        return int(self._hash.intdigest()) & _U64_MAX


def checksum_of_digest(digest: bytes) -> int:
    """What DataSum makes of content that has this digest."""
    return int.from_bytes(digest[-8:], "big")


def make_salt(uuid: bytes) -> int:
    """A device's own number in each of its records."""
    return int(xxhash.xxh3_64_intdigest(uuid))


def header_bytes_for(frames_bytes: int) -> int:
    """Length of the header that holds so many bytes of ledger frames."""
    return padded(FRAMES_AT + frames_bytes)


def encode_into(target: memoryview, header: RecordHeader, place: Place, frames: bytes) -> None:
    """Fill the `header.header_bytes` of `target`."""
    end = FRAMES_AT + len(frames)
    if not end <= header.header_bytes == len(target):
        raise ValueError("the frames do not fit their header")
    _HEADER.pack_into(
        target,
        0,
        MAGIC,
        0,
        header.header_bytes,
        header.version,
        header.kind,
        header.method,
        place.salt,
        place.sequence,
        place.position,
        header.stamp,
        header.generation,
        header.part_offset,
        header.part_length,
        header.data_bytes,
        header.data_checksum,
        len(frames),
        header.encoded_bytes // ALIGN_BYTES,
    )
    target[FRAMES_AT:end] = frames
    target[end:] = bytes(header.header_bytes - end)
    struct.pack_into("<Q", target, 8, xxhash.xxh3_64_intdigest(target[_CHECKED_FROM:]))


def void(header: RecordHeader) -> RecordHeader:
    """What takes a record's place, so that those behind it are still found: an empty note."""
    return RecordHeader(
        kind=RecordKind.NOTE,
        header_bytes=header.header_bytes,
        stamp=header.stamp,
        part_length=header.data_bytes,
        data_bytes=header.data_bytes,
    )


def peek_header_bytes(data: Bytes) -> int:
    """How long the header that starts here says it is; 0 where none starts here."""
    if len(memoryview(data)) < _PEEK.size:
        return 0
    magic, _, header_bytes = _PEEK.unpack_from(data)
    if magic != MAGIC or header_bytes % ALIGN_BYTES or not header_bytes:
        return 0
    return int(header_bytes)


def belongs(data: Bytes, place: Place) -> bool:
    """Whether a header was written here, though `decode` refuses it.

    Bits may have changed anywhere in it, so what is known of it needs only be alike. One that is
    whole, and of another life of its segment, was not.
    """
    view = memoryview(data)
    if len(view) < FRAMES_AT:
        return False
    magic, checksum, header_bytes, _, _, _, salt, sequence, position, *_ = _HEADER.unpack_from(view)
    found = _FACTS.pack(magic, salt, position)
    if not resembles(found, _FACTS.pack(MAGIC, place.salt, place.position)):
        return False
    if magic != MAGIC or header_bytes > len(view):
        return True
    if checksum != xxhash.xxh3_64_intdigest(view[_CHECKED_FROM:header_bytes]):
        return True
    return Place(salt, sequence, position) == place


def decode(data: Bytes, place: Place) -> tuple[RecordHeader, list[Entry]] | None:
    """None where no good record of this place starts here. Never raises for what `data` holds."""
    header_bytes = peek_header_bytes(data)
    view = memoryview(data)[:header_bytes]
    if not header_bytes or len(view) < header_bytes:
        return None
    (
        _,
        checksum,
        _,
        version,
        kind,
        method,
        salt,
        sequence,
        position,
        stamp,
        generation,
        part_offset,
        part_length,
        data_bytes,
        data_checksum,
        frames_bytes,
        encoded_pages,
    ) = _HEADER.unpack_from(view)
    if (salt, sequence, position) != (place.salt, place.sequence, place.position):
        return None
    if bool(method) != (encoded_pages > 0):
        return None
    if checksum != xxhash.xxh3_64_intdigest(view[_CHECKED_FROM:]):
        return None
    if kind not in (RecordKind.DATA, RecordKind.NOTE) or data_bytes != padded(part_length):
        return None
    header = RecordHeader(
        kind=RecordKind(kind),
        header_bytes=header_bytes,
        stamp=stamp,
        generation=generation,
        part_offset=part_offset,
        part_length=part_length,
        data_bytes=data_bytes,
        data_checksum=data_checksum,
        by_digest=version == VERSION_BY_DIGEST,
        encoded_bytes=encoded_pages * ALIGN_BYTES,
        method=method,
    )
    if version != header.version:
        return None
    entries, _ = ledger.decode_all(view[FRAMES_AT : FRAMES_AT + frames_bytes])
    return header, [entry for entry in entries if not isinstance(entry, Transient)]
