"""What was deleted, and whose copies can be believed. Pure; docs/cluster.md has the argument.

Each member makes tombstones with versions of its own, so a tombstone's version says who made it
(its origin) and in which order. For each origin, `known` is the version up to which we have had all
of its tombstones, and `forgotten` the highest version of those that were dropped again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from ctxfs.core.versions import slot_of

ENTRIES_MAX: Final = 1 << 18  # about 300 bytes each, and the key
STALE_MIN: Final = 1024  # rows of an index that lead nowhere and are not worth a rebuild

Vector = Mapping[int, int]  # by slot: a version


class Tombstone(NamedTuple):
    """All versions of `key` up to `version` are dead; kept until this wall-clock time."""

    key: bytes
    version: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What one member answers another that told what it knows."""

    tombstones: tuple[Tombstone, ...]
    known: Vector
    forgotten: Vector

    @property
    def highest(self) -> int:
        """The highest version in it: whoever merges it issues none that is not above."""
        told = (each.version for each in self.tombstones)
        return max((*told, *self.known.values(), *self.forgotten.values()), default=0)


@dataclass(frozen=True, slots=True)
class Merged:
    """What a listing taught.

    `dead`: tombstones that are new here; copies that they beat are to be dropped.
    `doubt_version`: copies up to this version are in doubt; 0: none is. One is good again if
    `may_accept` takes the very same version from a member that holds it.
    """

    dead: tuple[Tombstone, ...]
    doubt_version: int


class Tombstones:
    """The table of one member. At most one tombstone a key, the newest.

    Invariant: whatever this member's `known` covers, it holds no copy that it beats.
    """

    def __init__(self, slot: int, entries_max: int = ENTRIES_MAX) -> None:
        self.slot = slot
        self.entries_max = entries_max
        self.known: dict[int, int] = {}
        self.forgotten: dict[int, int] = {}
        self._by_key: dict[bytes, Tombstone] = {}
        # By origin (version, key), sorted; and by end. Rows of what was replaced stay a while.
        self._by_origin: dict[int, list[tuple[int, bytes]]] = {}
        self._ends: list[tuple[int, int, bytes]] = []
        self._indexed = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Tombstone]:
        return iter(self._by_key.values())

    def beats(self, key: bytes, version: int) -> bool:
        """Whether this version of the key is dead."""
        found = self._by_key.get(key)
        return found is not None and version <= found.version

    @property
    def highest(self) -> int:
        """The highest version in it, or that it knows of."""
        return self.snapshot().highest

    def get(self, key: bytes) -> Tombstone | None:
        """The tombstone of a key."""
        return self._by_key.get(key)

    def page(self, after_version: int, count: int) -> list[Tombstone]:
        """The `count` of all with the lowest versions above that one, in the order of versions."""
        rows = heapq.merge(
            *(
                islice(rows, bisect_left(rows, (after_version + 1, b"")), None)
                for rows in self._by_origin.values()
            )
        )
        current = (self._by_key[key] for version, key in rows if self._is_current(version, key))
        return list(islice(current, count))

    def bury(self, key: bytes, version: int, until_ns: int) -> Tombstone:
        """A key is deleted here. `version` is new, and the highest that this member issued.

        The tombstone must be written down before it is told to anybody.
        """
        if slot_of(version) != self.slot or version <= self.known.get(self.slot, 0):
            raise ValueError(f"{version} is no new version of slot {self.slot}")
        tombstone = Tombstone(key, version, until_ns)
        self.known[self.slot] = version
        self._add(tombstone)
        return tombstone

    def hear(self, tombstone: Tombstone) -> bool:
        """Another member tells of one; whether it is new here. Others may have been missed."""
        return self._add(tombstone)

    def since(self, known: Vector) -> Listing:
        """What is to be told to a member that knows so much."""
        missing = [
            self._by_key[key]
            for origin, rows in self._by_origin.items()
            for version, key in rows[bisect_left(rows, (known.get(origin, 0) + 1, b"")) :]
            if self._is_current(version, key)
        ]
        return Listing(tuple(missing), dict(self.known), dict(self.forgotten))

    def merge(self, listing: Listing) -> Merged:
        """Learn what another member answered to our `known`, as it was in this life.

        The clock must have seen `listing.highest` before.
        """
        missed = [
            version
            for origin, version in listing.forgotten.items()
            if version > self.known.get(origin, 0)
        ]
        dead = tuple(each for each in listing.tombstones if self._add(each))
        for origin, version in listing.forgotten.items():
            _raise(self.forgotten, origin, version)
        for vector in (listing.known, listing.forgotten):
            for origin, version in vector.items():
                _raise(self.known, origin, version)
        return Merged(dead, max(missed, default=0))

    def may_accept(self, key: bytes, version: int, sender_known: Vector) -> bool:
        """Whether a copy may be taken from a member that knew so much when it sent it.

        Also whether it vouches so for a copy of ours that is in doubt. False does not say that
        the copy is dead: after an exchange it may be acceptable.
        """
        if self.beats(key, version):
            return False
        return all(
            version > forgotten or sender_known.get(origin, 0) >= forgotten
            for origin, forgotten in self.forgotten.items()
        )

    def expire(self, now_ns: int) -> int:
        """Drop what was kept long enough; how many were dropped."""
        dropped = 0
        while self._ends and self._ends[0][0] <= now_ns:
            dropped += self._drop_first()
        return dropped

    def snapshot(self) -> Listing:
        """All of it, to be written down while none of our copies is in doubt."""
        return Listing(tuple(self._by_key.values()), dict(self.known), dict(self.forgotten))

    @classmethod
    def restored(
        cls, slot: int, saved: Listing, since: Iterable[Tombstone], entries_max: int = ENTRIES_MAX
    ) -> Tombstones:
        """From what was written down: a snapshot, and what was made here or heard of since."""
        table = cls(slot, entries_max)
        table.known.update(saved.known)
        table.forgotten.update(saved.forgotten)
        for tombstone in saved.tombstones:
            table._add(tombstone)
        for tombstone in since:
            if slot_of(tombstone.version) != slot:
                table.hear(tombstone)
            elif tombstone.version > table.known.get(slot, 0):
                table.bury(*tombstone)
        return table

    def _add(self, tombstone: Tombstone) -> bool:
        key, version, until_ns = tombstone
        found = self._by_key.get(key)
        if found is not None and version <= found.version:
            return False
        self._by_key[key] = tombstone
        insort(self._by_origin.setdefault(slot_of(version), []), (version, key))
        heapq.heappush(self._ends, (until_ns, version, key))
        self._indexed += 1
        while len(self._by_key) > self.entries_max:
            self._drop_first()
        if self._indexed > 2 * len(self._by_key) + STALE_MIN:
            self._reindex()
        return True

    def _drop_first(self) -> bool:
        """Take away the row that ends first; whether it was a tombstone still."""
        _, version, key = heapq.heappop(self._ends)
        if not self._is_current(version, key):
            return False
        del self._by_key[key]
        _raise(self.forgotten, slot_of(version), version)
        return True

    def _is_current(self, version: int, key: bytes) -> bool:
        found = self._by_key.get(key)
        return found is not None and found.version == version

    def _reindex(self) -> None:
        """Let go of the rows of what was replaced or dropped."""
        by_origin: dict[int, list[tuple[int, bytes]]] = {}
        for key, version, _ in self._by_key.values():
            by_origin.setdefault(slot_of(version), []).append((version, key))
        for rows in by_origin.values():
            rows.sort()
        self._by_origin = by_origin
        self._ends = [(until_ns, version, key) for key, version, until_ns in self]
        heapq.heapify(self._ends)
        self._indexed = len(self._by_key)


def _raise(vector: dict[int, int], slot: int, version: int) -> None:
    if version > vector.get(slot, 0):
        vector[slot] = version
