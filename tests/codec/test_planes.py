"""Elements to byte planes and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfs.codec.planes import ELEMENT_BYTES, Layout, Scratch, join, split
from tests.codec.contents import BF16, bf16

LAYOUTS = [Layout(size, rotated) for size in ELEMENT_BYTES for rotated in (False, True)]


@settings(deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    content=st.binary(max_size=300),
    offset=st.integers(0, 7),
)
def test_joining_undoes_splitting_at_any_address(
    layout: Layout, content: bytes, offset: int
) -> None:
    body = content[: len(content) // layout.element_bytes * layout.element_bytes]
    source = memoryview(bytes(offset) + body)[offset:]
    target = memoryview(bytearray(offset + len(body)))[offset:]
    join(split(source, layout, Scratch()), layout, target, Scratch())
    assert target == body


@pytest.mark.parametrize("size", ELEMENT_BYTES)
def test_a_plane_holds_one_byte_of_every_element(size: int) -> None:
    content = bytes(range(size * 5))
    planes = split(memoryview(content), Layout(size, False), Scratch())
    assert [plane.tobytes() for plane in planes] == [content[n::size] for n in range(size)]


def test_rotation_brings_the_exponent_of_a_bf16_number_into_one_byte() -> None:
    content = bf16(1000)
    low, high = split(memoryview(content), BF16, Scratch())
    bits = np.frombuffer(content, "<u2")
    assert np.array_equal(high, bits >> 7 & 0xFF)
    assert np.array_equal(low, (bits & 0x7F) << 1 | bits >> 15)


def test_buffers_are_used_again() -> None:
    scratch, content = Scratch(), memoryview(bf16(4000))
    first = split(content, BF16, scratch)
    second = split(content[:2000], BF16, scratch)
    assert all(np.shares_memory(*pair) for pair in zip(first, second, strict=True))


def test_what_is_split_stays_as_it_was() -> None:
    content = bf16(1000)
    for layout in LAYOUTS:
        source = bytearray(content)
        split(memoryview(source), layout, Scratch())
        assert source == content
