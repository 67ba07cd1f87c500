"""Which blocks are past their deadline."""

import heapq
from collections.abc import Callable, Iterator

from ctxfs.core.times import NEVER


class ExpiryQueue:
    """Deadlines of generations, earliest first. Changing one leaves the old entry to be skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # (deadline, generation)
        # Invariant: a generation with deadline d != NEVER has an entry (d, generation) in _heap.

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, generation: int, deadline_ns: int) -> None:
        """Remember a deadline. NEVER needs no entry: the old one no longer matches."""
        if deadline_ns != NEVER:
            heapq.heappush(self._heap, (deadline_ns, generation))

    def next_deadline_ns(self) -> int | None:
        """Return the earliest deadline, perhaps one that was changed since; None when empty."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ns: int, deadline_of: Callable[[int], int]) -> Iterator[int]:
        """Take and yield the generations whose current deadline is not after `now_ns`."""
        while self._heap and self._heap[0][0] <= now_ns:
            deadline, generation = heapq.heappop(self._heap)
            if deadline_of(generation) == deadline:
                yield generation

    def compact(self, deadline_of: Callable[[int], int]) -> None:
        """Forget entries that no longer match."""
        self._heap = sorted({e for e in self._heap if deadline_of(e[1]) == e[0]})
