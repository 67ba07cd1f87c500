"""The shape of everything that reads and writes a block device or a preallocated file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Span:
    """Plain memory: `address` and `length` in bytes.

    Whoever makes a span keeps the memory mapped until the call that took it has returned, also
    when that call is cancelled: an engine waits for the kernel to let go before it raises.
    """

    address: int
    length: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters since start."""

    reads: int
    writes: int
    syncs: int
    read_bytes: int
    written_bytes: int
    errors: int
    inflight: int


class Engine(Protocol):
    """Direct I/O on one open device. Offsets, addresses and lengths are multiples of `alignment`.

    Raises DeviceError when the medium fails, DeviceLost when it is gone. A short transfer is
    never success: the rest is transferred or an error is raised.
    """

    name: str  # "io_uring", "nvme" or "threads"
    size_bytes: int
    alignment: int  # of offsets, lengths and addresses, bytes

    async def read(self, offset: int, target: Span) -> None: ...

    async def write(self, offset: int, sources: Sequence[Span]) -> None: ...

    async def sync(self) -> None:
        """Return when everything whose write has returned is on the medium."""
        ...

    def statistics(self) -> EngineStatistics: ...

    def grow(self, size_bytes: int) -> None:
        """The device is larger than it was: requests may go up to there from now on."""
        ...

    def close(self) -> None: ...
