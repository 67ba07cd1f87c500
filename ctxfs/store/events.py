"""What happened, for those who watch: one bounded channel upwards, and a short memory."""

from __future__ import annotations

import itertools
import json
from collections import deque
from datetime import UTC, datetime
from typing import Any

import trio


def utc_text(wall_ns: int) -> str:
    """Return a wall-clock time as ISO 8601 in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Events:
    """JSON lines. A watcher that reads too slowly misses lines; it never holds anybody up."""

    def __init__(self, kept_max: int) -> None:
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=max(1, kept_max))
        self._numbers = itertools.count(1)
        self._arrived = trio.Event()

    def emit(self, kind: str, wall_ns: int, **facts: Any) -> None:
        """Add one line: `{"time", "event", ...facts}`."""
        record = {"time": utc_text(wall_ns), "event": kind, **facts}
        line = json.dumps(record, ensure_ascii=True, separators=(", ", ": ")).encode() + b"\n"
        self._recent.append((next(self._numbers), line))
        self._arrived.set()
        self._arrived = trio.Event()

    def recent(self) -> bytes:
        """Return the lines still remembered."""
        return b"".join(line for _, line in self._recent)

    def after(self, number: int) -> tuple[int, bytes]:
        """Return the lines later than `number`, and the number of the last of them."""
        lines = [entry for entry in self._recent if entry[0] > number]
        return (lines[-1][0], b"".join(line for _, line in lines)) if lines else (number, b"")

    async def wait_after(self, number: int) -> tuple[int, bytes]:
        """Like `after`, but wait until there is at least one."""
        while True:
            last, lines = self.after(number)
            if lines:
                return last, lines
            await self._arrived.wait()
