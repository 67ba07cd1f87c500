"""Fields of messages, as bytes: a dataclass whose fields are annotated with codecs is a record.

Little-endian, nothing aligned. A record that comes longer than it is known here was sent by a later
minor version: the rest is skipped. One that ends before a field with a default gets the default.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol, TypeVar, get_type_hints

from ctxfs.core.key import split_key
from ctxfs.errors import BadValue, CtxfsError, PeerProtocolError

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")


class Cursor:
    """A stretch of bytes that is read from its front."""

    __slots__ = ("_at", "_data", "_end")

    def __init__(self, data: Bytes) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._end = len(self._data)

    @property
    def is_at_end(self) -> bool:
        """Whether all has been read."""
        return self._at == self._end

    def take(self, length: int) -> memoryview:
        """Return the next `length` bytes. Raises PeerProtocolError where there are fewer."""
        start = self._at
        if length > self._end - start:
            raise PeerProtocolError("a message ends in the middle of a field")
        self._at = start + length
        return self._data[start : self._at]

    def number(self, size: int) -> int:
        """Return the next `size` bytes as a number."""
        return int.from_bytes(self.take(size), "little")


class Codec(Protocol):
    """How values of one kind are written. `put` raises BadValue, `take` PeerProtocolError."""

    def put(self, out: bytearray, value: Any) -> None: ...

    def take(self, cursor: Cursor) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A number of `size` bytes, not negative."""

    size: int

    def put(self, out: bytearray, value: int) -> None:
        try:
            out += value.to_bytes(self.size, "little")
        except OverflowError as error:
            raise BadValue(f"{value} does not fit {self.size} bytes") from error

    def take(self, cursor: Cursor) -> int:
        return cursor.number(self.size)


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """Exactly `size` bytes."""

    size: int

    def put(self, out: bytearray, value: bytes) -> None:
        if len(value) != self.size:
            raise BadValue(f"{len(value)} bytes where {self.size} belong")
        out += value

    def take(self, cursor: Cursor) -> bytes:
        return bytes(cursor.take(self.size))


def anything(value: bytes) -> object:
    """Accept all bytes."""
    return value


def key_or_nothing(value: bytes) -> object:
    """Accept a legal key, or none. Raises BadValue, NameTooLong."""
    return value and split_key(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Blob:
    """u32 length, then so many bytes, at most `size_max`, that `check` does not complain about."""

    size_max: int
    check: Callable[[bytes], object] = anything

    def put(self, out: bytearray, value: bytes) -> None:
        if len(value) > self.size_max:
            raise BadValue(f"{len(value)} bytes, at most {self.size_max} travel")
        self.check(value)
        out += len(value).to_bytes(4, "little")
        out += value

    def take(self, cursor: Cursor) -> bytes:
        length = cursor.number(4)
        if length > self.size_max:
            raise PeerProtocolError(f"a field of {length} bytes, at most {self.size_max} are legal")
        value = bytes(cursor.take(length))
        try:
            self.check(value)
        except CtxfsError as error:
            raise PeerProtocolError(f"a peer sent {error}") from error
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A blob that is UTF-8. What does not fit is cut off: it is for people."""

    size_max: int

    def put(self, out: bytearray, value: str) -> None:
        data = value.encode("utf-8", "replace")[: self.size_max]
        Blob(self.size_max).put(out, data)

    def take(self, cursor: Cursor) -> str:
        return Blob(self.size_max).take(cursor).decode("utf-8", "replace")


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One byte that names a member of `kind`. Another one means `otherwise`, or is an error."""

    kind: type[IntEnum]
    otherwise: IntEnum | None = None

    def put(self, out: bytearray, value: IntEnum) -> None:
        out.append(value)

    def take(self, cursor: Cursor) -> IntEnum:
        number = cursor.number(1)
        try:
            return self.kind(number)
        except ValueError:
            if self.otherwise is None:
                raise PeerProtocolError(f"{number} is no {self.kind.__name__}") from None
            return self.otherwise


@dataclasses.dataclass(frozen=True, slots=True)
class Many:
    """u32 count, then so many values, `count_min` to `count_max`; a tuple here."""

    codec: Codec
    count_max: int
    count_min: int = 0

    def put(self, out: bytearray, value: Sequence[Any]) -> None:
        if not self.count_min <= len(value) <= self.count_max:
            raise BadValue(f"{len(value)} entries, {self.count_min} to {self.count_max} travel")
        out += len(value).to_bytes(4, "little")
        for each in value:
            self.codec.put(out, each)

    def take(self, cursor: Cursor) -> tuple[Any, ...]:
        count = cursor.number(4)
        if not self.count_min <= count <= self.count_max:
            raise PeerProtocolError(f"{count} entries in one message")
        return tuple(self.codec.take(cursor) for _ in range(count))


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two values, one after the other."""

    first: Codec
    second: Codec

    def put(self, out: bytearray, value: tuple[Any, Any]) -> None:
        self.first.put(out, value[0])
        self.second.put(out, value[1])

    def take(self, cursor: Cursor) -> tuple[Any, Any]:
        return self.first.take(cursor), self.second.take(cursor)


Fields = tuple[tuple[str, Codec, bool], ...]
_known: dict[type, Fields] = {}  # by record: looking up annotations is slow


class Nested:
    """u32 length, then one record of so many bytes."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def put(self, out: bytearray, value: Any) -> None:
        put_sized(out, value)

    def take(self, cursor: Cursor) -> Any:
        return read(self.kind, Cursor(cursor.take(cursor.number(4))))


class OneOf:
    """u32 length, then a byte that says which record, and the record."""

    def __init__(self, kinds: Mapping[int, type]) -> None:
        self.kinds = kinds
        self._numbers = {kind: number for number, kind in kinds.items()}

    def put(self, out: bytearray, value: Any) -> None:
        put_sized(out, value, bytes([self._numbers[type(value)]]))

    def take(self, cursor: Cursor) -> Any:
        inner = Cursor(cursor.take(cursor.number(4)))
        number = inner.number(1)
        if number not in self.kinds:
            raise PeerProtocolError(f"an entry of the unknown kind {number}")
        return read(self.kinds[number], inner)


def put_sized(out: bytearray, value: Any, prefix: bytes = b"") -> None:
    """Append the length of what follows, `prefix` and the record."""
    at = len(out)
    out += bytes(4)
    out += prefix
    write(out, value)
    out[at : at + 4] = (len(out) - at - 4).to_bytes(4, "little")


def codecs_of(kind: type) -> Fields:
    """Return name, codec and whether there is a default, of each field of a record, in order."""
    fields = _known.get(kind)
    if fields is None:
        hints = get_type_hints(kind, include_extras=True)
        fields = _known[kind] = tuple(
            (each.name, hints[each.name].__metadata__[0], each.default is not dataclasses.MISSING)
            for each in dataclasses.fields(kind)
        )
    return fields


def write(out: bytearray, record: Any) -> None:
    """Append the record. Raises BadValue for what does not travel."""
    for name, codec, _ in codecs_of(type(record)):
        codec.put(out, getattr(record, name))


def read(kind: type[T], cursor: Cursor) -> T:
    """Return the record that begins here. Raises PeerProtocolError."""
    values = {}
    for name, codec, has_default in codecs_of(kind):
        if has_default and cursor.is_at_end:
            break
        values[name] = codec.take(cursor)
    return kind(**values)
