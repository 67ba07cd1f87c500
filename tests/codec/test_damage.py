"""Streams that are damaged or hostile: a named error, never wrong bytes, never much memory."""

import struct
import tracemalloc
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfs.codec.header import FIXED_BYTES, MAGIC, Header, read_header
from ctxfs.codec.keyring import KeyRing
from ctxfs.codec.offload import CPU, Decompression
from ctxfs.codec.planes import PLAIN, Layout
from ctxfs.codec.stream import decode_into, stored_plan
from ctxfs.errors import BadStream, CopyCorrupt, CtxfsError, NewerStream, UnknownKey
from tests.codec.contents import (
    BF16,
    SMALL,
    bf16,
    decoded,
    encoded,
    noise,
    page,
    plan_for,
    ring,
)

CONTENT = bf16(5000)  # two chunks and a piece, 10 000 bytes
REFUSALS = (CopyCorrupt, UnknownKey, NewerStream)
RING = ring()
CONTEXT = b"generation and digest"


def kinds() -> Iterator[tuple[str, bytes, KeyRing | None]]:
    for name, how in (
        ("planes", plan_for(BF16)),
        ("plain", plan_for(PLAIN)),
        ("turned", plan_for(Layout(4, True), phase=3)),
        ("stored", stored_plan(SMALL)),
    ):
        if name != "stored":
            yield name, encoded(CONTENT, how, context=CONTEXT), None
        yield f"{name} encrypted", encoded(CONTENT, how, keys=RING, context=CONTEXT), RING


KINDS = {name: (stream, keys) for name, stream, keys in kinds()}


def sealed_again(stream: bytes, context: bytes = CONTEXT) -> bytes:
    """The stream with a checksum that matches its header and table, as a forger makes it."""
    (total,) = struct.unpack_from("<I", stream, 16)
    checksum = CPU.checksum((stream[:8], stream[16:total], context))
    return stream[:8] + struct.pack("<Q", checksum) + stream[16:]


def outcome(stream: bytes, keys: KeyRing | None) -> bytes | None:
    """What is decoded, or None where that is refused with a name."""
    try:
        return decoded(stream, len(CONTENT), keys=keys, context=CONTEXT)
    except REFUSALS:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_of_header_or_table_is_taken(kind: str) -> None:
    stream, keys = KINDS[kind]
    for position in range(read_header(stream).header_bytes):
        for bit in range(8):
            flipped = bytearray(stream)
            flipped[position] ^= 1 << bit
            assert outcome(bytes(flipped), keys) is None, (position, bit)


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_byte_of_a_chunk_is_taken(kind: str) -> None:
    stream, keys = KINDS[kind]
    for position in range(read_header(stream).header_bytes, len(stream), 7):
        flipped = bytearray(stream)
        flipped[position] ^= 0x10
        assert outcome(bytes(flipped), keys) is None, position


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_that_was_changed_and_sealed_again_never_gives_wrong_bytes(kind: str) -> None:
    stream, keys = KINDS[kind]
    for position in (*range(8), *range(16, read_header(stream).header_bytes)):
        for bit in range(8):
            forged = bytearray(stream)
            forged[position] ^= 1 << bit
            if struct.unpack_from("<I", forged, 16)[0] > len(forged):
                continue
            found = outcome(sealed_again(bytes(forged)), keys)
            if keys is not None:
                assert found in (None, CONTENT), (position, bit)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_was_cut_is_refused_wherever(kind: str) -> None:
    stream, keys = KINDS[kind]
    for length in (*range(200), *range(200, len(stream), 97), len(stream) - 1):
        assert outcome(stream[:length], keys) is None, length


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_expected_length_is_refused(kind: str) -> None:
    stream, keys = KINDS[kind]
    for length in (0, 1, len(CONTENT) - 1, len(CONTENT) + 1, len(CONTENT) + 4096):
        with pytest.raises(BadStream):
            decoded(stream, length, keys=keys, context=CONTEXT)


def test_chunks_cannot_change_places() -> None:
    content = noise(3 * 4096)
    stream = encoded(content, stored_plan(SMALL), keys=RING)
    start, size = read_header(stream).header_bytes, 4096 + 16
    first, second = stream[start : start + size], stream[start + size : start + 2 * size]
    swapped = stream[:start] + second + first + stream[start + 2 * size :]
    with pytest.raises(CopyCorrupt):
        decoded(swapped, len(content), keys=RING)


def test_a_later_version_is_told_from_a_flipped_bit() -> None:
    stream, _ = KINDS["planes"]
    later = sealed_again(MAGIC + struct.pack("<I", 2) + stream[8:])
    with pytest.raises(NewerStream):
        decoded(later, len(CONTENT), context=CONTEXT)
    with pytest.raises(NewerStream):
        read_header(later)
    assert not issubclass(NewerStream, CopyCorrupt)


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_at_all_are_refused(data: bytes) -> None:
    for stream in (data, MAGIC + data, sealed_again(*[header_with(data)])):
        with pytest.raises(REFUSALS):
            decoded(stream, 5000)


def header_with(data: bytes) -> bytes:
    """A header that is sound up to the first fields, and then whatever comes."""
    stream = MAGIC + struct.pack("<IQI", 1, 0, min(600, 20 + len(data))) + data
    return stream.ljust(600, b"\0")


@settings(deadline=None)
@given(st.data())
def test_chunks_of_any_content_with_right_checksums_are_refused_or_fit(data: st.DataObject) -> None:
    """What a forger can do who knows the format, where there is no key."""
    stream = bytearray(KINDS["planes"][0])
    header = read_header(bytes(stream))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(header.header_bytes, len(stream) - 1))
        stream[position] = data.draw(st.integers(0, 255))
    found = outcome(with_right_checksums(bytes(stream), header), None)
    assert found is None or len(found) == len(CONTENT)


def with_right_checksums(stream: bytes, header: Header) -> bytes:
    table, position = b"", header.header_bytes
    for number in range(header.chunks):
        field = stream[FIXED_BYTES + 12 * number :][:4]
        length = struct.unpack("<I", field)[0] & ~(1 << 31)
        checksum = CPU.checksum((stream[position : position + length],))
        table += field + struct.pack("<Q", checksum)
        position += length
    return sealed_again(stream[:FIXED_BYTES] + table + stream[header.header_bytes :])


def test_a_frame_that_would_grow_beyond_its_plane_is_not_inflated() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    # Magic, no single segment and a size of 4 bytes, a window of 64 MiB, 4096 bytes; then nothing.
    greedy = bytes.fromhex("28b52ffd 80 80 00100000")
    for frame in (bomb, unsized, greedy, b"", b"\x28\xb5\x2f\xfd", bomb[:20], noise(100)):
        tracemalloc.start()
        with pytest.raises(BadStream):
            CPU.decompress([Decompression(frame, page(4096))])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1 << 20


def test_a_header_that_speaks_of_a_huge_content_costs_no_memory() -> None:
    stream, _ = KINDS["planes"]
    for raw in (1 << 20, 1 << 40, (1 << 64) - 1):
        forged = sealed_again(stream[:32] + struct.pack("<Q", raw) + stream[40:])
        tracemalloc.start()
        with pytest.raises(BadStream):
            decoded(forged, 4096, context=CONTEXT)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_every_refusal_owns_its_answer(kind: str) -> None:
    stream, keys = KINDS[kind]
    broken = stream[: len(stream) // 2]
    with pytest.raises(CtxfsError) as caught:
        decode_into(memoryview(broken), page(len(CONTENT)), keys=keys, context=CONTEXT)
    assert caught.value.code
