"""What was found at a place of a cold device, in words and fields for people. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from ctxfs.core.meta import (
    Alias,
    BlockMeta,
    DirectoryMeta,
    Drop,
    JournalEntry,
    MakeDirectory,
    Put,
    RemoveDirectory,
    Transient,
)
from ctxfs.ondisk import structs
from ctxfs.ondisk.layout import ALIGN_BYTES
from ctxfs.ondisk.record import Place
from ctxfs.ondisk.structs import Kind, Stated

OTHER_DEVICE: Final = "belongs to another device, or to this one before it was formatted"
_KIND_NAMES: Final = {"record": {1: "data", 2: "note"}, "blob": {1: "summary", 2: "checkpoint"}}


@dataclass(slots=True, kw_only=True)
class Found:
    """What lies from `offset` on. `fields` as they stand; `problems`: what is wrong, in words."""

    kind: str  # "superblock", "segment", "table segment", "record", "blob", "free" and the like
    offset: int
    length_bytes: int
    fields: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)  # of a record
    columns: list[dict[str, Any]] = field(default_factory=list)  # of a blob
    data_offset: int | None = None  # of the data behind a header


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLine:
    """A segment in one line. `state`: "records", "tables", "free", "damaged", "stale"."""

    index: int
    offset: int
    state: str
    sequence: int
    used_bytes: int
    items: int  # records or blobs
    problem: str = ""


def as_found(stated: Stated, offset: int) -> Found:
    """The fields of a structure, as they stand."""
    fields: dict[str, Any] = dict(stated.values)
    if stated.uuid:
        fields["uuid"] = stated.uuid.hex()
    names = _KIND_NAMES.get(stated.kind.name)
    if names:
        fields["kind"] = names.get(fields["kind"], fields["kind"])
    return Found(kind=stated.kind.name, offset=offset, length_bytes=ALIGN_BYTES, fields=fields)


def basic_problems(data: bytes, kind: Kind, length_bytes: int = ALIGN_BYTES) -> Iterator[str]:
    """What is wrong with magic and checksum."""
    if data[:8] != kind.magic:
        yield f"bad magic: {data[:8]!r} instead of {kind.magic!r}"
    if not structs.has_good_sum(data, length_bytes):
        yield "the header does not match its checksum"


def place_problems(stated: Stated, place: Place | None) -> Iterator[str]:
    """Why it does not belong where it was found."""
    if place is None:
        return
    if stated["salt"] != place.salt:
        yield OTHER_DEVICE
    if stated["sequence"] != place.sequence:
        yield (
            "belongs to another life of the segment: "
            f"sequence {stated['sequence']}, now it has {place.sequence}"
        )
    if stated["position"] != place.position:
        yield f"says it is at {stated['position']} of its segment, but this is {place.position}"


def entry_fields(entry: JournalEntry) -> dict[str, Any]:
    """An entry of a ledger, with the names of docs/ondisk.md; bytes stay bytes."""
    match entry:
        case Put(meta):
            return {"entry": "put", **_meta_fields(meta)}
        case MakeDirectory(meta):
            return {"entry": "make directory", **_meta_fields(meta)}
        case Drop(generation, stamp):
            return {"entry": "drop", "generation": generation, "stamp": stamp}
        case RemoveDirectory(inode, stamp):
            return {"entry": "remove directory", "inode": inode, "stamp": stamp}
        case Alias(meta, holder):
            return {"entry": "alias", "holder": holder, **_meta_fields(meta)}
        case Transient(meta):
            return {"entry": "transient", **_meta_fields(meta)}


def _meta_fields(meta: BlockMeta | DirectoryMeta) -> dict[str, Any]:
    fields = {name: getattr(meta, name) for name in type(meta).__slots__}
    if isinstance(meta, BlockMeta):
        fields["placement"] = meta.placement.name.lower()
    return fields
