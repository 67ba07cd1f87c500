"""Where things lie on a cold device: two superblocks, then segments of one size."""

from dataclasses import dataclass
from typing import Final

from ctxfs.errors import ConfigError

Bytes = bytes | bytearray | memoryview

ALIGN_BYTES: Final = 4096  # everything starts and ends on a multiple of this
SEGMENTS_OFFSET: Final = 1 << 20  # of the first segment; superblocks and room lie before it

SEGMENT_BYTES_MIN: Final = 1 << 20
SEGMENT_BYTES_MAX: Final = 64 << 20
SEGMENT_COUNT_MAX: Final = 1 << 22  # 256 TiB; what a part has bits for
SEGMENT_COUNT_MIN: Final = 8  # reserve, the open segment, and something to hold blocks
SEGMENT_COUNT_AIM: Final = 64  # below this, reclaiming copies too much, and tables take too much

HEADER_BYTES_MAX: Final = 256 << 10  # of one record: a block with 64 KiB attributes, or many notes


def padded(length_bytes: int) -> int:
    """`length_bytes` rounded up to whole 4096."""
    return -(-length_bytes // ALIGN_BYTES) * ALIGN_BYTES


def resembles(found: bytes, expected: bytes) -> bool:
    """Whether half of the bytes are as expected: then it was that once, and is damaged."""
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    return 2 * same >= len(expected)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one device is cut."""

    size_bytes: int
    segment_bytes: int
    segment_count: int

    @property
    def header_bytes_max(self) -> int:
        """The longest record header; small segments take shorter ones."""
        return min(HEADER_BYTES_MAX, self.segment_bytes // 4)

    @property
    def split_bytes_min(self) -> int:
        """The shortest piece a block is split into, so that no part is mostly header."""
        return max(ALIGN_BYTES, self.segment_bytes // 64)

    @property
    def content_bytes(self) -> int:
        """What a segment holds for sure, whatever the lengths of its records: its header does not
        count, nor the end of it that may be too short for the next piece."""
        return self.segment_bytes - 2 * ALIGN_BYTES - self.split_bytes_min

    def segment_offset(self, index: int) -> int:
        """Of segment `index` on the device, bytes."""
        return SEGMENTS_OFFSET + index * self.segment_bytes

    def grown(self, size_bytes: int) -> "Geometry | None":
        """The same and more segments of that size behind them; None where not one more fits."""
        fit = (size_bytes - SEGMENTS_OFFSET) // self.segment_bytes
        count = min(fit, SEGMENT_COUNT_MAX)
        if count <= self.segment_count:
            return None
        return Geometry(size_bytes, self.segment_bytes, count)

    def is_sound(self) -> bool:
        """Whether these numbers can be meant, however they were read."""
        return (
            16 * ALIGN_BYTES <= self.segment_bytes <= SEGMENT_BYTES_MAX
            and self.segment_bytes & (self.segment_bytes - 1) == 0
            and 1 <= self.segment_count <= SEGMENT_COUNT_MAX
            and self.segment_offset(self.segment_count) <= self.size_bytes
        )


def choose_geometry(size_bytes: int, segment_bytes: int | None = None) -> Geometry:
    """Cut a device of `size_bytes`: the largest segments that still give about 64 of them.

    Raises ConfigError where the device is too small.
    """
    usable = size_bytes - SEGMENTS_OFFSET
    if segment_bytes is None:
        segment_bytes = SEGMENT_BYTES_MIN
        while (
            segment_bytes < SEGMENT_BYTES_MAX and usable // (2 * segment_bytes) >= SEGMENT_COUNT_AIM
        ):
            segment_bytes *= 2
    geometry = Geometry(size_bytes, segment_bytes, min(usable // segment_bytes, SEGMENT_COUNT_MAX))
    if geometry.segment_count < SEGMENT_COUNT_MIN:
        least = (SEGMENTS_OFFSET + SEGMENT_COUNT_MIN * segment_bytes) >> 20
        raise ConfigError(f"a cold device needs at least {least} MiB, this has {size_bytes} bytes")
    return geometry
