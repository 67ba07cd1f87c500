"""Numbers of things that are to be done at a time each, the next one first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import trio


class DueQueue:
    """Nothing is taken out: rows of what changed its mind stay, and lead nowhere."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int]] = []  # when, in which order it came, the number
        self._order = itertools.count()
        self._woken = trio.Event()

    def add(self, due_s: float, number: int) -> None:
        """Something is due then, by trio's clock."""
        heapq.heappush(self._rows, (due_s, next(self._order), number))
        self._woken.set()

    async def next(self, takes: Callable[[float, int], bool]) -> int:
        """Wait for the next number that is due. `takes` is told when it was to be, and whose row it
        is; it answers whether that still holds.
        """
        while True:
            self._woken = trio.Event()
            while self._rows and self._rows[0][0] <= trio.current_time():
                due_s, _, number = heapq.heappop(self._rows)
                if takes(due_s, number):
                    return number
            with trio.move_on_at(self._rows[0][0] if self._rows else math.inf):
                await self._woken.wait()
