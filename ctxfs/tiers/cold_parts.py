"""A part, one data record of a block on its device, as one integer."""

from typing import Final

from ctxfs.ondisk.layout import ALIGN_BYTES

_DATA_SHIFT: Final = 0  # 16 bits: pages of data
_HEADER_SHIFT: Final = 16  # 8 bits: pages of header
_POSITION_SHIFT: Final = 24  # 16 bits: pages from the start of the segment
_SEGMENT_SHIFT: Final = 40


def pack_part(segment: int, position: int, header_bytes: int, data_bytes: int) -> int:
    """All but `segment` in bytes, multiples of 4096."""
    return (
        segment << _SEGMENT_SHIFT
        | position // ALIGN_BYTES << _POSITION_SHIFT
        | header_bytes // ALIGN_BYTES << _HEADER_SHIFT
        | data_bytes // ALIGN_BYTES << _DATA_SHIFT
    )


def part_segment(part: int) -> int:
    return part >> _SEGMENT_SHIFT


def part_position(part: int) -> int:
    """Of the record in its segment, bytes."""
    return (part >> _POSITION_SHIFT & 0xFFFF) * ALIGN_BYTES


def part_header_bytes(part: int) -> int:
    return (part >> _HEADER_SHIFT & 0xFF) * ALIGN_BYTES


def part_data_bytes(part: int) -> int:
    return (part & 0xFFFF) * ALIGN_BYTES


def part_record_bytes(part: int) -> int:
    return part_header_bytes(part) + part_data_bytes(part)
