"""Mapped memory."""

import os
from pathlib import Path

import pytest

from ctxfs.device.engine import Span
from ctxfs.device.mapping import Mapping, bytes_at


@pytest.fixture
def fd(tmp_path: Path) -> int:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 3000)  # 9000 bytes: three pages, the last one not full
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def test_what_is_written_through_the_mapping_is_in_the_file(fd: int) -> None:
    with Mapping(fd, 9000) as mapping:
        mapping.view[1:4] = b"XYZ"
        assert len(mapping.view) == 9000
    assert os.pread(fd, 5, 0) == b"aXYZb"
    os.close(fd)


def test_spans_are_whole_pages_up_to_the_end_of_the_last_one(fd: int) -> None:
    with Mapping(fd, 9000) as mapping:
        assert mapping.span() == Span(mapping.address, 12288)
        assert mapping.span(4096) == Span(mapping.address + 4096, 8192)
        assert mapping.span(8192, 808) == Span(mapping.address + 8192, 4096)
        assert mapping.span(0, 0).length == 0
        assert mapping.address % 4096 == 0
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "length"), [(1, None), (-4096, 4096), (0, 12289), (12288, 1), (0, -1), (16384, None)]
)
def test_spans_outside_of_the_mapping_are_refused(fd: int, offset: int, length: int | None) -> None:
    with Mapping(fd, 9000) as mapping, pytest.raises(ValueError, match="mapping"):
        mapping.span(offset, length)
    os.close(fd)


def test_the_descriptor_may_be_closed_while_mapped(fd: int) -> None:
    mapping = Mapping(fd, 9000)
    os.close(fd)
    assert bytes(mapping.view[:3]) == b"abc"
    mapping.close()


def test_an_empty_file_maps_to_one_anonymous_page(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    with Mapping(fd, 0) as mapping:
        assert len(mapping.view) == 0
        bytes_at(mapping.span())[:] = bytes(4096)
    os.close(fd)
    assert path.stat().st_size == 0


def test_bytes_at_a_span_are_the_mapped_ones(fd: int) -> None:
    with Mapping(fd, 9000) as mapping:
        view = bytes_at(mapping.span(4096, 4096))
        view[:2] = b"!!"
        assert bytes(mapping.view[4096:4098]) == b"!!"
        assert view.format == "B"
        assert len(view) == 4096
    os.close(fd)


def test_nothing_is_unmapped_while_a_slice_of_the_view_is_held(fd: int) -> None:
    mapping = Mapping(fd, 9000)
    part = mapping.view[:10]
    with pytest.raises(BufferError):
        mapping.close()
    assert bytes(part[:3]) == b"abc"
    part.release()
    mapping.close()
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.span()
    os.close(fd)


def test_a_mapping_longer_than_the_file_is_refused(fd: int) -> None:
    with pytest.raises(ValueError, match="greater than file size"):
        Mapping(fd, 20000)
    with pytest.raises(ValueError, match="-1 bytes"):
        Mapping(fd, -1)
    os.close(fd)
