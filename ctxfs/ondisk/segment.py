"""The first 4096 bytes of a segment: which one it is, and which of its lives this is.

A segment of records and one of tables (summaries and checkpoints) differ in their magic.
"""

import struct
from typing import Final

import xxhash

from ctxfs.ondisk.layout import ALIGN_BYTES, Bytes, resembles

MAGIC: Final = b"CTXFSSEG"
TABLE_MAGIC: Final = b"CTXFSTBL"
SEGMENT_HEADER_BYTES: Final = ALIGN_BYTES

_HEADER: Final = struct.Struct("<8sQ16sQII")
_CHECKED_FROM: Final = 16


def encode(uuid: bytes, index: int, sequence: int, magic: bytes = MAGIC) -> bytes:
    """4096 bytes."""
    data = bytearray(SEGMENT_HEADER_BYTES)
    _HEADER.pack_into(data, 0, magic, 0, uuid, sequence, index, 0)
    struct.pack_into("<Q", data, 8, xxhash.xxh3_64_intdigest(memoryview(data)[_CHECKED_FROM:]))
    return bytes(data)


def decode(data: Bytes, uuid: bytes, index: int, magic: bytes = MAGIC) -> int | None:
    """The sequence; None where this is no such header of segment `index` of device `uuid`."""
    view = memoryview(data)[:SEGMENT_HEADER_BYTES]
    found_magic, checksum, found_uuid, sequence, found_index, _ = _HEADER.unpack_from(view)
    if found_magic != magic or found_uuid != uuid or found_index != index:
        return None
    if checksum != xxhash.xxh3_64_intdigest(view[_CHECKED_FROM:]):
        return None
    return int(sequence)


def is_damaged(data: Bytes, uuid: bytes) -> bool:
    """Whether these 4096 bytes, which are no header, were one of a segment of device `uuid`.

    Others may be there on a device that was formatted once more: they are nobody's loss.
    """
    magic, _, found_uuid, _, _, _ = _HEADER.unpack_from(memoryview(data))
    return resembles(magic + found_uuid, MAGIC + uuid)
