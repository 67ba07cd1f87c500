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


class _Entry:
    """One event; most are never read, and making a line takes longer than what it tells of."""

    __slots__ = ("_facts", "_kind", "_line", "_wall_ns", "number")

    def __init__(self, number: int, kind: str, wall_ns: int, facts: dict[str, Any]) -> None:
        self.number = number
        self._kind = kind
        self._wall_ns = wall_ns
        self._facts = facts
        self._line = b""

    def as_line(self) -> bytes:
        if not self._line:
            record = {"time": utc_text(self._wall_ns), "event": self._kind, **self._facts}
            text = json.dumps(record, ensure_ascii=True, separators=(", ", ": "))
            self._line = text.encode() + b"\n"
            self._facts = {}
        return self._line


class Events:
    """JSON lines. A watcher that reads too slowly misses lines; it never holds anybody up."""

    def __init__(self, kept_max: int) -> None:
        self._recent: deque[_Entry] = deque(maxlen=max(1, kept_max))
        self._numbers = itertools.count(1)
        self._arrived = trio.Event()

    def emit(self, kind: str, wall_ns: int, **facts: Any) -> None:
        """Add one line: `{"time", "event", ...facts}`."""
        self._recent.append(_Entry(next(self._numbers), kind, wall_ns, facts))
        self._arrived.set()
        self._arrived = trio.Event()

    def recent(self) -> bytes:
        """Return the lines still remembered."""
        return b"".join(entry.as_line() for entry in self._recent)

    def after(self, number: int) -> tuple[int, bytes]:
        """Return the lines later than `number`, and the number of the last of them."""
        newest_first = itertools.takewhile(
            lambda each: each.number > number, reversed(self._recent)
        )
        entries = list(newest_first)[::-1]
        last = entries[-1].number if entries else number
        return last, b"".join(entry.as_line() for entry in entries)

    async def wait_after(self, number: int) -> tuple[int, bytes]:
        """Like `after`, but wait until there is at least one."""
        while True:
            last, lines = self.after(number)
            if lines:
                return last, lines
            await self._arrived.wait()
