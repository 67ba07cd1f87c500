"""Entries as bytes: the frames of the hot journal and of the cold tier's record headers.

A frame is

    u32  payload length, at least 1
    u32  checksum of the payload: the low half of its XXH3-64
    ...  payload: a type byte, a fixed struct, then the variable fields

all little-endian and without padding; docs/ondisk.md has the tables. Frames lie back to back and
end at the first that is torn, corrupt or of length 0. A payload may be longer than what its type
is known to hold: later versions append fields, and earlier ones leave them unread.
"""

import enum
import struct
from typing import Final

import xxhash

from ctxfs.core.meta import (
    Alias,
    BlockMeta,
    DirectoryMeta,
    Drop,
    JournalEntry,
    MakeDirectory,
    Placement,
    Put,
    RemoveDirectory,
    Transient,
    TransientFlag,
)

FRAME: Final = struct.Struct("<II")
FRAME_BYTES: Final = FRAME.size
# Keys (two of up to 4 KiB), 64 KiB of attributes and then some: more is garbage, not an entry.
PAYLOAD_BYTES_MAX: Final = 1 << 20

# type, placement, mode, uid, gid, generation, stamp, size, created, mtime, atime, expires,
# pin until, digest, then the lengths of key, parent and dtype and the number of attributes
_PUT: Final = struct.Struct("<BBHIIQQQqqqQQ16sHHHH")
# type, flags, mode, uid, gid, inode, stamp, mtime, default TTL, key length, attributes
_DIRECTORY: Final = struct.Struct("<BBHIIQQqqHH")
# type, generation or inode, stamp
_GONE: Final = struct.Struct("<BQQ")
# type, flags, owner, opener, base, refused at, shadow, coming; then a Put
_TRANSIENT: Final = struct.Struct("<BBIIQQQQ")
# type, holder; then a Put
_ALIAS: Final = struct.Struct("<BQ")
_ATTRIBUTE: Final = struct.Struct("<HI")  # lengths of name and value
_ORIGIN: Final = struct.Struct("<Q")  # behind the attributes of a Put that has one
_AMENDED: Final = struct.Struct("<QH")  # revision and replicas, behind that, where there are any
_REPLICAS: Final = struct.Struct("<H")  # behind the attributes of a directory that has a default

_TOGETHER: Final = 1  # flag of a directory


class EntryType(enum.IntEnum):
    """The first byte of a payload. Numbers are never used again for anything else."""

    PUT = 1
    DROP = 2
    MAKE_DIRECTORY = 3
    REMOVE_DIRECTORY = 4
    TRANSIENT = 5
    ALIAS = 6


_TYPE_PUT: Final = int(EntryType.PUT)
_TYPE_DROP: Final = int(EntryType.DROP)
_TYPE_MAKE: Final = int(EntryType.MAKE_DIRECTORY)
_TYPE_REMOVE: Final = int(EntryType.REMOVE_DIRECTORY)
_TYPE_TRANSIENT: Final = int(EntryType.TRANSIENT)
_TYPE_ALIAS: Final = int(EntryType.ALIAS)


def encode(entry: JournalEntry) -> bytes:
    """One frame. Raises struct.error where a number does not fit its field."""
    # Written on the path of every publish and attribute change: no helper per field.
    if isinstance(entry, Put):
        payload = _put_payload(entry.meta)
    elif isinstance(entry, Drop):
        payload = _GONE.pack(_TYPE_DROP, entry.generation, entry.stamp)
    elif isinstance(entry, MakeDirectory):
        payload = _directory_payload(entry.meta)
    elif isinstance(entry, Transient):
        payload = _transient_payload(entry)
    elif isinstance(entry, Alias):
        payload = _ALIAS.pack(_TYPE_ALIAS, entry.holder) + _put_payload(entry.meta)
    else:
        payload = _GONE.pack(_TYPE_REMOVE, entry.inode, entry.stamp)
    return FRAME.pack(len(payload), _checksum(payload)) + payload


def decode_all(buffer: memoryview | bytes) -> tuple[list[JournalEntry], int]:
    """The entries at the start of `buffer`, and how many of its bytes are good.

    Stops at the first torn, corrupt or zero frame and never raises for what the bytes hold.
    Entries of an unknown type are left out but their bytes count as good.
    """
    view = memoryview(buffer).cast("B")
    end = len(view)
    offset = 0
    entries: list[JournalEntry] = []
    while offset + FRAME_BYTES <= end:
        length, checksum = FRAME.unpack_from(view, offset)
        start = offset + FRAME_BYTES
        if not 1 <= length <= min(PAYLOAD_BYTES_MAX, end - start):
            break
        payload = bytes(view[start : start + length])
        if _checksum(payload) != checksum:
            break
        try:
            entry = _decode(payload)
        except (ValueError, struct.error):
            break  # a good sum over a payload that contradicts itself
        if entry is not None:
            entries.append(entry)
        offset = start + length
    return entries, offset


def _checksum(payload: bytes) -> int:
    digest: int = xxhash.xxh3_64_intdigest(payload)
    return digest & 0xFFFF_FFFF


def _put_payload(meta: BlockMeta) -> bytes:
    fixed = _PUT.pack(
        _TYPE_PUT,
        meta.placement,
        meta.mode,
        meta.uid,
        meta.gid,
        meta.generation,
        meta.stamp,
        meta.size,
        meta.created_ns,
        meta.mtime_ns,
        meta.atime_ns,
        meta.expires_ns,
        meta.pin_until_ns,
        meta.digest,
        len(meta.key),
        len(meta.parent),
        len(meta.dtype),
        len(meta.attributes),
    )
    is_amended = meta.revision or meta.replicas
    if not meta.attributes and not meta.origin and not is_amended:
        return fixed + meta.key + meta.parent + meta.dtype
    attributes = pack_attributes(meta.attributes)
    tail = _ORIGIN.pack(meta.origin) if meta.origin or is_amended else b""
    if is_amended:
        tail += _AMENDED.pack(meta.revision, meta.replicas)
    return b"".join((fixed, meta.key, meta.parent, meta.dtype, attributes, tail))


def _transient_payload(entry: Transient) -> bytes:
    fixed = _TRANSIENT.pack(
        _TYPE_TRANSIENT,
        entry.flags,
        entry.owner,
        entry.opener,
        entry.base,
        entry.refused_at,
        entry.shadow,
        entry.coming,
    )
    return fixed + _put_payload(entry.meta)


def _directory_payload(meta: DirectoryMeta) -> bytes:
    fixed = _DIRECTORY.pack(
        _TYPE_MAKE,
        _TOGETHER if meta.together else 0,
        meta.mode,
        meta.uid,
        meta.gid,
        meta.inode,
        meta.stamp,
        meta.mtime_ns,
        meta.default_ttl_ns,
        len(meta.key),
        len(meta.attributes),
    )
    replicas = _REPLICAS.pack(meta.default_replicas) if meta.default_replicas else b""
    return b"".join((fixed, meta.key, pack_attributes(meta.attributes), replicas))


def pack_attributes(attributes: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """As they stand in a Put."""
    parts: list[bytes] = []
    for name, value in attributes:
        parts += (_ATTRIBUTE.pack(len(name), len(value)), name, value)
    return b"".join(parts)


def unpack_attributes(packed: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """What `pack_attributes` packed. Raises ValueError or struct.error."""
    attributes: list[tuple[bytes, bytes]] = []
    offset = 0
    while offset < len(packed):
        name_length, value_length = _ATTRIBUTE.unpack_from(packed, offset)
        name, offset = _take(packed, offset + _ATTRIBUTE.size, name_length)
        value, offset = _take(packed, offset, value_length)
        attributes.append((name, value))
    return tuple(attributes)


def _decode(payload: bytes) -> JournalEntry | None:
    """None for a type this version does not know. Raises ValueError or struct.error."""
    kind = payload[0]
    if kind == _TYPE_PUT:
        return Put(_decode_block(payload))
    if kind == _TYPE_MAKE:
        return MakeDirectory(_decode_directory(payload))
    if kind == _TYPE_DROP:
        _, generation, stamp = _GONE.unpack_from(payload)
        return Drop(generation, stamp)
    if kind == _TYPE_REMOVE:
        _, inode, stamp = _GONE.unpack_from(payload)
        return RemoveDirectory(inode, stamp)
    if kind == _TYPE_TRANSIENT:
        _, flags, owner, *others = _TRANSIENT.unpack_from(payload)
        meta = _decode_block(payload[_TRANSIENT.size :])
        return Transient(meta, owner, TransientFlag(flags), *others)
    if kind == _TYPE_ALIAS:
        _, holder = _ALIAS.unpack_from(payload)
        return Alias(_decode_block(payload[_ALIAS.size :]), holder)
    return None


def _decode_block(payload: bytes) -> BlockMeta:
    (
        _,
        placement,
        mode,
        uid,
        gid,
        generation,
        stamp,
        size,
        created_ns,
        mtime_ns,
        atime_ns,
        expires_ns,
        pin_until_ns,
        digest,
        key_length,
        parent_length,
        dtype_length,
        attribute_count,
    ) = _PUT.unpack_from(payload)
    key, offset = _take(payload, _PUT.size, key_length)
    parent, offset = _take(payload, offset, parent_length)
    dtype, offset = _take(payload, offset, dtype_length)
    attributes, offset = _take_attributes(payload, offset, attribute_count)
    origin, revision, replicas = _decode_tail(payload, offset)
    return BlockMeta(
        generation=generation,
        stamp=stamp,
        key=key,
        size=size,
        digest=digest,
        mode=mode,
        uid=uid,
        gid=gid,
        created_ns=created_ns,
        mtime_ns=mtime_ns,
        atime_ns=atime_ns,
        expires_ns=expires_ns,
        pin_until_ns=pin_until_ns,
        placement=Placement(placement),
        origin=origin,
        revision=revision,
        replicas=replicas,
        parent=parent,
        dtype=dtype,
        attributes=attributes,
    )


def _decode_tail(payload: bytes, offset: int) -> tuple[int, int, int]:
    """Origin, revision and replicas: what a Put may have behind its attributes."""
    if len(payload) - offset < _ORIGIN.size:
        return 0, 0, 0
    (origin,) = _ORIGIN.unpack_from(payload, offset)
    offset += _ORIGIN.size
    if len(payload) - offset < _AMENDED.size:
        return origin, 0, 0
    return origin, *_AMENDED.unpack_from(payload, offset)


def _decode_directory(payload: bytes) -> DirectoryMeta:
    (
        _,
        flags,
        mode,
        uid,
        gid,
        inode,
        stamp,
        mtime_ns,
        default_ttl_ns,
        key_length,
        attribute_count,
    ) = _DIRECTORY.unpack_from(payload)
    key, offset = _take(payload, _DIRECTORY.size, key_length)
    attributes, offset = _take_attributes(payload, offset, attribute_count)
    has_replicas = len(payload) - offset >= _REPLICAS.size
    return DirectoryMeta(
        inode=inode,
        stamp=stamp,
        key=key,
        mode=mode,
        uid=uid,
        gid=gid,
        mtime_ns=mtime_ns,
        default_ttl_ns=default_ttl_ns,
        together=bool(flags & _TOGETHER),
        default_replicas=_REPLICAS.unpack_from(payload, offset)[0] if has_replicas else 0,
        attributes=attributes,
    )


def _take(payload: bytes, offset: int, length: int) -> tuple[bytes, int]:
    end = offset + length
    if end > len(payload):
        raise ValueError("a field reaches beyond its payload")
    return payload[offset:end], end


def _take_attributes(
    payload: bytes, offset: int, count: int
) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
    """These, and where they end."""
    attributes: list[tuple[bytes, bytes]] = []
    for _ in range(count):
        name_length, value_length = _ATTRIBUTE.unpack_from(payload, offset)
        name, offset = _take(payload, offset + _ATTRIBUTE.size, name_length)
        value, offset = _take(payload, offset, value_length)
        attributes.append((name, value))
    return tuple(attributes), offset
