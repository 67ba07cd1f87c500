"""Columns that say themselves what they are: many rows as bytes, read without a loop over them.

docs/ondisk.md has the tables. A reader passes over columns that it does not know, and takes zeros
for those that it misses: so a later version adds columns without a new format.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ctxfs.ondisk.layout import Bytes

Array = npt.NDArray[Any]

RAGGED: Final = "ragged"  # rows of bytes, each of its own length
_COUNT: Final = struct.Struct("<II")
# name, type, encoding, elements in a row, rows, bytes stored
_COLUMN: Final = struct.Struct("<24s4sBBxxIQ")
_STEP: Final = 8  # the data of each column begins at a multiple of this
_PLAIN: Final = 0
_CONSTANT: Final = 1  # one row stands for all
_LENGTHS: Final = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Ragged:
    """Byte strings back to back: row i ends at `end[i]`, where the next one begins."""

    data: npt.NDArray[np.uint8]
    end: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.end)

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> Ragged:
        """These byte strings."""
        lengths = np.fromiter(map(len, rows), np.uint64, len(rows))
        data = np.frombuffer(b"".join(rows), np.uint8)
        return cls(data, np.cumsum(lengths, dtype=np.uint64))

    @property
    def start(self) -> npt.NDArray[np.uint64]:
        """Where each row begins."""
        return np.concatenate((np.zeros(1, np.uint64), self.end[:-1]))[: len(self.end)]

    @property
    def lengths(self) -> npt.NDArray[np.uint64]:
        return np.diff(self.end, prepend=np.uint64(0))

    def row(self, at: int) -> bytes:
        """One of them."""
        start = int(self.end[at - 1]) if at else 0
        return self.data[start : int(self.end[at])].tobytes()

    def take(self, rows: npt.NDArray[np.intp]) -> Ragged:
        """These rows, in this order: neighbours are copied as one."""
        if not len(rows):
            return Ragged.of(())
        start, end = self.start[rows], self.end[rows]
        breaks = np.flatnonzero(rows[1:] != rows[:-1] + 1) + 1
        firsts = start[np.concatenate(([0], breaks))].tolist()
        lasts = end[np.concatenate((breaks - 1, [len(rows) - 1]))].tolist()
        view = np.ascontiguousarray(self.data).data
        joined = b"".join([view[at:to] for at, to in zip(firsts, lasts, strict=True)])
        return Ragged(np.frombuffer(joined, np.uint8), np.cumsum(end - start, dtype=np.uint64))

    @classmethod
    def concat(cls, several: Sequence[Ragged]) -> Ragged:
        """All rows of these, in order."""
        end = np.empty(sum(map(len, several)), np.uint64)
        rows = length = 0
        for each in several:
            np.add(each.end, np.uint64(length), out=end[rows : rows + len(each)])
            rows += len(each)
            length += len(each.data)
        return cls(np.concatenate([each.data for each in several]), end)


Column = Array | Ragged
# Of each column: a numpy type, `u1*16` for an array in each row, or RAGGED.
Schema = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of one length, by name."""

    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def array(self, name: str) -> Array:
        column = self.columns[name]
        assert not isinstance(column, Ragged)
        return column

    def ragged(self, name: str) -> Ragged:
        column = self.columns[name]
        assert isinstance(column, Ragged)
        return column

    def take(self, rows: npt.NDArray[np.intp]) -> Table:
        """These rows, in this order."""
        return Table(
            {
                name: column.take(rows) if isinstance(column, Ragged) else column[rows]
                for name, column in self.columns.items()
            }
        )

    def where(self, mask: npt.NDArray[np.bool]) -> Table:
        """The rows for which `mask` holds."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def with_array(self, name: str, array: Array) -> Table:
        """The same with one column replaced."""
        return Table({**self.columns, name: array})

    @classmethod
    def concat(cls, several: Sequence[Table]) -> Table:
        """All rows of these, which have the same columns."""
        filled = [each for each in several if len(each)]
        if len(filled) < 2:
            return filled[0] if filled else several[0]
        columns: dict[str, Column] = {}
        for name, first in filled[0].columns.items():
            if isinstance(first, Ragged):
                columns[name] = Ragged.concat([each.ragged(name) for each in filled])
            else:
                columns[name] = _concat([each.array(name) for each in filled])
        return cls(columns)


def _concat(arrays: Sequence[Array]) -> Array:
    """One after the other; what is one value everywhere stays that, and takes no memory."""
    first = arrays[0]
    if all(each.strides[0] == 0 and (each[0] == first[0]).all() for each in arrays):
        return np.broadcast_to(first[:1], (sum(map(len, arrays)), *first.shape[1:]))
    return np.concatenate(arrays)


def make_table(schema: Schema, rows: Sequence[Sequence[Any]] = ()) -> Table:
    """A table of rows that have a value for each column."""
    values = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return Table(
        {
            name: _column(kind, each)
            for (name, kind), each in zip(schema.items(), values, strict=True)
        }
    )


def _column(kind: str, values: Sequence[Any]) -> Column:
    if kind == RAGGED:
        return Ragged.of(values)
    dtype, width = _shape(kind)
    if width > 1:
        return np.frombuffer(b"".join(values), dtype).reshape(-1, width)
    return np.array(values, dtype)


def _shape(kind: str) -> tuple[np.dtype[Any], int]:
    name, _, width = kind.partition("*")
    return np.dtype(f"<{name}"), int(width or 1)


def encode(tables: Mapping[str, Table]) -> bytes:
    """Tables as bytes. A column is called by its table's name, a dot and its own."""
    heads: list[bytes] = []
    bodies: list[bytes] = []
    for table_name, table in tables.items():
        for name, column in table.columns.items():
            head, body = _encode_column(f"{table_name}.{name}", column)
            heads.append(head)
            bodies += (body, bytes(-len(body) % _STEP))
    return b"".join((_COUNT.pack(len(heads), 0), *heads, *bodies))


def _encode_column(name: str, column: Column) -> tuple[bytes, bytes]:
    rows = len(column)
    if isinstance(column, Ragged):
        encoding, lengths = _squeezed(column.lengths.astype(_LENGTHS))
        kind, width = RAGGED[:4], 1
        body = lengths.tobytes() + column.data.tobytes()
    else:
        width = column.shape[1] if column.ndim > 1 else 1
        kind = column.dtype.str[1:]
        encoding, stored = _squeezed(column)
        body = stored.tobytes()
    encoded = name.encode()
    if len(encoded) > 24:
        raise ValueError(f"{name} is too long for the name of a column")
    return _COLUMN.pack(encoded, kind.encode(), encoding, width, rows, len(body)), body


def _squeezed(array: Array) -> tuple[int, Array]:
    if len(array) > 1 and (array == array[0]).all():
        return _CONSTANT, array[:1]
    return _PLAIN, array


def decode(data: Bytes, schemas: Mapping[str, Schema]) -> dict[str, Table]:
    """The tables that `schemas` describe; arrays are views of `data` where they can be.

    Raises ValueError where the bytes contradict themselves.
    """
    found = _decode_columns(memoryview(data))
    tables: dict[str, Table] = {}
    for table_name, schema in schemas.items():
        named = {name: found.get(f"{table_name}.{name}") for name in schema}
        lengths = {len(column) for column in named.values() if column is not None}
        if len(lengths) > 1:
            raise ValueError(f"columns of {table_name} differ in length")
        rows = lengths.pop() if lengths else 0
        tables[table_name] = Table(
            {name: _checked(column, schema[name], rows) for name, column in named.items()}
        )
    return tables


def _checked(column: Column | None, kind: str, rows: int) -> Column:
    """The column, of the type it should have; zeros where it is missing."""
    if kind == RAGGED:
        if column is None:
            return Ragged(np.zeros(0, np.uint8), np.zeros(rows, np.uint64))
        if not isinstance(column, Ragged):
            raise ValueError("a column that should be ragged is not")
        return column
    dtype, width = _shape(kind)
    shape = (rows, width) if width > 1 else (rows,)
    if column is None:
        return np.zeros(shape, dtype)
    if isinstance(column, Ragged) or column.dtype != dtype or column.shape != shape:
        raise ValueError("a column is of another type")
    return column


def describe(data: Bytes) -> list[dict[str, Any]]:
    """What columns there are, for people: name, type, rows, bytes, and whether one row is all.

    Raises ValueError where the bytes contradict themselves.
    """
    view = memoryview(data)
    lengths = {name: len(column) for name, column in _decode_columns(view).items()}
    count, _ = _COUNT.unpack_from(view)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        head = _COLUMN.unpack_from(view, _COUNT.size + number * _COLUMN.size)
        name, kind = (each.rstrip(b"\0").decode("ascii", "replace") for each in head[:2])
        rows.append(
            {
                "name": name,
                "type": kind if head[3] == 1 else f"{kind}*{head[3]}",
                "rows": lengths[name],
                "bytes": head[-1],
                "constant": head[2] == _CONSTANT,
            }
        )
    return rows


def _decode_columns(view: memoryview) -> dict[str, Column]:
    if len(view) < _COUNT.size:
        raise ValueError("too short for columns")
    count, _ = _COUNT.unpack_from(view)
    at = _COUNT.size + count * _COLUMN.size
    if at > len(view):
        raise ValueError("too short for its columns")
    columns: dict[str, Column] = {}
    for number in range(count):
        head = _COLUMN.unpack_from(view, _COUNT.size + number * _COLUMN.size)
        length = head[-1]
        if at + length > len(view):
            raise ValueError("a column reaches beyond its data")
        name = head[0].rstrip(b"\0").decode("ascii", "replace")
        columns[name] = _decode_column(head[1:], view[at : at + length])
        at += length + -length % _STEP
    return columns


def _decode_column(head: tuple[Any, ...], body: memoryview) -> Column:
    kind, encoding, width, rows, _ = head
    name = kind.rstrip(b"\0").decode("ascii", "replace")
    stored = 1 if encoding == _CONSTANT else rows
    if encoding not in (_PLAIN, _CONSTANT) or width < 1:
        raise ValueError("a column is encoded in an unknown way")
    if name == RAGGED[:4]:
        return _decode_ragged(body, encoding, stored, rows)
    try:
        array = np.frombuffer(body, np.dtype(f"<{name}"))
    except TypeError as error:
        raise ValueError("a column has an unknown type") from error
    if len(array) != stored * width:
        raise ValueError("a column has another length than its rows")
    shaped = array.reshape(stored, width) if width > 1 else array
    return np.broadcast_to(shaped, (rows, *shaped.shape[1:])) if encoding else shaped


def _decode_ragged(body: memoryview, encoding: int, stored: int, rows: int) -> Ragged:
    head = stored * _LENGTHS.itemsize
    lengths: Array = np.frombuffer(body[:head], _LENGTHS)
    if len(lengths) != stored:
        raise ValueError("a column has another length than its rows")
    if encoding == _CONSTANT:
        lengths = np.broadcast_to(lengths, rows)
    end = np.cumsum(lengths, dtype=np.uint64)
    data = np.frombuffer(body[head:], np.uint8)
    if (int(end[-1]) if rows else 0) != len(data):
        raise ValueError("rows of bytes end elsewhere than their data")
    return Ragged(data, end)
