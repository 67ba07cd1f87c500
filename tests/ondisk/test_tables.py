"""Columns, facts and blobs: what is written is read, and what is damaged is not taken."""

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.meta import Alias, BlockMeta, Entry, MakeDirectory, Put
from ctxfs.ondisk import blob, columnar, facts, ledger
from ctxfs.ondisk.blob import BlobHeader, BlobKind
from ctxfs.ondisk.columnar import RAGGED, Ragged, Table, make_table
from ctxfs.ondisk.facts import Facts, FactsBuilder, block_columns, directory_of
from ctxfs.ondisk.record import Place, RecordHeader, RecordKind
from tests.ondisk.strategies import blocks, entries

_SCHEMA = {"small": "u1", "large": "u8", "signed": "i8", "wide": "u1*16", "bytes": RAGGED}
_u64 = st.integers(0, 2**64 - 1)
_rows = st.lists(
    st.tuples(
        st.integers(0, 255),
        _u64,
        st.integers(-(2**63), 2**63 - 1),
        st.binary(min_size=16, max_size=16),
        st.binary(max_size=40),
    ),
    max_size=8,
)


def _values(table: Table) -> dict[str, list[object]]:
    return {
        name: [column.row(at) for at in range(len(column))]
        if isinstance(column, Ragged)
        else column.tolist()
        for name, column in table.columns.items()
    }


@given(_rows, st.booleans())
def test_tables_come_back(rows: list[tuple[object, ...]], repeat: bool) -> None:
    table = make_table(_SCHEMA, rows[:1] * 5 if repeat else rows)
    decoded = columnar.decode(columnar.encode({"name": table}), {"name": _SCHEMA})["name"]
    assert _values(decoded) == _values(table)
    assert len(decoded) == len(table)


def test_column_with_one_value_in_all_rows_takes_no_room_for_each() -> None:
    many = Table({"same": np.full(100_000, 7, np.uint64)})
    encoded = columnar.encode({"name": many})
    assert len(encoded) < 100
    found = columnar.decode(encoded, {"name": {"same": "u8"}})["name"].array("same")
    assert (found == 7).all()
    assert len(found) == 100_000


def test_unknown_columns_are_passed_over_and_missing_ones_are_zero() -> None:
    table = Table({"known": np.arange(3, dtype=np.uint64), "later": np.ones(3, np.uint8)})
    schema = {"known": "u8", "stored": "u8", "digest": "u1*16", "text": RAGGED}
    found = columnar.decode(columnar.encode({"name": table}), {"name": schema, "other": schema})
    assert _values(found["name"]) == {
        "known": [0, 1, 2],
        "stored": [0, 0, 0],
        "digest": [[0] * 16] * 3,
        "text": [b"", b"", b""],
    }
    assert len(found["other"]) == 0


@given(_rows, st.randoms(use_true_random=False))
def test_damaged_columns_are_refused_or_read_but_never_break(
    rows: list[tuple[object, ...]], chance: random.Random
) -> None:
    encoded = bytearray(columnar.encode({"name": make_table(_SCHEMA, rows)}))
    for _ in range(chance.randrange(1, 4)):
        encoded[chance.randrange(len(encoded))] ^= 1 << chance.randrange(8)
    del encoded[chance.randrange(1, len(encoded) + 1) :]
    try:
        found = columnar.decode(encoded, {"name": _SCHEMA})["name"]
    except ValueError:
        return
    assert len({len(column) for column in found.columns.values()}) == 1


@given(_rows, st.data())
def test_rows_are_taken_and_laid_together(
    rows: list[tuple[object, ...]], data: st.DataObject
) -> None:
    table = make_table(_SCHEMA, rows)
    wanted = data.draw(
        st.lists(st.sampled_from(range(len(rows))), max_size=12) if rows else st.just([])
    )
    taken = table.take(np.array(wanted, np.intp))
    picked = make_table(_SCHEMA, [rows[at] for at in wanted])
    assert _values(taken) == _values(picked)
    both = Table.concat([table, taken])
    assert _values(both) == _values(make_table(_SCHEMA, [*rows, *(rows[at] for at in wanted)]))


@given(st.lists(blocks, max_size=4), st.lists(entries, max_size=6))
def test_facts_come_back(metas: list[BlockMeta], notes: list[Entry]) -> None:
    builder = FactsBuilder(3)
    for at, meta in enumerate(metas):
        header = RecordHeader(
            kind=RecordKind.DATA, header_bytes=4096, stamp=at, part_length=meta.size
        )
        builder.add_data(meta, header, at << 22 | 3 << 36)
    for entry in notes:
        builder.add_note(9, entry, len(ledger.encode(entry)))
    said = builder.finish(77, 4096)
    found = facts.decode(facts.encode(said))
    assert found is not None
    for name in Facts.__slots__:
        assert _values(getattr(found, name)) == _values(getattr(said, name))
    columns = block_columns(found.metas)
    puts = [entry.meta for entry in notes if isinstance(entry, Put | Alias)]
    assert [columns.meta(row) for row in range(len(columns))] == [*metas, *puts]
    makes = [entry.meta for entry in notes if isinstance(entry, MakeDirectory)]
    assert [directory_of(found.makes, row) for row in range(len(found.makes))] == makes


_HEADER = BlobHeader(
    kind=BlobKind.CHECKPOINT,
    number=5 << 32,
    piece=2,
    last=True,
    first=1000,
    data_length=5000,
    data_checksum=123,
)
_PLACE = Place(salt=1, sequence=2, position=4096)


def test_blob_header_comes_back_and_names_its_length() -> None:
    page = blob.encode(_HEADER, _PLACE)
    assert len(page) == 4096
    assert blob.decode(page, _PLACE) == _HEADER
    assert _HEADER.blob_bytes == 4096 + 8192


@pytest.mark.parametrize("other", [Place(9, 2, 4096), Place(1, 9, 4096), Place(1, 2, 8192)])
def test_blob_of_another_place_or_life_is_not_taken(other: Place) -> None:
    assert blob.decode(blob.encode(_HEADER, _PLACE), other) is None


@given(st.integers(0, 4096 * 8 - 1))
def test_blob_header_with_a_flipped_bit_is_not_taken(bit: int) -> None:
    page = bytearray(blob.encode(_HEADER, _PLACE))
    page[bit // 8] ^= 1 << bit % 8
    assert blob.decode(page, _PLACE) is None


def test_fields_of_a_blob_header_are_where_the_document_says() -> None:
    page = blob.encode(_HEADER, _PLACE)
    assert page[:8] == b"CTXFSBLB"
    assert struct.unpack_from("<QQQ", page, 16) == (1, 2, 4096)
    assert struct.unpack_from("<IHHII", page, 40) == (1, 2, 1, 2, 0)
    assert struct.unpack_from("<QQQQ", page, 56) == (5 << 32, 1000, 5000, 123)
    assert not any(page[88:])


def test_fields_of_a_column_are_where_the_document_says() -> None:
    data = columnar.encode({"t": Table({"a": np.array([1, 2], np.uint16), "b": Ragged.of([b"x"])})})
    assert struct.unpack_from("<II", data, 0) == (2, 0)
    assert struct.unpack_from("<24s4sBBHIQ", data, 8) == (
        b"t.a".ljust(24, b"\0"),
        b"u2\0\0",
        0,
        1,
        0,
        2,
        4,
    )
    assert struct.unpack_from("<24s4sBBHIQ", data, 52) == (
        b"t.b".ljust(24, b"\0"),
        b"ragg",
        0,
        1,
        0,
        1,
        5,
    )
    assert data[96:] == b"\1\0\2\0\0\0\0\0" + b"\1\0\0\0x\0\0\0"
