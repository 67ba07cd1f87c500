"""The bytes of a stream's header and table; the tables of docs/codec.md."""

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ctxfs.codec.offload import TAG_BYTES, Buffer, Offload
from ctxfs.codec.planes import ELEMENT_BYTES, Layout
from ctxfs.errors import BadStream, NewerStream

MAGIC: Final = b"CTXC"
VERSION: Final = 1
CHUNK_BYTES_MIN: Final = 4 << 10
CHUNK_BYTES_MAX: Final = 16 << 20
CHUNK_UNIT: Final = 8  # so that the phase is the same in every chunk
SALT_BYTES: Final = 32
KEY_ID_BYTES_MAX: Final = 16

_START = struct.Struct("<4sIQ")
_REST = struct.Struct("<IBBBBIB3xQQ16s32s")
FIXED_BYTES: Final = _START.size + _REST.size
ENTRY: Final = struct.Struct("<IQ")
AS_IT_IS: Final = 1 << 31
LENGTH_FIELD_BYTES: Final = 4
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_NONCE = struct.Struct("<Q4x")
_VERSION: Final = _START.pack(MAGIC, VERSION, 0)[:8]
NO_SALT: Final = bytes(SALT_BYTES)


class Method(enum.IntEnum):
    """`STORED`: no chunk is compressed; there is a stream only because it is encrypted."""

    STORED = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a stream says of itself. `key_id` is empty where nothing is encrypted."""

    method: Method
    layout: Layout
    phase: int
    chunk_bytes: int
    raw_bytes: int
    encoded_bytes: int
    key_id: bytes
    salt: bytes

    @property
    def chunks(self) -> int:
        return -(-self.raw_bytes // self.chunk_bytes)

    @property
    def header_bytes(self) -> int:
        """The table included."""
        return FIXED_BYTES + ENTRY.size * self.chunks

    @property
    def tag_bytes(self) -> int:
        """Of each chunk."""
        return TAG_BYTES if self.key_id else 0

    def chunk(self, number: int) -> slice:
        """Where this chunk lies in the content."""
        start = number * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.raw_bytes))

    def edges(self, number: int) -> tuple[int, int]:
        """Bytes of this chunk before its first and behind its last whole element."""
        piece = self.chunk(number)
        length = piece.stop - piece.start
        before = min(self.phase, length)
        return before, (length - before) % self.layout.element_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One chunk in the table. `stored_bytes` includes the tag."""

    stored_bytes: int
    as_it_is: bool
    checksum: int


def length_field(length: int, as_it_is: bool) -> bytes:
    """A length, with the bit that tells plain bytes from compressed ones."""
    return _LENGTH.pack(length | (AS_IT_IS if as_it_is else 0))


def lengths_from(fields: Buffer) -> list[tuple[int, bool]]:
    """The reverse, of several fields."""
    return [(each & ~AS_IT_IS, bool(each & AS_IT_IS)) for (each,) in _LENGTH.iter_unpack(fields)]


def _rest(header: Header, encoded_bytes: int) -> bytes:
    return _REST.pack(
        header.header_bytes,
        header.method,
        header.layout.element_bytes,
        header.layout.rotated,
        header.phase,
        header.chunk_bytes,
        bool(header.key_id),
        header.raw_bytes,
        encoded_bytes,
        header.key_id,
        header.salt,
    )


def associated(header: Header, context: bytes) -> bytes:
    """What is authenticated with every chunk, before the chunk's own length field.

    The stream's length, which is not known before the last chunk, is left out: the number of
    chunks and the length of each are authenticated.
    """
    return _VERSION + _rest(header, 0) + context


def nonce(number: int) -> bytes:
    """The nonce of this chunk, under the key of its stream alone."""
    return _NONCE.pack(number)


def write_header(
    target: memoryview, header: Header, table: Sequence[Entry], context: bytes, offload: Offload
) -> None:
    """Put header and table at the beginning of `target`."""
    entries = b"".join(
        length_field(each.stored_bytes, each.as_it_is) + _CHECKSUM.pack(each.checksum)
        for each in table
    )
    behind = _rest(header, header.encoded_bytes) + entries
    checksum = offload.checksum((_VERSION, behind, context))
    target[: header.header_bytes] = _START.pack(MAGIC, VERSION, checksum) + behind


def read_header(encoded: Buffer) -> Header:
    """What the first 96 bytes say, each field within its bounds. The checksum is not looked at,
    since it covers the table too. Raises BadStream, and NewerStream for another version.
    """
    if len(encoded) < FIXED_BYTES:
        raise BadStream("too short for a stream")
    magic, version, _ = _START.unpack_from(encoded)
    if magic != MAGIC:
        raise BadStream("this is no stream")
    if version != VERSION:
        raise NewerStream(f"the stream has version {version}, this program reads {VERSION}")
    total, method, element, rotated, phase, chunk, cipher, raw, length, key, salt = (
        _REST.unpack_from(encoded, _START.size)
    )
    key_id = key.rstrip(b"\0")
    sound = (
        method in (Method.STORED, Method.ZSTD)
        and element in ELEMENT_BYTES
        and rotated <= 1
        and phase < element
        and CHUNK_BYTES_MIN <= chunk <= CHUNK_BYTES_MAX
        and chunk % CHUNK_UNIT == 0
        and cipher == bool(key_id)
        and b"\0" not in key_id
        and (cipher == 1 or salt == NO_SALT)
        and raw >= 1
    )
    if not sound:
        raise BadStream("a field of the header is out of bounds")
    header = Header(
        method=Method(method),
        layout=Layout(element, bool(rotated)),
        phase=phase,
        chunk_bytes=chunk,
        raw_bytes=raw,
        encoded_bytes=length,
        key_id=key_id,
        salt=salt,
    )
    if total != header.header_bytes or length < total:
        raise BadStream("the lengths in the header contradict each other")
    return header


def read_table(
    encoded: memoryview, expected_bytes: int, context: bytes, offload: Offload
) -> tuple[Header, list[Entry]]:
    """Header and table, held against checksum and context. Raises BadStream, NewerStream.

    `expected_bytes`: the length of the content, as the caller knows it. Nothing that the stream
    says makes this allocate more than a table for that many bytes.
    """
    version = _checked_version(encoded, context, offload)
    if version != VERSION:
        raise NewerStream(f"the stream has version {version}, this program reads {VERSION}")
    header = read_header(encoded)
    if header.raw_bytes != expected_bytes or header.encoded_bytes > len(encoded):
        raise BadStream("the stream has another length than is expected")
    table = list(_entries(encoded, header))
    if header.header_bytes + sum(each.stored_bytes for each in table) != header.encoded_bytes:
        raise BadStream("the chunks are not as long as the stream")
    return header, table


def _checked_version(encoded: memoryview, context: bytes, offload: Offload) -> int:
    """The version, once the checksum holds: that much is the same in all versions."""
    if len(encoded) < _START.size + 4:
        raise BadStream("too short for a stream")
    magic, version, checksum = _START.unpack_from(encoded)
    if magic != MAGIC:
        raise BadStream("this is no stream")
    (total,) = struct.unpack_from("<I", encoded, _START.size)
    if not _START.size < total <= len(encoded):
        raise BadStream("the header is longer than the stream")
    found = offload.checksum((encoded[:8], encoded[_START.size : total], context))
    if found != checksum:
        raise BadStream("the header does not match its checksum, or is another block's")
    return int(version)


def _entries(encoded: memoryview, header: Header) -> Iterator[Entry]:
    table = encoded[FIXED_BYTES : header.header_bytes]
    for number, (field, checksum) in enumerate(ENTRY.iter_unpack(table)):
        entry = Entry(field & ~AS_IT_IS, bool(field & AS_IT_IS), checksum)
        piece = header.chunk(number)
        # A chunk that did not shrink is stored as it is, so none is longer than its content.
        longest = piece.stop - piece.start + header.tag_bytes
        if entry.as_it_is and entry.stored_bytes != longest:
            raise BadStream(f"chunk {number} is stored as it is, at another length")
        if not entry.as_it_is and (entry.stored_bytes >= longest or header.method is Method.STORED):
            raise BadStream(f"chunk {number} is longer than it may be")
        yield entry


def describe(header: Header) -> str:
    """For people: `zstd+planes2`, `zstd`, and with `+aes256gcm:id` behind; `raw+aes256gcm:id`."""
    text = "raw" if header.method is Method.STORED else "zstd"
    if header.method is Method.ZSTD and header.layout.planes > 1:
        text += f"+planes{header.layout.planes}"
    if header.key_id:
        text += f"+aes256gcm:{header.key_id.decode('ascii', 'replace')}"
    return text
