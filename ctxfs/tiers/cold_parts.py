"""A part, one data record of a block on its device, as one integer."""

from typing import Final

from ctxfs.ondisk.layout import ALIGN_BYTES

_DATA_SHIFT: Final = 0  # 16 bits: pages of data
_HEADER_SHIFT: Final = 16  # 8 bits: pages of header
_POSITION_SHIFT: Final = 24  # 16 bits: pages from the start of the segment
_SEGMENT_SHIFT: Final = 40  # 22 bits
_ENCODED: Final = 1 << 62


def pack_part(
    segment: int, position: int, header_bytes: int, data_bytes: int, *, encoded: bool = False
) -> int:
    """All but `segment` in bytes, multiples of 4096. `encoded`: of a block that is stored so."""
    return (
        segment << _SEGMENT_SHIFT
        | position // ALIGN_BYTES << _POSITION_SHIFT
        | header_bytes // ALIGN_BYTES << _HEADER_SHIFT
        | data_bytes // ALIGN_BYTES << _DATA_SHIFT
        | (_ENCODED if encoded else 0)
    )


def part_segment(part: int) -> int:
    return part >> _SEGMENT_SHIFT & 0x3FFFFF


def part_is_encoded(part: int) -> bool:
    """Whether it is a part of what a codec made of the block, not of its content."""
    return bool(part & _ENCODED)


def part_position(part: int) -> int:
    """Of the record in its segment, bytes."""
    return (part >> _POSITION_SHIFT & 0xFFFF) * ALIGN_BYTES


def part_header_bytes(part: int) -> int:
    return (part >> _HEADER_SHIFT & 0xFF) * ALIGN_BYTES


def part_data_bytes(part: int) -> int:
    return (part & 0xFFFF) * ALIGN_BYTES


def part_record_bytes(part: int) -> int:
    return part_header_bytes(part) + part_data_bytes(part)
