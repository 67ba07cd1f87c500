"""Frames of entries: what goes in comes out, and garbage ends the list without an error."""

import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.meta import BlockMeta, Drop, JournalEntry, Put, RemoveDirectory
from ctxfs.ondisk.ledger import FRAME, PAYLOAD_BYTES_MAX, decode_all, encode
from tests.ondisk.strategies import journal_entries as entries


def _frame(payload: bytes) -> bytes:
    return FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload) & 0xFFFFFFFF) + payload


@given(st.lists(entries, max_size=6))
def test_entries_come_back_as_they_were(given_entries: list[JournalEntry]) -> None:
    data = b"".join(encode(entry) for entry in given_entries)
    assert decode_all(data) == (given_entries, len(data))
    assert decode_all(memoryview(data + bytes(100))) == (given_entries, len(data))


@given(st.lists(entries, min_size=1, max_size=4), st.data())
def test_torn_tail_is_cut(given_entries: list[JournalEntry], data: st.DataObject) -> None:
    frames = [encode(entry) for entry in given_entries]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole) - 1))
    ends = [sum(map(len, frames[:count])) for count in range(len(frames) + 1)]
    count = max(index for index, end in enumerate(ends) if end <= cut)
    assert decode_all(whole[:cut]) == (given_entries[:count], ends[count])


@given(st.lists(entries, min_size=1, max_size=4), st.data())
def test_flipped_bit_ends_the_list(given_entries: list[JournalEntry], data: st.DataObject) -> None:
    frames = [encode(entry) for entry in given_entries]
    damaged = bytearray(b"".join(frames))
    bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[bit // 8] ^= 1 << (bit % 8)
    found, good = decode_all(bytes(damaged))
    assert found == given_entries[: len(found)]
    assert good <= bit // 8


@given(st.binary(max_size=400))
def test_garbage_never_raises(garbage: bytes) -> None:
    _, good = decode_all(garbage)
    assert 0 <= good <= len(garbage)


@given(st.binary(min_size=1, max_size=200))
def test_payload_with_a_good_sum_never_raises(payload: bytes) -> None:
    decode_all(_frame(payload))


def test_unknown_type_is_skipped() -> None:
    data = encode(Drop(1, 2)) + _frame(b"\xf0 from a later version") + encode(RemoveDirectory(3, 4))
    assert decode_all(data) == ([Drop(1, 2), RemoveDirectory(3, 4)], len(data))


def test_field_appended_by_a_later_version_is_left_unread() -> None:
    payload = encode(Drop(7, 8))[FRAME.size :] + b"more"
    assert decode_all(_frame(payload))[0] == [Drop(7, 8)]


def test_field_that_reaches_beyond_its_payload_ends_the_list() -> None:
    payload = bytearray(encode(_block(b"key"))[FRAME.size :])
    struct.pack_into("<H", payload, payload.index(bytes.fromhex("0300")), 3000)
    assert decode_all(_frame(bytes(payload))) == ([], 0)


def test_absurd_length_ends_the_list() -> None:
    assert decode_all(FRAME.pack(PAYLOAD_BYTES_MAX + 1, 0) + bytes(PAYLOAD_BYTES_MAX + 1)) == (
        [],
        0,
    )


def test_attributes_of_64_kib_fit() -> None:
    entry = _block(b"k" * 4095, ((b"user.big", b"v" * 65536), (b"user.empty", b"")))
    assert decode_all(encode(entry))[0] == [entry]


def _block(key: bytes, attributes: tuple[tuple[bytes, bytes], ...] = ()) -> Put:
    return Put(
        BlockMeta(
            generation=1 << 40,
            stamp=1 << 41,
            key=key,
            size=0,
            digest=b"\xaa" * 16,
            mode=0o644,
            uid=0,
            gid=0,
            created_ns=0,
            mtime_ns=-1,
            atime_ns=0,
            attributes=attributes,
        )
    )
