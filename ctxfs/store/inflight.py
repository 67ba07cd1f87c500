"""A bound on bytes that are on their way at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class InFlight:
    """At most `bytes_max`, or one that is larger by itself; in the order of asking."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.now_bytes = 0
        self._turn = trio.StrictFIFOLock()
        self._less = trio.Event()

    @asynccontextmanager
    async def of(self, length_bytes: int) -> AsyncIterator[None]:
        """Wait until there is room for so many, and hold it."""
        async with self._turn:
            while self.now_bytes and self.now_bytes + length_bytes > self.bytes_max:
                self._less = trio.Event()
                await self._less.wait()
            self.now_bytes += length_bytes
        try:
            yield
        finally:
            self.now_bytes -= length_bytes
            self._less.set()
