"""Anonymous memory that is used again.

The first touch of a fresh page costs more than filling it, several times so in a virtual machine
whose host has to find the page first: 4 ms for 2 MiB where copying takes a tenth of that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ctxfs.device.mapping import ANONYMOUS, PAGE, Mapping

KEPT_BYTES_MAX: Final = 32 << 20
_WASTE_MAX: Final = 2  # times what is asked for: a piece larger than that is left for others


class MemoryPool:
    """Pieces that nobody uses are kept, up to a sum. Safe in threads, as long as each piece has
    one user."""

    def __init__(self, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._unused: list[Mapping] = []  # the one used last comes last: its pages may be in caches

    def take(self, size: int) -> Mapping:
        """Memory of `size` bytes with anything in it, and zeros from there to the end of the page.

        To be given back, or closed.
        """
        pages = max(PAGE, -(-size // PAGE) * PAGE)
        for mapping in reversed(self._unused):
            if pages <= mapping.capacity_bytes <= _WASTE_MAX * pages:
                try:
                    self._unused.remove(mapping)
                except ValueError:
                    continue  # another thread was quicker
                break
        else:
            mapping = Mapping(ANONYMOUS, pages)
        mapping.resize(size)
        return mapping

    def give_back(self, mapping: Mapping) -> None:
        """Whatever is left of slices of its view must not be used any more."""
        mapping.resize(0)
        self._unused.append(mapping)
        while sum(each.capacity_bytes for each in self._unused) > self._kept_bytes_max:
            self._unused.pop(0).close()

    @contextmanager
    def memory(self, size: int) -> Iterator[Mapping]:
        """As `take`, for as long as the `with` lasts."""
        mapping = self.take(size)
        try:
            yield mapping
        finally:
            self.give_back(mapping)


POOL: Final = MemoryPool()
