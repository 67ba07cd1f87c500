"""Rows by a hash of what they hold: four bytes for a slot, where a dict takes a hundred."""

from array import array
from typing import Final

import numpy as np

from ctxfs.core.columns import I64, U32, U64

NO_ROW: Final = 0  # rows begin at 1
TAG_BITS: Final = 32

_SLOTS_MIN: Final = 64
_MIX: Final = 0x9E37_79B9_7F4A_7C15  # 2**64 divided by the golden ratio, odd


def mixed(number: int) -> int:
    """Return a tag of a number: neighbours lie far apart, since runs make probing slow."""
    return (number * _MIX >> TAG_BITS) & 0xFFFF_FFFF


def mixed_all(numbers: U64) -> U32:
    """Return the tags of many numbers."""
    return (numbers * np.uint64(_MIX) >> np.uint64(TAG_BITS)).astype(np.uint32)


def probed(homes: I64) -> I64:
    """Return the slots of things that come in the order of their homes.

    Each lies in its home, or right behind the one before; some may lie behind the last slot.
    """
    steps = np.arange(len(homes), dtype=np.int64)
    return np.maximum.accumulate(homes - steps) + steps


class RowIndex:
    """Open addressing with linear probing. A row is in it once, under a tag of 32 bits.

    Different things may have one tag: who asks says which row it is.
    """

    def __init__(self) -> None:
        self._slots = array("I", bytes(4 * _SLOTS_MIN))  # rows
        self._mask = _SLOTS_MIN - 1
        self._tags = array("I")  # by row; void where a row is not in here
        self._count = 0
        # Invariant: between a row's slot and its home, tag & mask, no slot is empty.

    def __len__(self) -> int:
        return self._count

    def first(self, tag: int) -> int:
        """Return a row with this tag, or NO_ROW. Mostly it is the one that is looked for."""
        slots, tags, mask = self._slots, self._tags, self._mask
        at = tag & mask
        while row := slots[at]:
            if tags[row] == tag:
                break
            at = (at + 1) & mask
        return row

    def next(self, row: int) -> int:
        """Return another row with the tag of this one, or NO_ROW when each was returned once."""
        slots, tags, mask = self._slots, self._tags, self._mask
        tag = tags[row]
        at = self._slot_of(row)
        while row := slots[at := (at + 1) & mask]:
            if tags[row] == tag:
                break
        return row

    def _slot_of(self, row: int) -> int:
        slots, mask = self._slots, self._mask
        at = self._tags[row] & mask
        while slots[at] != row:
            at = (at + 1) & mask
        return at

    def add(self, tag: int, row: int) -> None:
        """Put a row in that is not in here."""
        if row >= len(self._tags):
            self._tags.frombytes(bytes(4 * (row + 1 - len(self._tags))))
        self._tags[row] = tag
        self._count += 1
        if 8 * self._count > 5 * len(self._slots):
            self._grow()
        slots, mask = self._slots, self._mask
        at = tag & mask
        while slots[at]:
            at = (at + 1) & mask
        slots[at] = row

    def remove(self, row: int) -> None:
        """Take out a row that is in here, and move those that lay behind it closer to home."""
        slots, tags, mask = self._slots, self._tags, self._mask
        hole = self._slot_of(row)
        at = (hole + 1) & mask
        while other := slots[at]:
            if (at - tags[other]) & mask >= (at - hole) & mask:
                slots[hole] = other
                hole = at
            at = (at + 1) & mask
        slots[hole] = NO_ROW
        self._count -= 1

    def fill(self, tags: U32, first_row: int) -> None:
        """Put in rows from `first_row` on, one for each tag; none of them, nor above, is here."""
        self._tags.frombytes(bytes(4 * max(0, first_row - len(self._tags))))
        del self._tags[first_row:]
        self._tags.frombytes(tags.tobytes())
        self._count += len(tags)
        more = np.arange(first_row, first_row + len(tags), dtype=np.uint32)
        self._lay_out(np.concatenate([self._rows(), more]))

    def _grow(self) -> None:
        rows = self._rows()
        self._lay_out(rows)

    def _rows(self) -> U32:
        slots = np.frombuffer(self._slots, np.uint32)
        return slots.compress(slots != NO_ROW)

    def _lay_out(self, rows: U32) -> None:
        """Make the slots anew, for `_count` rows and as many more; these are put in."""
        size = max(_SLOTS_MIN, 1 << (2 * self._count - 1).bit_length())
        homes = np.frombuffer(self._tags, np.uint32)[rows] & np.uint32(size - 1)
        order = np.argsort(homes, kind="stable")
        places = probed(homes[order].astype(np.int64))
        fits = places < size
        slots = np.zeros(size, np.uint32)
        slots[places[fits]] = rows[order[fits]]
        self._slots = array("I")
        self._slots.frombytes(slots.tobytes())
        self._mask = size - 1
        for row in rows[order[~fits]].tolist():  # these go round to the beginning
            at = self._tags[row] & self._mask
            while self._slots[at]:
                at = (at + 1) & self._mask
            self._slots[at] = row
