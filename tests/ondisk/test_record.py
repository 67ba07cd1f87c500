"""Superblocks, segment headers and record headers, byte by byte."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.codec.digest import digest
from ctxfs.core.meta import BlockMeta, Drop, Placement, Put
from ctxfs.errors import ConfigError
from ctxfs.ondisk import ledger, record, segment, superblock
from ctxfs.ondisk.layout import SEGMENTS_OFFSET, Geometry, choose_geometry, padded
from ctxfs.ondisk.record import DataSum, Place, RecordHeader, RecordKind
from ctxfs.ondisk.superblock import Superblock

_DOCUMENT = Path(__file__).parents[2] / "docs" / "ondisk.md"
_UUID = bytes(range(16))
_PLACE = Place(salt=record.make_salt(_UUID), sequence=7 << 32, position=4096)


def documented_header() -> bytes:
    """The record header that docs/ondisk.md shows."""
    meta = BlockMeta(
        generation=42,
        stamp=1001,
        key=b"llama/00c0ffee",
        size=5000,
        digest=bytes.fromhex("000102030405060708090a0b0c0d0e0f"),
        mode=0o644,
        uid=1000,
        gid=100,
        created_ns=1_700_000_000_000_000_000,
        mtime_ns=1_700_000_000_000_000_000,
        atime_ns=1_700_000_000_000_000_000,
        expires_ns=1_700_003_600_000_000_000,
        placement=Placement.COLD,
        parent=b"llama/00c0ffed",
        dtype=b"bf16",
        attributes=((b"user.note", b"hi"),),
    )
    header = RecordHeader(
        kind=RecordKind.DATA,
        header_bytes=4096,
        stamp=1002,
        generation=42,
        part_length=5000,
        data_bytes=8192,
        data_checksum=0x1122334455667788,
    )
    target = bytearray(4096)
    record.encode_into(memoryview(target), header, _PLACE, ledger.encode(Put(meta)))
    return bytes(target)


def test_hexdump_in_the_document_is_what_is_written() -> None:
    lines = re.findall(
        r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ){1,16}) *\|", _DOCUMENT.read_text(), re.MULTILINE
    )
    data = documented_header()
    shown = b"".join(bytes.fromhex(text) for _, text in lines)
    assert [int(offset, 16) for offset, _ in lines] == list(range(0, len(shown), 16))
    assert shown == data[: len(shown)]
    assert not any(data[len(shown) :])


def test_record_header_comes_back() -> None:
    found = record.decode(documented_header(), _PLACE)
    assert found is not None
    header, entries = found
    assert header.record_bytes == 4096 + 8192
    assert isinstance(entries[0], Put)
    assert entries[0].meta.key == b"llama/00c0ffee"


@pytest.mark.parametrize(
    "place",
    [
        Place(_PLACE.salt + 1, _PLACE.sequence, _PLACE.position),
        Place(_PLACE.salt, _PLACE.sequence + 1, _PLACE.position),
        Place(_PLACE.salt, _PLACE.sequence, _PLACE.position + 4096),
    ],
)
def test_record_that_belongs_elsewhere_is_none(place: Place) -> None:
    assert record.decode(documented_header(), place) is None
    assert not record.belongs(documented_header(), place)


@given(st.integers(0, 4096 * 8 - 1))
def test_record_header_with_a_flipped_bit_is_none(bit: int) -> None:
    data = bytearray(documented_header())
    data[bit // 8] ^= 1 << bit % 8
    assert record.decode(data, _PLACE) is None
    assert record.belongs(data, _PLACE)


@given(st.binary(max_size=5000))
def test_garbage_is_no_record(garbage: bytes) -> None:
    assert record.decode(garbage, _PLACE) is None
    assert record.decode(record.MAGIC + garbage, _PLACE) is None
    assert not record.belongs(garbage, _PLACE)


def test_void_record_keeps_its_length_and_says_nothing() -> None:
    found = record.decode(documented_header(), _PLACE)
    assert found is not None
    target = bytearray(4096)
    record.encode_into(memoryview(target), record.void(found[0]), _PLACE, b"")
    void = record.decode(target, _PLACE)
    assert void is not None
    assert void[0].record_bytes == found[0].record_bytes
    assert void[0].kind is RecordKind.NOTE
    assert void[1] == []


def test_header_grows_with_its_frames() -> None:
    frames = ledger.encode(Drop(1, 2)) * 3000
    length = record.header_bytes_for(len(frames))
    assert length == padded(record.FRAMES_AT + len(frames))
    target = bytearray(length)
    header = RecordHeader(kind=RecordKind.NOTE, header_bytes=length, stamp=3)
    record.encode_into(memoryview(target), header, _PLACE, frames)
    found = record.decode(target, _PLACE)
    assert found is not None
    assert found[1] == [Drop(1, 2)] * 3000
    with pytest.raises(ValueError, match="do not fit"):
        record.encode_into(memoryview(target)[:4096], header, _PLACE, frames)


def _superblock(sequence: int) -> Superblock:
    return Superblock(
        uuid=_UUID,
        sequence=sequence,
        geometry=choose_geometry(64 << 20),
        good_sequence=9,
        clean=True,
    )


def test_newer_superblock_counts_and_lies_in_the_other_place() -> None:
    start = bytearray(8192)
    for sequence in (6, 7):
        found = _superblock(sequence)
        start[found.offset : found.offset + 4096] = superblock.encode(found)
    assert superblock.newest(start) == _superblock(7)
    start[_superblock(7).offset + 50] ^= 1
    assert superblock.newest(start) == _superblock(6)
    assert superblock.has_magic(start)


@given(st.integers(0, 4096 * 8 - 1))
def test_superblock_with_a_flipped_bit_is_none(bit: int) -> None:
    data = bytearray(superblock.encode(_superblock(3)))
    data[bit // 8] ^= 1 << bit % 8
    assert superblock.decode(data) is None


@given(st.integers(0, 4096 * 8 - 1))
def test_segment_header_with_a_flipped_bit_is_none(bit: int) -> None:
    data = bytearray(segment.encode(_UUID, 5, 77))
    assert segment.decode(data, _UUID, 5) == 77
    data[bit // 8] ^= 1 << bit % 8
    assert segment.decode(data, _UUID, 5) is None


def test_segment_header_of_another_place_or_device_is_none() -> None:
    data = segment.encode(_UUID, 5, 77)
    assert segment.decode(data, _UUID, 6) is None
    assert segment.decode(data, bytes(16), 5) is None


@pytest.mark.parametrize(
    ("size", "segment_bytes"),
    [(16 << 20, 1 << 20), (64 << 20, 1 << 20), (1 << 30, 8 << 20), (1 << 40, 64 << 20)],
)
def test_segments_are_as_large_as_leaves_about_64(size: int, segment_bytes: int) -> None:
    geometry = choose_geometry(size)
    assert geometry.segment_bytes == segment_bytes
    assert geometry.is_sound()
    assert geometry.segment_offset(geometry.segment_count) <= size


def test_device_too_small_for_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 9 MiB"):
        choose_geometry(8 << 20)


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(64 << 20, 3 << 20, 4),
        Geometry(64 << 20, 1 << 20, 64),
        Geometry(64 << 20, 4096, 4),
        Geometry(1 << 40, 128 << 20, 8),
        Geometry(SEGMENTS_OFFSET, 1 << 20, 0),
    ],
)
def test_numbers_that_cannot_be_meant_are_not_sound(geometry: Geometry) -> None:
    assert not geometry.is_sound()


def test_record_of_an_encoded_block_says_how_long_that_is() -> None:
    header = RecordHeader(
        kind=RecordKind.DATA,
        header_bytes=4096,
        stamp=9,
        generation=7,
        part_offset=4096,
        part_length=8192,
        data_bytes=8192,
        encoded_bytes=12288,
        method=2,
    )
    target = bytearray(4096)
    record.encode_into(memoryview(target), header, _PLACE, b"")
    assert record.decode(target, _PLACE) == (header, [])


@given(st.binary(max_size=9000))
def test_checksum_by_digest_is_known_from_the_digest_of_the_content(content: bytes) -> None:
    found = DataSum(by_digest=True)
    for at in range(0, len(content), 4096):
        found.update(content[at : at + 4096])
    assert found.value() == record.checksum_of_digest(digest(content))


@pytest.mark.parametrize("by_digest", [False, True])
def test_header_says_what_its_checksum_is_of(by_digest: bool) -> None:
    header = RecordHeader(
        kind=RecordKind.DATA,
        header_bytes=4096,
        stamp=1,
        part_length=5000,
        data_bytes=8192,
        by_digest=by_digest,
    )
    target = bytearray(4096)
    record.encode_into(memoryview(target), header, _PLACE, b"")
    found = record.decode(target, _PLACE)
    assert found is not None
    assert found[0] == header
    assert found[0].checked_bytes == (5000 if by_digest else 8192)
