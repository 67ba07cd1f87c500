"""The two superblocks: what a device is, and how far its log is known to be good."""

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from ctxfs.errors import ConfigError
from ctxfs.ondisk.layout import ALIGN_BYTES, SEGMENTS_OFFSET, Bytes, Geometry

MAGIC: Final = b"CTXFSSUP"
# 2: there may be encoded blocks; 3: records checked by a digest; 4: aliases
VERSION: Final = 4
SUPERBLOCK_OFFSETS: Final = (0, ALIGN_BYTES)

_HEAD: Final = struct.Struct("<8sQI")  # magic, checksum, version: here in every version to come
_BODY: Final = struct.Struct("<8sQII16sQQQIIQQ")
_CHECKED_FROM: Final = 16
_CLEAN: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """Written in turn to two places; the higher sequence that checks out is right.

    `good_sequence`: every segment with a lower sequence had reached the medium, whole, when this
    was written. `clean`: the log was closed; nothing was written after this.
    """

    uuid: bytes  # 16
    sequence: int
    geometry: Geometry
    good_sequence: int
    clean: bool

    @property
    def offset(self) -> int:
        """The place of this one of the two."""
        return SUPERBLOCK_OFFSETS[self.sequence % 2]


def encode(superblock: Superblock) -> bytes:
    """4096 bytes."""
    geometry = superblock.geometry
    data = bytearray(ALIGN_BYTES)
    _BODY.pack_into(
        data,
        0,
        MAGIC,
        0,
        VERSION,
        _CLEAN if superblock.clean else 0,
        superblock.uuid,
        superblock.sequence,
        geometry.size_bytes,
        geometry.segment_bytes,
        geometry.segment_count,
        0,
        SEGMENTS_OFFSET,
        superblock.good_sequence,
    )
    struct.pack_into("<Q", data, 8, checksum(data))
    return bytes(data)


def checksum(data: Bytes) -> int:
    """Of a superblock's 4096 bytes, without magic and checksum."""
    return int(xxhash.xxh3_64_intdigest(memoryview(data)[_CHECKED_FROM:ALIGN_BYTES]))


def decode(data: Bytes) -> Superblock | None:
    """None where these 4096 bytes are no good superblock.

    Raises ConfigError where they are one of a later format.
    """
    view = memoryview(data)
    magic, expected, version = _HEAD.unpack_from(view)
    if magic != MAGIC or expected != checksum(view):
        return None
    if version > VERSION:
        raise ConfigError(
            f"written by a later ctxfs (cold format {version}, this one reads up to {VERSION})"
        )
    _, _, _, flags, uuid, sequence, size, segment_bytes, count, _, first, good = _BODY.unpack_from(
        view
    )
    geometry = Geometry(size, segment_bytes, count)
    if first != SEGMENTS_OFFSET or not geometry.is_sound():
        return None
    return Superblock(
        uuid=uuid,
        sequence=sequence,
        geometry=geometry,
        good_sequence=good,
        clean=bool(flags & _CLEAN),
    )


def newest(start: Bytes) -> Superblock | None:
    """The better of the two superblocks in the first 8192 bytes of a device.

    Raises ConfigError where either is of a later format.
    """
    view = memoryview(start)
    found = [decode(view[offset : offset + ALIGN_BYTES]) for offset in SUPERBLOCK_OFFSETS]
    good = [superblock for superblock in found if superblock is not None]
    return max(good, key=lambda superblock: superblock.sequence, default=None)


def has_magic(start: Bytes) -> bool:
    """Whether a superblock, good or damaged, is to be seen in the first 8192 bytes."""
    return any(bytes(start[offset : offset + len(MAGIC)]) == MAGIC for offset in SUPERBLOCK_OFFSETS)
