"""What one measurement gives."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One measure in one place in one round. `bytes` is 0 where operations are what counts."""

    operations: int
    bytes: int
    seconds: float
    p50_us: float | None = None
    p99_us: float | None = None
    p999_us: float | None = None

    @property
    def rate(self) -> float:
        """Bytes, or else operations, per second."""
        return (self.bytes or self.operations) / self.seconds


def from_durations(
    durations_ns: list[int],
    *,
    size: int,
    seconds: float | None = None,
    operations: int | None = None,
) -> Sample:
    """A sample of operations of `size` bytes each.

    `seconds` is what all of them took together; left out, they came one after the other.
    `operations`: how many took these seconds, where they are others than those of `durations_ns`.
    """
    ordered = sorted(durations_ns)
    count = len(ordered) if operations is None else operations
    return Sample(
        operations=count,
        bytes=size * count,
        seconds=sum(ordered) / 1e9 if seconds is None else seconds,
        p50_us=statistics.median(ordered) / 1e3,
        p99_us=at(ordered, 990) / 1e3,
        p999_us=at(ordered, 999) / 1e3,
    )


def at(ordered: list[int], thousandth: int) -> int:
    """The value that so many thousandths of `ordered`, which is sorted, lie below."""
    return ordered[min(len(ordered) - 1, len(ordered) * thousandth // 1000)]
