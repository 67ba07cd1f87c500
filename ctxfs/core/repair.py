"""Who pushes what to whom after members came or went, and how fast. Pure; docs/cluster.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ctxfs.core.placement import CELLS_MAX, NOBODY, U64, Placement

Matrix = NDArray[np.bool_]
I32 = NDArray[np.int32]
I16 = NDArray[np.int16]
SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pushes:
    """Columns of what is to be sent: a row of the batch, who sends it, to whom.

    Members are indexes of the placement's names. `lost`: keys of the batch that nobody holds.
    """

    row: I32
    source: I16
    target: I16
    lost: int = 0

    def __len__(self) -> int:
        return len(self.row)

    def of(self, source: int) -> Pushes:
        """Those that one member carries out."""
        mine = self.source == source
        return Pushes(self.row[mine], self.source[mine], self.target[mine])


def presumed(hashes: U64, before: Placement, after: Placement, replicas: int) -> Matrix:
    """Who holds keys as far as placement tells: those of the homes before that are still there.

    (keys, members of `after`). What is known better is put into it: the own column, mostly.
    """
    holds = np.zeros((len(hashes), len(after.names)), np.bool_)
    numbers = [after.index(name) for name in before.names]
    # One more, for NOBODY, which is the last.
    translated = np.array([*(NOBODY if n is None else n for n in numbers), NOBODY])
    for column in translated[before.homes_of(hashes, replicas)].T:
        rows = np.flatnonzero(column != NOBODY)
        holds[rows, column[rows]] = True
    return holds


def plan(hashes: U64, holds: Matrix, after: Placement, replicas: int) -> Pushes:
    """For each home that lacks a key, one holder that sends it.

    `holds`: (keys, members of `after`). The source is the cheapest holder in the home's zone,
    else the cheapest of all: who plans with the same knowledge plans the same.
    """
    if not after.names or not len(hashes):
        return _pushes([], lost=len(hashes))
    parts, lost = [], 0
    step = max(1, CELLS_MAX // len(after.names))
    for at in range(0, len(hashes), step):
        some, held = hashes[at : at + step], holds[at : at + step]
        anywhere = held.any(axis=1)
        lost += len(some) - int(np.count_nonzero(anywhere))
        homes = after.homes_of(some, replicas)
        costs = np.where(held, after.costs(some), np.inf)
        zone_of = np.array(after.zone_of)
        for target in homes.T:
            there = held[np.arange(len(some)), target] | (target == NOBODY)
            rows = np.flatnonzero(anywhere & ~there)
            source = _sources(costs[rows], zone_of, target[rows])
            parts.append((rows + at, source, target[rows]))
    return _pushes(parts, lost)


def _sources(costs: NDArray[np.float64], zone_of: NDArray[np.int_], target: I16) -> I16:
    """The cheapest holder of each row; infinite costs are those of members that hold nothing."""
    nearby = np.where(zone_of[None, :] == zone_of[target][:, None], costs, np.inf)
    has_near = np.isfinite(nearby).any(axis=1)
    chosen = np.where(has_near, nearby.argmin(axis=1), costs.argmin(axis=1))
    sources: I16 = chosen.astype(np.int16)
    return sources


def _pushes(parts: list[tuple[NDArray[np.int_], I16, I16]], lost: int) -> Pushes:
    rows, sources, targets = zip(*parts, strict=True) if parts else ((), (), ())
    empty = np.zeros(0, np.int16)
    row = np.concatenate([empty, *rows]).astype(np.int32)
    order = np.argsort(row, kind="stable")
    return Pushes(
        row[order],
        np.concatenate([empty, *sources])[order],
        np.concatenate([empty, *targets])[order],
        lost,
    )


class TokenBucket:
    """So many bytes a second, in bursts of at most `burst_bytes`. Time is given, and monotonic."""

    def __init__(self, bytes_per_s: int, burst_bytes: int, now_ns: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = burst_bytes
        self._left: float = burst_bytes
        self._seen_ns = now_ns

    def take(self, length_bytes: int, now_ns: int) -> int:
        """Take so many; returns for how many nanoseconds the caller waits before it sends them.

        More than a burst may be taken: what is owed is waited for by this caller or the next.
        """
        passed_ns = max(0, now_ns - self._seen_ns)
        self._seen_ns = max(self._seen_ns, now_ns)
        gained = passed_ns * self.bytes_per_s / SECOND_NS
        self._left = min(self.burst_bytes, self._left + gained) - length_bytes
        if self._left >= 0:
            return 0
        return int(-self._left * SECOND_NS / self.bytes_per_s) + 1

    def give_back(self, length_bytes: int) -> None:
        """So many of those that were taken were not sent."""
        self._left = min(self.burst_bytes, self._left + length_bytes)
