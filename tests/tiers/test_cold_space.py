"""Room in segments, the choice of victims, and parts that make a block: plain functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.ondisk.layout import choose_geometry
from ctxfs.tiers.cold_found import FoundPart, tile
from ctxfs.tiers.cold_parts import (
    METHOD_MAX,
    pack_part,
    part_data_bytes,
    part_header_bytes,
    part_method,
    part_position,
    part_record_bytes,
    part_segment,
)
from ctxfs.tiers.cold_space import Segment, SegmentState, Space, choose_victims


def _closed(index: int, live_bytes: int, *, unreadable: bool = False) -> Segment:
    return Segment(index, state=SegmentState.CLOSED, live_bytes=live_bytes, unreadable=unreadable)


def test_victim_is_the_one_with_least_in_it() -> None:
    segments = [_closed(0, 500), _closed(1, 300), _closed(2, 400), Segment(3)]
    assert choose_victims(segments, 1000) == [segments[1]]


def test_all_empty_segments_are_victims_at_once() -> None:
    segments = [_closed(0, 500), _closed(1, 0), _closed(2, 0, unreadable=True)]
    assert choose_victims(segments, 1000) == segments[1:]


def test_there_is_no_victim_without_a_gain() -> None:
    assert choose_victims([_closed(0, 500), _closed(1, 600)], 499) == []
    assert choose_victims([_closed(0, 5, unreadable=True)], 499) == []
    assert choose_victims([Segment(0, state=SegmentState.RETIRING)], 499) == []


@given(
    st.integers(0, 2**22 - 1),
    st.integers(0, 16383),
    st.integers(1, 64),
    st.integers(0, 16384),
    st.integers(0, METHOD_MAX),
)
def test_part_keeps_its_numbers(
    segment: int, position: int, header: int, data: int, method: int
) -> None:
    part = pack_part(segment, position * 4096, header * 4096, data * 4096, method=method)
    assert part_method(part) == method
    assert 0 <= part < 2**63
    assert part_segment(part) == segment
    assert part_position(part) == position * 4096
    assert part_header_bytes(part) == header * 4096
    assert part_data_bytes(part) == data * 4096
    assert part_record_bytes(part) == (header + data) * 4096


def test_last_free_segment_is_for_carrying() -> None:
    space = Space(choose_geometry(9 << 20))
    for sequence in range(7):
        assert space.open_next(sequence, 1) is not None
    assert space.open_next(8, 1) is None
    assert space.open_next(8, 0) is not None
    assert space.open_next(9, 0) is None


@given(st.lists(st.integers(0, 3 << 20), max_size=12), st.sampled_from([4096, 8192, 200 << 10]))
def test_what_is_promised_always_fits(sizes: list[int], header_bytes: int) -> None:
    """Place blocks as the writer does: ready room never falls by more than their cost."""
    space = Space(choose_geometry(33 << 20))
    for size in sizes:
        data_bytes = -(-size // 4096) * 4096
        cost = space.cost_bytes(header_bytes, data_bytes)
        before = space.ready_bytes(0)
        if cost > before:
            break
        left, first = data_bytes, True
        while left or first:
            first = False
            if space.rest_bytes < header_bytes + min(left, space.geometry.split_bytes_min):
                assert space.open_next(1, 0) is not None
            taken = min(left, space.rest_bytes - header_bytes)
            assert space.open is not None
            space.open.used_bytes += header_bytes + taken
            left -= taken
        assert space.ready_bytes(0) >= before - cost


def _part(offset: int, length: int, stamp: int = 1) -> FoundPart:
    return FoundPart(offset, length, stamp, 0, stamp)


@pytest.mark.parametrize(
    ("parts", "size", "chosen"),
    [
        ([_part(0, 0)], 0, [(0, 0)]),
        ([], 0, None),
        ([_part(0, 10)], 10, [(0, 10)]),
        ([_part(10, 5), _part(0, 10)], 15, [(0, 10), (10, 5)]),
        ([_part(0, 10), _part(11, 4)], 15, None),
        ([_part(0, 10)], 15, None),
        ([_part(0, 10), _part(0, 6, 2), _part(10, 5)], 15, [(0, 10), (10, 5)]),
        ([_part(0, 10), _part(0, 6, 2), _part(6, 4, 2)], 10, [(0, 6), (6, 4)]),
        ([_part(5, 5)], 10, None),
    ],
)
def test_parts_tile_a_block(
    parts: list[FoundPart], size: int, chosen: list[tuple[int, int]] | None
) -> None:
    found = tile(parts, size)
    assert (found and [(part.offset, part.length) for part in found]) == chosen
