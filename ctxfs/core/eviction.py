"""What goes when a tier needs room. Pure: the store carries it out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import numpy as np

from ctxfs.core.block import Block
from ctxfs.core.blocktable import BlockTable
from ctxfs.core.columns import U32, U64

_CHOSEN_MIN: Final = 4096
_TURNS_MAX: Final = 2**32 - 1


class Policy(Protocol):
    """An order in which blocks leave a tier."""

    def add(self, block: Block) -> None: ...

    def use(self, block: Block) -> None: ...

    def remove(self, block: Block) -> None: ...

    def leaving(self) -> Iterator[Block]:
        """Yield blocks, the first to go first. Not to be changed while iterated."""
        ...

    def __len__(self) -> int: ...


class Lru:
    """Least recently used first. Use is `open`; looking is not use.

    Each use takes the next number, kept in a column of the table of blocks: that is all there is
    of the order. Who leaves first is found out when it is asked for, for some thousands at once:
    those chosen stay the first to go, but for the ones that are used after that.
    """

    def __init__(self, table: BlockTable) -> None:
        """For blocks that have a row in the table; a row is removed before it is freed."""
        self._table = table
        self._turns = table.column()  # of the last use; 0: not in here
        self._next_turn = 1
        self._count = 0
        # Rows and the turns by which they were chosen, in order. Where the turn is another now,
        # the block was used since, or removed.
        self._chosen = array("I")
        self._chosen_turns = array("I")
        self._first = 0  # of those chosen, that may still be right
        self._chosen_to = 0  # Invariant: all turns up to this one, and no other, were chosen

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: Block) -> bool:
        return bool(self._turns[block.row])

    def add(self, block: Block) -> None:
        """A copy arrived in the tier; it counts as used now."""
        assert block.row
        if not self._turns[block.row]:
            self._count += 1
        self._take_turn(block.row)

    def add_all(self, rows: U32) -> None:
        """Copies of these blocks are in the tier, the least recently used first; none is in it."""
        if self._next_turn + len(rows) > _TURNS_MAX:
            self._renumber()
        turns = np.frombuffer(self._turns, np.uint32)
        turns[rows] = np.arange(self._next_turn, self._next_turn + len(rows), dtype=np.uint32)
        self._next_turn += len(rows)
        self._count += len(rows)

    def use(self, block: Block) -> None:
        """The block was opened; harmless if this tier has no copy."""
        turns, row = self._turns, block.row
        if turns[row]:
            try:
                turns[row] = self._next_turn  # with each open: without a call
                self._next_turn += 1
            except OverflowError:
                self._take_turn(row)

    def _take_turn(self, row: int) -> None:
        try:
            self._turns[row] = self._next_turn
        except OverflowError:
            self._renumber()
            self._turns[row] = self._next_turn
        self._next_turn += 1

    def _renumber(self) -> None:
        """Give the turns out anew, from 1 on: there have been so many that they do not fit."""
        turns = np.frombuffer(self._turns, np.uint32)
        rows = np.flatnonzero(turns)
        turns[rows[np.argsort(turns[rows])]] = np.arange(1, len(rows) + 1)
        self._next_turn = len(rows) + 1
        del self._chosen[:], self._chosen_turns[:]
        self._first = self._chosen_to = 0

    def remove(self, block: Block) -> None:
        """The copy left the tier; harmless if there was none."""
        if self._turns[block.row]:
            self._turns[block.row] = 0
            self._count -= 1

    def leaving(self) -> Iterator[Block]:
        """Yield blocks, least recently used first."""
        for row in self.rows():
            yield self._table.at(row)

    def rows(self) -> Iterator[int]:
        """Yield the rows of the blocks, least recently used first."""
        turns = self._turns
        if 2 * self._first >= len(self._chosen):
            del self._chosen[: self._first], self._chosen_turns[: self._first]
            self._first = 0
        at = self._first
        while at < len(self._chosen) or self._choose_more():
            row, turn = self._chosen[at], self._chosen_turns[at]
            if turns[row] == turn:
                yield row
            elif at == self._first:
                self._first += 1
            at += 1

    def generations(self) -> U64:
        """Return the generations of all blocks, the most recently used first."""
        turns = np.frombuffer(self._turns, np.uint32)
        rows = np.flatnonzero(turns)
        rows = rows[np.argsort(turns[rows])][::-1]
        return np.frombuffer(self._table.generations, np.uint64)[rows]

    def _choose_more(self) -> bool:
        """Choose those that come next; whether there are any."""
        turns = np.frombuffer(self._turns, np.uint32)
        rows = np.flatnonzero(turns > self._chosen_to)
        if not len(rows):
            return False
        count = max(_CHOSEN_MIN, len(self._chosen))
        if len(rows) > count:
            rows = rows[np.argpartition(turns[rows], count)[:count]]
        rows = rows[np.argsort(turns[rows])]
        self._chosen.frombytes(rows.astype(np.uint32).tobytes())
        self._chosen_turns.frombytes(turns[rows].tobytes())
        self._chosen_to = int(turns[rows[-1]])
        return True


def choose(
    leaving: Iterable[Block],
    need_bytes: int,
    bytes_of: Callable[[Block], int],
    may_go: Callable[[Block], bool],
) -> list[Block]:
    """Return the first blocks that may go and together free `need_bytes`; fewer if there are not.

    Never names a block for which `may_go` says no: pinned, open, being written or moved.
    """
    chosen: list[Block] = []
    freed = 0
    if need_bytes <= 0:
        return chosen
    for block in leaving:
        if may_go(block):
            chosen.append(block)
            freed += bytes_of(block)
            if freed >= need_bytes:
                break
    return chosen
