"""A part, one data record of a block on its device, as one integer."""

from typing import Final

import numpy as np
import numpy.typing as npt

from ctxfs.core.columns import U64
from ctxfs.ondisk.layout import ALIGN_BYTES

_DATA_SHIFT: Final = 0  # 15 bits: pages of data
_HEADER_SHIFT: Final = 15  # 7 bits: pages of header
_POSITION_SHIFT: Final = 22  # 14 bits: pages from the start of the segment
_SEGMENT_SHIFT: Final = 36  # 22 bits
_METHOD_SHIFT: Final = 58  # 5 bits, so that all of it fits a signed 64-bit integer
METHOD_MAX: Final = 31
_DATA_MASK: Final = 0x7FFF
_HEADER_MASK: Final = 0x7F
_SEGMENT_MASK: Final = 0x3FFFFF


def pack_part(
    segment: int, position: int, header_bytes: int, data_bytes: int, *, method: int = 0
) -> int:
    """Lengths and the position in bytes, multiples of 4096. `method`: how a codec made what is
    stored of the block (ctxfs.codec); 0: it is the content itself."""
    return (
        segment << _SEGMENT_SHIFT
        | position // ALIGN_BYTES << _POSITION_SHIFT
        | header_bytes // ALIGN_BYTES << _HEADER_SHIFT
        | data_bytes // ALIGN_BYTES << _DATA_SHIFT
        | method << _METHOD_SHIFT
    )


def part_segment(part: int) -> int:
    return part >> _SEGMENT_SHIFT & _SEGMENT_MASK


def part_method(part: int) -> int:
    """How a codec made what this is a part of; 0: it is of the content itself."""
    return part >> _METHOD_SHIFT


def part_position(part: int) -> int:
    """Of the record in its segment, bytes."""
    return (part >> _POSITION_SHIFT & 0x3FFF) * ALIGN_BYTES


def part_header_bytes(part: int) -> int:
    return (part >> _HEADER_SHIFT & _HEADER_MASK) * ALIGN_BYTES


def part_data_bytes(part: int) -> int:
    return (part & _DATA_MASK) * ALIGN_BYTES


def part_record_bytes(part: int) -> int:
    return part_header_bytes(part) + part_data_bytes(part)


def segments_of(parts: U64) -> npt.NDArray[np.intp]:
    """The segment of each."""
    return (parts >> np.uint64(_SEGMENT_SHIFT) & np.uint64(_SEGMENT_MASK)).astype(np.intp)


def count_by_segment(parts: U64) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """The segments that these parts are in, and how many bytes their records take in each."""
    header_pages = parts >> np.uint64(_HEADER_SHIFT) & np.uint64(_HEADER_MASK)
    pages = header_pages + (parts & np.uint64(_DATA_MASK))
    totals = np.bincount(segments_of(parts), pages).astype(np.int64)  # exact: far below 2**53
    found = np.flatnonzero(totals)
    return found, totals[found] * ALIGN_BYTES


def data_bytes_of(parts: U64) -> int:
    """The data in all of these."""
    return int((parts & np.uint64(_DATA_MASK)).sum()) * ALIGN_BYTES
