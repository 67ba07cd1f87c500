"""How long it takes until a member in trouble is avoided, and what that costs readers elsewhere.

The first is in the members' own logs: `x is not asked, N ms after its first missed deadline: why`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Final

LATE_S: Final = 1.0  # what began is noticed so long after its end, too
_LINE: Final = re.compile(
    r"^(\S+ \S+) \w+ ctxfs\.device\.peer: (\w+) is "
    r"(?:(asked from now on)|not asked, (\d+) ms after its first missed deadline)"
)


@dataclass
class Trouble:
    """One trouble: whom it concerns. Times are seconds since 1970; it lasts until `end`."""

    kind: str
    what: str
    members: frozenset[str]
    begin: float
    end: float = math.inf

    def is_on(self, begin: float, end: float) -> bool:
        """Whether it was going on at any time between."""
        return self.begin <= end and begin <= self.end + LATE_S

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Who is to avoid whom."""
        if self.kind.startswith("cut"):
            one, other = self.members
            yield from ((one, other), (other, one))
            return
        for name in names:
            yield from ((name, each) for each in self.members if name not in self.members)


@dataclass(frozen=True)
class Change:
    """A member begins to avoid another one, or ends it. `late_ms`: after the missed deadline."""

    time: float
    avoids: bool
    late_ms: int


@dataclass(frozen=True)
class SlowRead:
    """What a client on a member waited for."""

    member: str
    begin: float
    end: float


@dataclass
class _Row:
    count: int = 0
    pairs: int = 0
    detected: list[float] = field(default_factory=list)
    late_ms: list[int] = field(default_factory=list)
    longest_read: float = 0.0


def changes(log: str) -> dict[str, list[Change]]:
    """What one member's log says of each other one, in the order of time."""
    found: dict[str, list[Change]] = defaultdict(list)
    for line in log.splitlines():
        if (match := _LINE.match(line)) is not None:
            when, name, asked, late_ms = match.groups()
            time = datetime.fromisoformat(when).timestamp()
            found[name].append(Change(time, asked is None, int(late_ms or 0)))
    return found


def table(
    names: Iterable[str],
    troubles: list[Trouble],
    logs: Mapping[str, str],
    reads: Iterable[SlowRead],
) -> str:
    """One line for each kind of trouble."""
    seen = {name: changes(log) for name, log in logs.items()}
    rows: dict[str, _Row] = defaultdict(_Row)
    for trouble in troubles:
        rows[trouble.kind].count += 1
        for pair in trouble.pairs(names):
            _add_detection(rows[trouble.kind], trouble, pair, troubles, seen)
    for read in reads:
        for trouble in troubles:
            if _is_due_to(read, trouble, troubles):
                row = rows[trouble.kind]
                row.longest_read = max(row.longest_read, read.end - read.begin)
    head = (
        f"{'kind':14}{'times':>6}{'pairs':>6}{'avoided':>9}{'median s':>10}{'worst s':>9}"
        f"{'worst ms after a missed deadline':>34}{'longest read s':>16}"
    )
    return "\n".join([head, *(_line(kind, rows[kind]) for kind in sorted(rows))])


def _line(kind: str, row: _Row) -> str:
    median_s = f"{median(row.detected):.3f}" if row.detected else "-"
    worst_s = f"{max(row.detected):.3f}" if row.detected else "-"
    late = str(max(row.late_ms)) if row.late_ms else "-"
    return (
        f"{kind:14}{row.count:6}{row.pairs:6}{len(row.detected):9}{median_s:>10}{worst_s:>9}"
        f"{late:>34}{row.longest_read:16.3f}"
    )


def _add_detection(
    row: _Row,
    trouble: Trouble,
    pair: tuple[str, str],
    troubles: list[Trouble],
    seen: Mapping[str, Mapping[str, list[Change]]],
) -> None:
    """Only where nothing else was the matter with either, and it was not avoided already."""
    who, whom = pair
    history = seen.get(who, {}).get(whom, [])
    before = [each for each in history if each.time < trouble.begin - 0.001]
    if not before or before[-1].avoids:
        return
    until = trouble.end + LATE_S
    after = [each for each in history if trouble.begin - 0.001 <= each.time <= until]
    noticed = next((each for each in after if each.avoids), None)
    at = noticed.time if noticed is not None else until
    if any(_concerns(other, pair) for other in troubles
           if other is not trouble and other.is_on(trouble.begin, at)):  # fmt: skip
        return
    row.pairs += 1
    if noticed is not None:
        row.detected.append(max(0.0, noticed.time - trouble.begin))
        row.late_ms.append(noticed.late_ms)


def _concerns(trouble: Trouble, pair: tuple[str, str]) -> bool:
    if trouble.kind.startswith("cut"):
        return trouble.members == set(pair)
    return bool(trouble.members & set(pair))


def _is_due_to(read: SlowRead, trouble: Trouble, troubles: list[Trouble]) -> bool:
    """Whether a reader that was well itself may have waited for a member in this trouble."""
    if not trouble.is_on(read.begin, read.end):
        return False
    is_cut = trouble.kind.startswith("cut")
    if is_cut != (read.member in trouble.members):
        return False
    return not any(
        other.is_on(read.begin, read.end) and read.member in other.members
        for other in troubles
        if other is not trouble
    )
