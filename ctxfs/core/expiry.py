"""Which blocks are past their deadline."""

import bisect
import heapq
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from ctxfs.core.columns import U64
from ctxfs.core.times import NEVER

_KEPT_MAX: Final = 1 << 14  # entries; where there are more, only the earliest half is kept
_SHIFT: Final = 64
_GENERATION: Final = (1 << _SHIFT) - 1
_END_OF_TIME: Final = 2**64 - 1


class ExpiryQueue:
    """Deadlines of generations, earliest first. Changing one leaves the old entry to be skipped.

    Only those up to a *horizon* are kept here; later ones are asked for when it is reached.
    """

    def __init__(self, all_deadlines: Callable[[], tuple[U64, U64]]) -> None:
        """`all_deadlines` returns generations, and the deadline of each or NEVER."""
        self._all_deadlines = all_deadlines
        self._heap: list[int] = []  # deadline << 64 | generation
        self._limit = _KEPT_MAX
        self._horizon_ns = _END_OF_TIME
        # Invariant: a generation with deadline d, NEVER < d <= _horizon_ns, has an entry of d in
        # _heap, unless that was taken. There is none later only if _horizon_ns == _END_OF_TIME.

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, generation: int, deadline_ns: int) -> bool:
        """Remember a deadline; whether it is the earliest now. NEVER needs no entry: the old one
        no longer matches."""
        if deadline_ns == NEVER or deadline_ns > self._horizon_ns:
            return False
        entry = deadline_ns << _SHIFT | generation
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._cut()
        return self._heap[0] == entry

    def look_again(self) -> None:
        """Deadlines are others than was said, of any number of generations."""
        self._heap.clear()
        self._horizon_ns = NEVER

    def next_deadline_ns(self) -> int | None:
        """Return the earliest deadline, perhaps one that was changed since; None when empty."""
        return self._heap[0] >> _SHIFT if self._heap or self._look_further() else None

    def due(self, now_ns: int, deadline_of: Callable[[int], int]) -> Iterator[int]:
        """Take and yield the generations whose current deadline is not after `now_ns`."""
        while self._heap or self._look_further():
            if self._heap[0] >> _SHIFT > now_ns:
                break
            entry = heapq.heappop(self._heap)
            if deadline_of(entry & _GENERATION) == entry >> _SHIFT:
                yield entry & _GENERATION

    def _cut(self) -> None:
        """Forget the later half, but for what has the same deadline as one that is kept."""
        self._heap.sort()
        self._horizon_ns = self._heap[len(self._heap) // 2] >> _SHIFT
        del self._heap[bisect.bisect_left(self._heap, (self._horizon_ns + 1) << _SHIFT) :]
        self._limit = max(_KEPT_MAX, 2 * len(self._heap))

    def _look_further(self) -> bool:
        """Move the horizon, where nothing is left before it; whether something is now."""
        if self._horizon_ns == _END_OF_TIME:
            return False
        generations, deadlines = self._all_deadlines()
        later = np.flatnonzero(deadlines > np.uint64(self._horizon_ns))
        self._horizon_ns = _END_OF_TIME
        if len(later) > _KEPT_MAX // 2:
            last = _KEPT_MAX // 2 - 1
            self._horizon_ns = int(np.partition(deadlines[later], last)[last])
            later = later[deadlines[later] <= np.uint64(self._horizon_ns)]
        pairs = zip(generations[later].tolist(), deadlines[later].tolist(), strict=True)
        self._heap = sorted(deadline << _SHIFT | generation for generation, deadline in pairs)
        self._limit = max(_KEPT_MAX, 2 * len(self._heap))
        return bool(self._heap)
