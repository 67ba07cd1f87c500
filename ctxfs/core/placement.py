"""Which members are a key's homes: weighted rendezvous hashing, zones first. Pure.

The logarithm method: Schindelhauer and Schomaker, "Weighted Distributed Hash Tables" (2005).
docs/cluster.md says why it is this, and what it promises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from ctxfs.core.members import Member, MemberState

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]
I16 = NDArray[np.int16]

NOBODY: Final = -1  # in a row of homes: there are not so many members
CELLS_MAX: Final = 1 << 20  # of the matrix of keys and members that is looked at at once
# The last steps of splitmix64 (Steele, Lea, Flood 2014): every bit of the result depends on all.
_MULTIPLY_1, _MULTIPLY_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# 52 bits and a half: in (0, 1), exact as a double, and never 1.
_DROPPED_BITS, _SCALE = 12, 2.0**-52


def hash_key(key: bytes) -> int:
    """A key's part of the hash: 64 bits."""
    return int(xxhash.xxh3_64_intdigest(key))


def hash_keys(keys: Iterable[bytes]) -> U64:
    """The same for many."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64)


class Placement:
    """The homes of keys among the live members of one snapshot.

    Rows of numbers are indexes of `names`, which are in their order.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        live = sorted(
            (each for each in members if each.state is MemberState.LIVE), key=lambda m: m.name
        )
        self.names: tuple[str, ...] = tuple(each.name for each in live)
        self.zones: tuple[str, ...] = tuple(sorted({each.zone for each in live}))
        self.zone_of: tuple[int, ...] = tuple(self.zones.index(each.zone) for each in live)
        self._seeds = tuple(hash_key(each.name.encode()) for each in live)
        self._inverse_weights = tuple(1.0 / max(1, each.weight) for each in live)

    def index(self, name: str) -> int | None:
        """The number of a live member, or None."""
        return self.names.index(name) if name in self.names else None

    def homes(self, key: bytes, replicas: int) -> tuple[str, ...]:
        """The names of a key's homes, the first one first; fewer where there are fewer members."""
        return self.homes_of_hash(hash_key(key), replicas)

    def ranking(self, key: bytes, count: int) -> tuple[str, ...]:
        """The homes there would be with `count` replicas: who is asked next."""
        return self.homes_of_hash(hash_key(key), count)

    def homes_of_hash(self, key_hash: int, replicas: int) -> tuple[str, ...]:
        """The same for a key whose hash is known."""
        costs = self._costs(key_hash)
        if replicas == 1 and costs:
            return (self.names[costs.index(min(costs))],)
        order = sorted(range(len(costs)), key=costs.__getitem__)
        if len(self.zones) > 1:
            taken = [0] * len(self.zones)
            ranked = []
            for number in order:
                zone = self.zone_of[number]
                ranked.append((taken[zone], costs[number], number))
                taken[zone] += 1
            order = [number for _, _, number in sorted(ranked)]
        return tuple(self.names[number] for number in order[:replicas])

    def _costs(self, key_hash: int) -> list[float]:
        costs = []
        for seed, inverse_weight in zip(self._seeds, self._inverse_weights, strict=True):
            mixed = key_hash ^ seed
            mixed = ((mixed ^ (mixed >> 30)) * _MULTIPLY_1) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * _MULTIPLY_2) & _MASK
            mixed ^= mixed >> 31
            u = ((mixed >> _DROPPED_BITS) + 0.5) * _SCALE
            costs.append(-math.log(u) * inverse_weight)
        return costs

    def costs(self, hashes: U64) -> F64:
        """What each member costs each key: (keys, members). For as many as fit in memory."""
        seeds = np.array(self._seeds, np.uint64)
        mixed = hashes[:, None] ^ seeds[None, :]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
        mixed ^= mixed >> np.uint64(31)
        u = ((mixed >> np.uint64(_DROPPED_BITS)).astype(np.float64) + 0.5) * _SCALE
        costs: F64 = -np.log(u) * np.array(self._inverse_weights)
        return costs

    def homes_of(self, hashes: U64, replicas: int) -> I16:
        """Homes of many keys: (keys, replicas), NOBODY where there are fewer members."""
        homes = np.full((len(hashes), replicas), NOBODY, np.int16)
        if not self.names:
            return homes
        step = max(1, CELLS_MAX // len(self.names))
        for at in range(0, len(hashes), step):
            self._choose(self.costs(hashes[at : at + step]), homes[at : at + step])
        return homes

    def _choose(self, costs: F64, homes: I16) -> None:
        """Fill `homes`: of the zones taken least often, the cheapest member. Changes `costs`."""
        rows = np.arange(len(costs))
        zone_of = np.array(self.zone_of)
        taken = np.zeros((len(costs), len(self.zones)), np.float64)
        for column in range(min(homes.shape[1], len(self.names))):
            candidates = costs
            if len(self.zones) > 1 and column:
                # A zone whose members are all taken is out; inf says so of a member.
                often = np.where(np.isinf(costs), np.inf, taken[:, zone_of])
                candidates = np.where(often == often.min(axis=1)[:, None], costs, np.inf)
            best = candidates.argmin(axis=1)
            homes[:, column] = best
            costs[rows, best] = np.inf
            taken[rows, zone_of[best]] += 1


def names_of(placement: Placement, row: Sequence[int]) -> tuple[str, ...]:
    """The names in a row of `homes_of`."""
    return tuple(placement.names[number] for number in row if number != NOBODY)
