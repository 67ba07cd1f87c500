"""Memory that the kernel reads and writes in place: mapped files, and addresses as views."""

import ctypes
import mmap
from types import TracebackType
from typing import Self

from ctxfs.device.engine import Span

ANONYMOUS = -1  # a mapping of no file
PAGE = 4096  # alignment of addresses and lengths that every device here accepts, bytes


def bytes_at(span: Span) -> memoryview:
    """The memory of `span`, writable. It keeps nothing alive: whoever made the span does."""
    array = (ctypes.c_ubyte * span.length).from_address(span.address)
    return memoryview(array).cast("B")


def zero(span: Span) -> None:
    """Fill the memory of `span` with zeros."""
    ctypes.memset(span.address, 0, span.length)


class Mapping:
    """A shared mapping of the first `size` bytes of an open file.

    The file must be at least `size` bytes long and open for reading and writing. The page that
    holds the end of the file is mapped whole: `span` reaches up to its end, `view` does not. What
    a device puts there beyond the end of the file shows to whoever maps that file, so those bytes
    have to be made zero. With `size` 0 there is one anonymous page, of no file.
    """

    def __init__(self, fd: int, size: int) -> None:
        if size < 0:
            raise ValueError(f"a mapping of {size} bytes")
        self.size = size
        self._map = mmap.mmap(fd, size) if size else mmap.mmap(-1, PAGE)
        # The ctypes object would keep the map from closing; its address does not.
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        self.view = memoryview(self._map)[:size]

    @property
    def capacity_bytes(self) -> int:
        """What `size` may be made at most, of memory of no file."""
        return len(self._map)

    def resize(self, size: int) -> None:
        """Have memory of no file count as `size` bytes, with zeros behind them; `view` is another
        one from then on.
        """
        self.view.release()
        self.size = size
        self.view = memoryview(self._map)[:size]
        zero(Span(self.address + size, self.mapped_bytes - size))

    @property
    def mapped_bytes(self) -> int:
        """`size` rounded up to whole pages, at least one."""
        return max(PAGE, -(-self.size // PAGE) * PAGE)

    def span(self, offset: int = 0, length: int | None = None) -> Span:
        """Plain memory from `offset`, a multiple of 4096; `length` is rounded up to one.

        Without a length: all from `offset` on. Raises ValueError outside of the mapped pages.
        """
        if self._map.closed:
            raise ValueError("the mapping is closed")
        if length is None:
            length = self.mapped_bytes - offset
        rounded = -(-length // PAGE) * PAGE
        if offset < 0 or offset % PAGE or length < 0 or offset + rounded > self.mapped_bytes:
            raise ValueError(f"{length} bytes at {offset} of a mapping of {self.mapped_bytes}")
        return Span(self.address + offset, rounded)

    def close(self) -> None:
        """Unmap. Raises BufferError while somebody holds a slice of `view`; safe to call twice."""
        if not self._map.closed:
            self.view.release()
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
