"""Damaged structures are told from those of earlier lives of their segment."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ctxfs.ondisk import blob, record, structs
from ctxfs.ondisk.blob import BlobHeader, BlobKind
from ctxfs.ondisk.record import Place, RecordHeader, RecordKind

PLACE = Place(salt=0x1234_5678_9ABC_DEF0, sequence=7 << 32 | 4, position=12 << 12)


def a_record(place: Place = PLACE, header_bytes: int = 4096) -> bytearray:
    header = RecordHeader(kind=RecordKind.NOTE, header_bytes=header_bytes, stamp=9)
    data = bytearray(header_bytes)
    record.encode_into(memoryview(data), header, place, b"frames" * (header_bytes // 8))
    return data


def a_blob(place: Place = PLACE) -> bytearray:
    header = BlobHeader(
        kind=BlobKind.SUMMARY,
        number=3,
        piece=0,
        last=True,
        first=0,
        data_length=10,
        data_checksum=5,
    )
    return bytearray(blob.encode(header, place))


KINDS = [(structs.RECORD_KIND, a_record), (structs.BLOB_KIND, a_blob)]


@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_one_bit_anywhere_leaves_it_recognisable(
    kind: structs.Kind, make: Callable[[], bytearray]
) -> None:
    for bit in range(8 * 104):
        data = make()
        data[bit // 8] ^= 1 << bit % 8
        assert structs.is_damaged_here(data, kind, PLACE), bit


@pytest.mark.parametrize("bit", range(40))
def test_a_good_one_of_an_earlier_life_is_not_damaged(bit: int) -> None:
    before = replace(PLACE, sequence=PLACE.sequence ^ 1 << bit)
    assert not structs.is_damaged_here(a_blob(before), structs.BLOB_KIND, PLACE)
    for header_bytes in (4096, 3 * 4096):
        found = a_record(before, header_bytes)
        assert not structs.is_damaged_here(found, structs.RECORD_KIND, PLACE)


def test_zeros_and_content_are_not_damaged() -> None:
    for page in (bytes(4096), bytes(range(256)) * 16):
        for kind in (structs.RECORD_KIND, structs.BLOB_KIND):
            assert not structs.is_damaged_here(page, kind, PLACE)
            assert structs.kind_of(page) is None


def test_the_tables_of_fields_say_what_the_encoders_wrote() -> None:
    found = structs.state(a_record(), structs.RECORD_KIND)
    assert (found["salt"], found["sequence"], found["position"]) == (
        PLACE.salt,
        PLACE.sequence,
        PLACE.position,
    )
    assert (found["kind"], found["stamp"], found["header_bytes"]) == (2, 9, 4096)
    found = structs.state(a_blob(), structs.BLOB_KIND)
    assert (found["kind"], found["number"], found["flags"]) == (1, 3, 1)
    assert (found["data_bytes"], found["data_checksum"]) == (10, 5)
