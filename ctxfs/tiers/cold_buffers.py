"""Memory for headers and for carrying over, aligned as direct I/O wants it."""

import contextlib
import ctypes
import mmap
from typing import Final

import trio

from ctxfs.device.engine import Span
from ctxfs.device.mapping import bytes_at
from ctxfs.ondisk.record import DataSum, RecordHeader

# Below this a checksum takes less time than the way to a thread and back.
_INLINE_BYTES_MAX: Final = 256 << 10


class Scratch:
    """Anonymous memory, zero at first, unmapped when the last view of it is gone.

    `huge`: it will be filled from the start on, so it may come in huge pages.
    """

    def __init__(self, length_bytes: int, *, huge: bool = False) -> None:
        self.length_bytes = length_bytes
        self._map = mmap.mmap(-1, length_bytes)
        if huge:
            # A kernel without huge pages says so; nothing depends on them.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        self.view = memoryview(self._map)

    def span(self, offset: int, length_bytes: int) -> Span:
        if not 0 <= offset <= offset + length_bytes <= self.length_bytes:
            raise ValueError("outside of this scratch memory")
        return Span(self._address + offset, length_bytes)


def slice_span(span: Span, offset: int, length_bytes: int) -> Span:
    """A piece of a span."""
    return Span(span.address + offset, length_bytes)


async def checksum(span: Span, *, by_digest: bool = False) -> int:
    """XXH3-64 of the memory, or as a record `by_digest` has it; in a thread where it is long."""
    found = DataSum(by_digest=by_digest)
    if span.length > _INLINE_BYTES_MAX:
        await trio.to_thread.run_sync(found.update, bytes_at(span))
    elif span.length:
        found.update(bytes_at(span))
    return found.value()


async def is_whole(data: Span, header: RecordHeader) -> bool:
    """Whether a record's data is what its checksum says."""
    checked = Span(data.address, header.checked_bytes)
    return await checksum(checked, by_digest=header.by_digest) == header.data_checksum
