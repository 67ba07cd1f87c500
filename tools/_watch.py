"""What changes while one looks: rates, and which blocks are used most."""

import heapq
import time
from collections.abc import Iterator
from typing import Any

from ._common import Entry, Mount, read_story, walk

# Counter and label of each rate; those in bytes are shown as sizes.
RATES = (
    ("hits_hot", "hits hot"),
    ("hits_warm", "hits warm"),
    ("hits_cold", "hits cold"),
    ("misses", "misses"),
    ("opens", "opens"),
    ("sealed", "sealed"),
    ("read_bytes", "read"),
    ("written_bytes", "written"),
    ("promoted_bytes", "promoted"),
    ("demoted_bytes", "demoted"),
    ("evicted", "evicted"),
    ("expired", "expired"),
    ("trouble", "trouble"),
    ("corrupt", "corrupt"),
)

View = dict[str, Any]


def rates(before: View | None, now: View, seconds: float) -> dict[str, float]:
    """What the counters grew by in a second, `before` being the start where it is None.

    A daemon that restarted in between counts from nothing again: its own uptime is the time then.
    """
    if before is not None and before.get("started_at") != now.get("started_at"):
        before, seconds = None, now["uptime_s"]
    old = before["counters"] if before else {}
    seconds = max(seconds, 1e-9)
    return {
        f"{name}_per_s": (now["counters"].get(name, 0) - old.get(name, 0)) / seconds
        for name, _ in RATES
    }


class Hottest:
    """The most used blocks, found by walking the mount a little at a time.

    A walk over many blocks takes longer than an interval, so each view gets the result of the
    last walk that came to its end, and until there is one, of the first that is under way.
    """

    def __init__(self, mount: Mount, count: int) -> None:
        self._mount = mount
        self._count = count
        self._walk: Iterator[Entry] | None = None
        self._found: list[tuple[int, str, View]] = []
        self._complete: list[View] | None = None

    def advance(self, budget_s: float) -> bool:
        """Walk on for `budget_s`; True when a walk has come to its end."""
        if self._count <= 0:
            return True
        end = time.monotonic() + budget_s
        if self._walk is None:
            self._walk = walk(self._mount, "")
        for entry in self._walk:
            if not entry.is_directory:
                self._consider(entry.key)
            if time.monotonic() > end:
                return False
        self._complete = self._sorted()
        self._found = []
        self._walk = None
        return True

    def _consider(self, key: str) -> None:
        try:
            story = read_story(self._mount, key)
        except OSError:
            return  # gone meanwhile, or not ours to see
        item = (story["hits"], key, story)
        if len(self._found) < self._count:
            heapq.heappush(self._found, item)
        else:
            heapq.heappushpop(self._found, item)

    def _sorted(self) -> list[View]:
        best = sorted(self._found, key=lambda item: (-item[0], item[1]))
        return [story for _, _, story in best]

    @property
    def blocks(self) -> list[View]:
        """Stories, the most used first."""
        return self._sorted() if self._complete is None else self._complete
