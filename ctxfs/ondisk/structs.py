"""The structures of a cold device as tables of fields, for those who look at damaged ones.

A decoder says what a good structure means, and nothing of one that is not good. Here each field is
given as it stands, whatever the checksum says. docs/ondisk.md has the same tables.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import xxhash

from ctxfs.ondisk import blob, record, segment, superblock
from ctxfs.ondisk.layout import ALIGN_BYTES, Bytes

# Of each field: its offset, and its type for `struct`.
Fields = Mapping[str, tuple[int, str]]

_CHECKED_FROM: Final = 16

SUPERBLOCK: Final[Fields] = {
    "checksum": (8, "Q"),
    "version": (16, "I"),
    "flags": (20, "I"),
    "uuid": (24, "16s"),
    "sequence": (40, "Q"),
    "size_bytes": (48, "Q"),
    "segment_bytes": (56, "Q"),
    "segments": (64, "I"),
    "first_segment_offset": (72, "Q"),
    "good_sequence": (80, "Q"),
}
SEGMENT: Final[Fields] = {
    "checksum": (8, "Q"),
    "uuid": (16, "16s"),
    "sequence": (32, "Q"),
    "index": (40, "I"),
}
RECORD: Final[Fields] = {
    "checksum": (8, "Q"),
    "header_bytes": (16, "I"),
    "version": (20, "H"),
    "kind": (22, "B"),
    "method": (23, "B"),
    "salt": (24, "Q"),
    "sequence": (32, "Q"),
    "position": (40, "Q"),
    "stamp": (48, "Q"),
    "generation": (56, "Q"),
    "part_offset": (64, "Q"),
    "part_bytes": (72, "Q"),
    "data_bytes": (80, "Q"),
    "data_checksum": (88, "Q"),
    "frames_bytes": (96, "I"),
    "encoded_pages": (100, "I"),
}
BLOB: Final[Fields] = {
    "checksum": (8, "Q"),
    "salt": (16, "Q"),
    "sequence": (24, "Q"),
    "position": (32, "Q"),
    "version": (40, "I"),
    "kind": (44, "H"),
    "flags": (46, "H"),
    "piece": (48, "I"),
    "number": (56, "Q"),
    "first": (64, "Q"),
    "data_bytes": (72, "Q"),
    "data_checksum": (80, "Q"),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A structure that begins with this magic."""

    name: str
    magic: bytes
    fields: Fields


SUPERBLOCK_KIND: Final = Kind("superblock", superblock.MAGIC, SUPERBLOCK)
SEGMENT_KIND: Final = Kind("segment", segment.MAGIC, SEGMENT)
TABLE_SEGMENT_KIND: Final = Kind("table segment", segment.TABLE_MAGIC, SEGMENT)
RECORD_KIND: Final = Kind("record", record.MAGIC, RECORD)
BLOB_KIND: Final = Kind("blob", blob.MAGIC, BLOB)
KINDS: Final = (SUPERBLOCK_KIND, SEGMENT_KIND, TABLE_SEGMENT_KIND, RECORD_KIND, BLOB_KIND)


@dataclass(frozen=True, slots=True)
class Stated:
    """What 4096 bytes say of themselves, if they are of this kind, as a good magic says."""

    kind: Kind
    magic_good: bool
    values: dict[str, int]
    uuid: bytes  # 16; empty where the kind has none

    def __getitem__(self, name: str) -> int:
        return self.values[name]


def kind_of(page: Bytes) -> Kind | None:
    """What begins here, by its magic."""
    magic = bytes(memoryview(page)[:8])
    return next((kind for kind in KINDS if kind.magic == magic), None)


def state(page: Bytes, kind: Kind) -> Stated:
    """The fields of a structure that begins here, be it damaged."""
    values: dict[str, int] = {}
    uuid = b""
    for name, (offset, form) in kind.fields.items():
        (value,) = struct.unpack_from(f"<{form}", page, offset)
        if name == "uuid":
            uuid = value
        else:
            values[name] = value
    return Stated(kind, bytes(memoryview(page)[:8]) == kind.magic, values, uuid)


def has_good_sum(data: Bytes, length_bytes: int = ALIGN_BYTES) -> bool:
    """Whether the first `length_bytes`, a header, match the checksum in them."""
    view = memoryview(data)
    if length_bytes > len(view) or length_bytes < ALIGN_BYTES:
        return False
    (expected,) = struct.unpack_from("<Q", view, 8)
    return bool(xxhash.xxh3_64_intdigest(view[_CHECKED_FROM:length_bytes]) == expected)


def is_damaged_here(header: Bytes, kind: Kind, place: record.Place) -> bool:
    """Whether a record or blob was written here in this life of the segment, and is damaged since.

    Asked where no good one begins, with its whole header if that can be had. Of magic, salt,
    sequence and position all but one must be right. A sequence that is another one is mostly that
    of an earlier life: it may differ in one bit, and the checksum must be wrong.
    """
    found = state(header, kind)
    wrong = [
        name
        for name, expected in (
            ("salt", place.salt),
            ("sequence", place.sequence),
            ("position", place.position),
        )
        if found[name] != expected
    ]
    if not found.magic_good:
        return not wrong
    if wrong == ["sequence"]:
        length = found["header_bytes"] if kind is RECORD_KIND else ALIGN_BYTES
        one_bit = (found["sequence"] ^ place.sequence).bit_count() == 1
        return one_bit and not has_good_sum(header, length)
    return len(wrong) < 2
