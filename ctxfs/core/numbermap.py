"""64-bit numbers by 64-bit numbers, in two arrays: a dict of them takes three times as much."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from ctxfs.core.columns import I64, U64
from ctxfs.core.rowindex import mixed, mixed_all, probed

_EMPTY: Final = 0
_SLOTS_MIN: Final = 64


class NumberMap:
    """Open addressing with linear probing. 0 is no key."""

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * _SLOTS_MIN))
        self._values = array("Q", bytes(8 * _SLOTS_MIN))
        self._mask = _SLOTS_MIN - 1
        self._count = 0
        # Invariant: between a key's slot and its home, mixed(key) & mask, no slot is empty.

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: int) -> bool:
        return self._keys[self._slot(key)] != _EMPTY

    def get(self, key: int) -> int | None:
        """Return the value of a key."""
        slot = self._slot(key)
        return self._values[slot] if self._keys[slot] else None

    def keys(self) -> set[int]:
        """Return all keys."""
        return set(self._pairs()[0].tolist())

    def key_array(self) -> U64:
        """Return all keys, in no order."""
        return self._pairs()[0]

    def __setitem__(self, key: int, value: int) -> None:
        slot = self._slot(key)
        if not self._keys[slot]:
            if 8 * (self._count + 1) > 5 * len(self._keys):
                self._lay_out(*self._pairs(), self._count + 1)
                slot = self._slot(key)
            self._keys[slot] = key
            self._count += 1
        self._values[slot] = value

    def remove(self, key: int) -> None:
        """Take out a key, and move those that lay behind it closer to home. Raises KeyError."""
        keys, mask = self._keys, self._mask
        hole = self._slot(key)
        if not keys[hole]:
            raise KeyError(key)
        at = (hole + 1) & mask
        while other := keys[at]:
            if (at - mixed(other)) & mask >= (at - hole) & mask:
                keys[hole], self._values[hole] = other, self._values[at]
                hole = at
            at = (at + 1) & mask
        keys[hole] = _EMPTY
        self._count -= 1

    def load(self, keys: U64, values: U64) -> None:
        """Put in many; none of them is here."""
        had_keys, had_values = self._pairs()
        all_keys = np.concatenate([had_keys, keys])
        self._lay_out(all_keys, np.concatenate([had_values, values]), len(all_keys))

    def _slot(self, key: int) -> int:
        """Return where a key is, or the empty slot where it would be."""
        keys, mask = self._keys, self._mask
        at = mixed(key) & mask
        while (there := keys[at]) and there != key:
            at = (at + 1) & mask
        return at

    def _pairs(self) -> tuple[U64, U64]:
        keys = np.frombuffer(self._keys, np.uint64)
        taken = np.flatnonzero(keys)
        return keys[taken], np.frombuffer(self._values, np.uint64)[taken]

    def _lay_out(self, keys: U64, values: U64, count: int) -> None:
        """Make the slots anew, for `count` and as many more, with these in them."""
        size = max(_SLOTS_MIN, 1 << (2 * count - 1).bit_length())
        homes = mixed_all(keys).astype(np.int64) & (size - 1)
        order = np.argsort(homes, kind="stable")
        slots = probed(homes[order])
        fits = slots < size
        self._keys = _laid_out(keys[order[fits]], slots[fits], size)
        self._values = _laid_out(values[order[fits]], slots[fits], size)
        self._mask = size - 1
        self._count = int(fits.sum())
        for at in order[~fits].tolist():  # these go round to the beginning
            self[int(keys[at])] = int(values[at])


def _laid_out(numbers: U64, slots: I64, size: int) -> array[int]:
    laid = np.zeros(size, np.uint64)
    laid[slots] = numbers
    made = array("Q")
    made.frombytes(laid.tobytes())
    return made
