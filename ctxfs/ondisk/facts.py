"""What a recovery needs to know of records, as tables: the content of summaries and checkpoints.

A fact is what one record header says. All of them are monotone: of two about one thing the higher
stamp is right, so facts of several places can be laid together in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import numpy as np
import xxhash

from ctxfs.core.columns import BlockColumns
from ctxfs.core.meta import (
    Alias,
    BlockMeta,
    DirectoryMeta,
    Drop,
    Entry,
    MakeDirectory,
    Put,
    RemoveDirectory,
)
from ctxfs.ondisk import columnar, ledger
from ctxfs.ondisk.columnar import Schema, Table, make_table
from ctxfs.ondisk.layout import Bytes
from ctxfs.ondisk.record import RecordHeader

# A home says where the newest note about something is: its segment, and its length in bytes.
HOME_SHIFT: Final = 32
NOWHERE: Final = 0  # the segment it was in is gone
IN_DATA: Final = 2**64 - 1  # attributes that a data record or an alias holds: no note repeats them

# `part`: method << 58 | segment << 36 | page of the record << 22 | pages of header << 15 | pages of
# data.
PARTS: Final[Schema] = {
    "generation": "u8",
    "stamp": "u8",  # of the record
    "meta_stamp": "u8",  # of the attributes in it
    "offset": "u8",  # of its content in the block
    "length": "u8",  # of its content
    "part": "u8",
    "encoded_bytes": "u8",  # of the block as a codec made it; 0: its content is stored
}
ALIASES: Final[Schema] = {
    "generation": "u8",
    "stamp": "u8",  # of the record
    "meta_stamp": "u8",  # of the attributes in it
    "holder": "u8",  # the generation whose records hold the content
    "home": "u8",
}
METAS: Final[Schema] = {
    "generation": "u8",
    "stamp": "u8",
    "size": "u8",
    "created_ns": "i8",
    "mtime_ns": "i8",
    "atime_ns": "i8",
    "expires_ns": "u8",
    "pin_until_ns": "u8",
    "mode": "u2",
    "uid": "u4",
    "gid": "u4",
    "placement": "u1",
    "origin": "u8",
    "revision": "u8",
    "replicas": "u2",
    "digest": "u1*16",
    "key_hash": "u8",  # XXH3-64 of the key
    "home": "u8",
    "key": columnar.RAGGED,
    "parent": columnar.RAGGED,
    "dtype": columnar.RAGGED,
    "attributes": columnar.RAGGED,  # as in a Put
}
GONE: Final[Schema] = {
    "number": "u8",
    "stamp": "u8",
    "home": "u8",
}  # of Drops and RemoveDirectories
MAKES: Final[Schema] = {"number": "u8", "stamp": "u8", "home": "u8", "frame": columnar.RAGGED}
HOLDERS: Final[Schema] = {"number": "u8", "segment": "u4"}  # where MakeDirectories of an inode are
COVERS: Final[Schema] = {"segment": "u4", "sequence": "u8", "used_bytes": "u8"}
SEEN: Final[Schema] = {"number": "u8", "stamp": "u8"}  # one row: the highest of any record

_SCHEMAS: Final = {
    "covers": COVERS,
    "seen": SEEN,
    "parts": PARTS,
    "aliases": ALIASES,
    "metas": METAS,
    "drops": GONE,
    "makes": MAKES,
    "holders": HOLDERS,
    "removes": GONE,
}
_META_FIELDS: Final = tuple(METAS)[:16]
_get_meta_fields: Final = attrgetter(*_META_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the records of some segments say; `covers` names these."""

    covers: Table = field(default_factory=lambda: make_table(COVERS))
    seen: Table = field(default_factory=lambda: make_table(SEEN))
    parts: Table = field(default_factory=lambda: make_table(PARTS))
    aliases: Table = field(default_factory=lambda: make_table(ALIASES))
    metas: Table = field(default_factory=lambda: make_table(METAS))
    drops: Table = field(default_factory=lambda: make_table(GONE))
    makes: Table = field(default_factory=lambda: make_table(MAKES))
    holders: Table = field(default_factory=lambda: make_table(HOLDERS))
    removes: Table = field(default_factory=lambda: make_table(GONE))

    @property
    def highest_number(self) -> int:
        """Of any generation or inode, dead ones too; 0 for none."""
        return int(self.seen.array("number").max(initial=0))

    @property
    def highest_stamp(self) -> int:
        return int(self.seen.array("stamp").max(initial=0))

    @property
    def rows(self) -> int:
        """A measure of how long it is."""
        return sum(len(getattr(self, name)) for name in _SCHEMAS)


def encode(facts: Facts) -> bytes:
    return columnar.encode({name: getattr(facts, name) for name in _SCHEMAS})


def decode(data: Bytes) -> Facts | None:
    """None where these bytes are no facts. Arrays are views of `data`: it must stay."""
    try:
        return Facts(**columnar.decode(data, _SCHEMAS))
    except ValueError:
        return None


class FactsBuilder:
    """Takes the records of one segment, in any order."""

    def __init__(self, segment: int) -> None:
        self._segment = segment
        self._parts: list[tuple[int, ...]] = []
        self._metas: list[tuple[BlockMeta, int]] = []  # and the home
        self._aliases: list[tuple[int, ...]] = []
        self._drops: list[tuple[int, int, int]] = []
        self._makes: list[tuple[MakeDirectory, int]] = []
        self._removes: list[tuple[int, int, int]] = []
        self._number = self._stamp = 0

    def add_data(self, meta: BlockMeta, header: RecordHeader, part: int) -> None:
        """A data record; `part` says where it is."""
        self._parts.append(
            (
                meta.generation,
                header.stamp,
                meta.stamp,
                header.part_offset,
                header.part_length,
                part,
                header.encoded_bytes,
            )
        )
        self._metas.append((meta, IN_DATA))
        self._see(meta.generation, max(header.stamp, meta.stamp))

    def add_note(self, stamp: int, entry: Entry, length: int) -> None:
        """One entry of a note record; `stamp` is the record's, `length` that of the frame."""
        home = self._segment << HOME_SHIFT | length
        match entry:
            case Put(meta):
                self._metas.append((meta, home))
                number, of_entry = meta.generation, meta.stamp
            case Alias(meta, holder):
                self._aliases.append((meta.generation, stamp, meta.stamp, holder, home))
                self._metas.append((meta, IN_DATA))
                number, of_entry = max(meta.generation, holder), meta.stamp
            case Drop(number, of_entry):
                self._drops.append((number, of_entry, home))
            case MakeDirectory(directory):
                self._makes.append((entry, home))
                number, of_entry = directory.inode, directory.stamp
            case RemoveDirectory(number, of_entry):
                self._removes.append((number, of_entry, home))
        self._see(number, max(stamp, of_entry))

    def see_stamp(self, stamp: int) -> None:
        """A record of this stamp is there, though it says nothing else."""
        self._see(0, stamp)

    def _see(self, number: int, stamp: int) -> None:
        self._number = max(self._number, number)
        self._stamp = max(self._stamp, stamp)

    def finish(self, sequence: int, used_bytes: int) -> Facts:
        """All of the segment's facts, which has this sequence now."""
        numbers = [make.meta.inode for make, _ in self._makes]
        return Facts(
            covers=make_table(COVERS, [(self._segment, sequence, used_bytes)]),
            seen=make_table(SEEN, [(self._number, self._stamp)]),
            parts=make_table(PARTS, self._parts),
            aliases=make_table(ALIASES, self._aliases),
            metas=make_table(METAS, [_meta_row(meta, home) for meta, home in self._metas]),
            drops=make_table(GONE, self._drops),
            makes=make_table(
                MAKES,
                [(m.meta.inode, m.meta.stamp, home, ledger.encode(m)) for m, home in self._makes],
            ),
            holders=make_table(HOLDERS, [(number, self._segment) for number in set(numbers)]),
            removes=make_table(GONE, self._removes),
        )


def _meta_row(meta: BlockMeta, home: int) -> tuple[Any, ...]:
    attributes = ledger.pack_attributes(meta.attributes) if meta.attributes else b""
    key_hash = xxhash.xxh3_64_intdigest(meta.key)
    return (
        *_get_meta_fields(meta),
        key_hash,
        home,
        meta.key,
        meta.parent,
        meta.dtype,
        attributes,
    )


def block_columns(metas: Table) -> BlockColumns:
    """Rows of METAS as the rest of the program knows them."""
    key = metas.ragged("key")
    arrays = {name: np.ascontiguousarray(metas.array(name)) for name in _META_FIELDS}
    return BlockColumns(
        **arrays, keys=key.data.tobytes(), key_end=key.end, extras=dict(_extras(metas))
    )


def _extras(metas: Table) -> Iterator[tuple[int, tuple[bytes, bytes, tuple[Any, ...]]]]:
    parent, dtype, packed = (metas.ragged(name) for name in ("parent", "dtype", "attributes"))
    lengths = parent.lengths + dtype.lengths + packed.lengths
    for row in np.flatnonzero(lengths).tolist():
        attributes = ledger.unpack_attributes(packed.row(row))
        yield row, (parent.row(row), dtype.row(row), attributes)


def directory_of(makes: Table, row: int) -> DirectoryMeta | None:
    """One row of MAKES; None where its frame cannot be read."""
    entries, _ = ledger.decode_all(makes.ragged("frame").row(row))
    entry = entries[0] if entries else None
    return entry.meta if isinstance(entry, MakeDirectory) else None


def metas_table(metas: Sequence[BlockMeta]) -> Table:
    """Rows of METAS whose attributes are in data records."""
    return make_table(METAS, [_meta_row(meta, IN_DATA) for meta in metas])
