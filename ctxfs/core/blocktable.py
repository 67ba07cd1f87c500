"""All blocks that have a name. One that nobody uses is a row of a table, not an object.

There may be millions of blocks, and few of them are in use. A `Block` is made of its row when it
is asked for by name or number (it *wakes*), and stays that one object for whoever asks again. When
many are awake, those that nobody refers to any more are written back and let go (they are
*folded*), the longest awake first. A row takes about 110 bytes, and its name, and its places in the
indexes; an object with all it refers to takes about 800 bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ctxfs.core import blockrow
from ctxfs.core.block import Block, Directory, Extras, State
from ctxfs.core.blockrow import COUNTS_MAX, DIGEST_BYTES, ROW, ROW_COLUMNS
from ctxfs.core.columnops import slices
from ctxfs.core.columns import I64, U32, U64
from ctxfs.core.namestore import NameStore
from ctxfs.core.rowindex import NO_ROW, RowIndex, mixed, mixed_all
from ctxfs.core.times import NEVER

AWAKE_MAX: Final = 1 << 14
_EXAMINED_AT_ONCE: Final = 4  # of those awake, each time one more is
_HOME_MIX: Final = 0x9E37_79B1
_TAG: Final = 2**32 - 1
_NO_EXTRAS: Final = Extras()


def _references(blocks: dict[int, Any], key: int) -> int:
    return sys.getrefcount(blocks[key])


# Of one that nobody refers to: what the call itself adds, and two dicts.
_UNUSED: Final = _references({0: object()}, 0) + 1


class BlockTable:
    """Named blocks by inode and by directory and name; and all others that have to be found."""

    def __init__(self) -> None:
        self.awake: dict[int, Block] = {}  # by generation
        self._awake_max = AWAKE_MAX
        self._awakened: deque[int] = deque()  # generations; the longest awake first
        self._by_generation = RowIndex()
        self._by_name = RowIndex()
        self._names = NameStore()
        self._free = array("I")  # rows
        # By row, from 1 on.
        self.generations = array("Q", [0])  # 0: a free row
        self.facts = bytearray(ROW.size)  # of a block that is awake, those it woke with
        self._homes = array("I", [0])  # number of the directory
        self._places = array("I", [0])  # place in the directory's rows
        self._cells = array("I", [0])  # of the name
        self._lengths = array("B", [0])  # 0: it has no name now
        self._columns: list[array[int]] = []  # of others
        self.extras: dict[int, Extras] = {}  # of blocks that are folded
        # Directories by number, from 1 on, each with the rows of the blocks in it.
        self._directories: list[Directory | None] = [None]
        self._members: list[array[int]] = [array("I")]
        self._awake_in: list[dict[bytes, Block]] = [{}]  # and those awake, by name
        self._free_directories: list[int] = []
        # Invariant: a block that is not awake is sealed, published and not open.
        # Invariant: a block in `awake` with a row has the facts; its row's are void.

    def __len__(self) -> int:
        return len(self._by_generation)

    def column(self) -> array[int]:
        """Return a column of 32-bit numbers that grows with the table, 0 in rows that are new."""
        column = array("I", bytes(4 * len(self.generations)))
        self._columns.append(column)
        return column

    # -- directories

    def add_directory(self, directory: Directory) -> int:
        """Let blocks be in this directory; returns its number."""
        if self._free_directories:
            number = self._free_directories.pop()
            self._directories[number] = directory
            return number
        self._directories.append(directory)
        self._members.append(array("I"))
        self._awake_in.append({})
        return len(self._directories) - 1

    def remove_directory(self, number: int) -> None:
        """Forget an empty directory."""
        self._directories[number] = None
        self._members[number] = array("I")
        self._awake_in[number] = {}
        self._free_directories.append(number)

    def awake_in(self, number: int) -> dict[bytes, Block]:
        """Return the blocks in a directory that are awake, by name; to be read only."""
        return self._awake_in[number]

    def count_in(self, number: int) -> int:
        """Return how many blocks are in a directory."""
        return len(self._members[number])

    def names_in(self, number: int) -> Iterator[bytes]:
        """Yield the names of the blocks in a directory."""
        for row in self._members[number]:
            yield self._name(row)

    def rows_in(self, number: int) -> list[int]:
        """Return the rows of the blocks in a directory."""
        return self._members[number].tolist()

    # -- finding

    def find(self, generation: int) -> Block | None:
        """Return a block by its number, awake."""
        block = self.awake.get(generation)
        if block is not None:
            return block
        row = self._row_of(generation)
        return self._wake(row) if row else None

    def _row_of(self, generation: int) -> int:
        index = self._by_generation
        row = index.first(mixed(generation))
        while row and self.generations[row] != generation:
            row = index.next(row)
        return row

    def peek_at(self, generation: int) -> Block | None:
        """Return a block by its number to be read at once, and no more: it may be a copy."""
        block = self.awake.get(generation)
        if block is not None:
            return block
        row = self._row_of(generation)
        return self._unfolded(row) if row else None

    def find_name(self, number: int, name: bytes) -> Block | None:
        """Return a block by its directory's number and its name, awake."""
        row = self._by_name.first(_name_tag(number, name))
        if row:  # mostly what is not known by name ends here
            row = self._right(row, number, name)
        return self.at(row) if row else None

    def has_name(self, number: int, name: bytes) -> bool:
        """Whether a block has that name in the directory of that number."""
        row = self._by_name.first(_name_tag(number, name))
        return bool(row and self._right(row, number, name))

    def _right(self, row: int, number: int, name: bytes) -> int:
        """Return, from a row with a name's tag on, the one with the name itself, or NO_ROW."""
        index = self._by_name
        while row and not (
            self._homes[row] == number
            and self._lengths[row] == len(name)
            and self._names.is_at(self._cells[row], name)
        ):
            row = index.next(row)
        return row

    def at(self, row: int) -> Block:
        """Return the block of a row, awake."""
        return self.awake.get(self.generations[row]) or self._wake(row)

    def peek(self, row: int) -> Block:
        """Return the block of a row to be read at once, and no more: it may be a copy."""
        return self.awake.get(self.generations[row]) or self._unfolded(row)

    def _name(self, row: int) -> bytes:
        return self._names.get(self._cells[row], self._lengths[row])

    def peek_with_extras(self) -> Iterator[Block]:
        """Yield those that have extras, to be read at once: they may be copies."""
        for block in self.awake.values():
            if block.extras is not None:
                yield block
        for row in self.extras:
            yield self._unfolded(row)

    def all_deadlines(self) -> tuple[U64, U64]:
        """Return generations, and when each expires, or NEVER; free rows are among them."""
        generations = np.frombuffer(self.generations, np.uint64)
        deadlines = np.frombuffer(self.facts, ROW_COLUMNS)["expires_ns"].astype(np.uint64)
        deadlines[generations == 0] = NEVER
        awake = list(self.awake.values())
        rowless = [block for block in awake if not block.row]
        deadlines[[block.row for block in awake]] = [block.expires_ns for block in awake]
        deadlines[NO_ROW] = NEVER
        more = np.array([block.generation for block in rowless], np.uint64)
        more_deadlines = np.array([block.expires_ns for block in rowless], np.uint64)
        return np.concatenate([generations, more]), np.concatenate([deadlines, more_deadlines])

    # -- coming and going

    def hold(self, block: Block) -> None:
        """Let a block without a row be found by its number."""
        if block.generation not in self.awake:
            self._add_awake(block)

    def forget(self, block: Block) -> None:
        """Nobody is to find a block without a row by its number any more."""
        self.awake.pop(block.generation, None)

    def enter(self, block: Block, number: int) -> None:
        """Give a block, which is in none, its place in the directory of that number."""
        self.hold(block)
        row = block.row or self._new_row(block)
        self._awake_in[number][block.name] = block
        members = self._members[number]
        self._homes[row], self._places[row] = number, len(members)
        members.append(row)
        self._cells[row], self._lengths[row] = self._names.put(block.name), len(block.name)
        self._by_name.add(_name_tag(number, block.name), row)

    def leave(self, block: Block) -> None:
        """Take a block out of its directory; its row stays."""
        row = block.row
        self._by_name.remove(row)
        self._names.drop(self._cells[row], self._lengths[row])
        self._lengths[row] = 0
        home = self._homes[row]
        del self._awake_in[home][block.name]
        members, place = self._members[home], self._places[row]
        last = members.pop()
        if last != row:
            members[place] = last
            self._places[last] = place

    def release(self, block: Block) -> None:
        """Free the row of a block that is in no directory; harmless if it has none."""
        row, block.row = block.row, NO_ROW
        if row:
            self._by_generation.remove(row)
            self.generations[row] = 0
            self._free.append(row)

    def _new_row(self, block: Block) -> int:
        if self._free:
            row = self._free.pop()
        else:
            row = len(self.generations)
            self.generations.append(0)
            self.facts += bytes(ROW.size)
            for column in (self._homes, self._places, self._cells, self._lengths, *self._columns):
                column.append(0)
        block.row = row
        self.generations[row] = block.generation
        self._by_generation.add(mixed(block.generation), row)
        return row

    def load(
        self,
        generations: U64,
        homes: U32,
        keys: bytes,
        spans: tuple[I64, I64],
        facts: NDArray[np.void],
    ) -> int:
        """Add many blocks, all sealed, in rows from the one returned on.

        None of them is here, nor its name. `homes` are numbers of directories; the names lie in
        `keys`, from the first of `spans` to the second; `facts` are of ROW_COLUMNS.
        """
        first, count = len(self.generations), len(generations)
        starts, ends = spans
        self.generations.frombytes(generations.tobytes())
        self.facts += facts.tobytes()
        self._homes.frombytes(homes.tobytes())
        lengths = (ends - starts).astype(np.uint8)
        self._lengths.frombytes(lengths.tobytes())
        named = homes.astype(np.int64) * _HOME_MIX
        at = 0
        for names in slices(keys, starts, ends):
            chunk = slice(at, at + len(names))
            self._cells.frombytes(self._names.put_all(names, lengths[chunk]).tobytes())
            named[chunk] ^= np.fromiter(map(hash, names), np.int64, len(names))
            at += len(names)
        self._places.frombytes(self._join(homes, first).tobytes())
        for column in self._columns:
            column.frombytes(bytes(4 * count))
        self._by_generation.fill(mixed_all(generations), first)
        self._by_name.fill((named & _TAG).astype(np.uint32), first)
        return first

    def _join(self, homes: U32, first_row: int) -> U32:
        """Make rows from `first_row` on members of their directories; returns their places."""
        order = np.argsort(homes, kind="stable")
        numbers, begins = np.unique(homes[order], return_index=True)
        places = np.empty(len(homes), np.uint32)
        bounds = [*begins.tolist(), len(homes)]
        for at, number in enumerate(numbers.tolist()):
            chosen = order[bounds[at] : bounds[at + 1]]
            members = self._members[number]
            places[chosen] = np.arange(len(members), len(members) + len(chosen))
            members.frombytes((chosen + first_row).astype(np.uint32).tobytes())
        return places

    # -- waking and folding

    def _wake(self, row: int) -> Block:
        block = self._unfolded(row)
        self.extras.pop(row, None)
        self._awake_in[self._homes[row]][block.name] = block
        self._add_awake(block)
        return block

    def _add_awake(self, block: Block) -> None:
        self.awake[block.generation] = block
        self._awakened.append(block.generation)
        if len(self._awakened) > self._awake_max:
            self._fold_some()

    def _fold_some(self) -> None:
        """Let go of some that nobody uses; those in use are looked at again later."""
        for _ in range(min(_EXAMINED_AT_ONCE, len(self._awakened) - self._awake_max)):
            generation = self._awakened.popleft()
            block = self.awake.get(generation)
            if block is None:
                continue
            if _may_fold(block):
                del block  # our own reference
                if _references(self.awake, generation) <= _UNUSED:
                    self._fold(self.awake.pop(generation))
                    continue
            self._awakened.append(generation)

    def _fold(self, block: Block) -> None:
        row = block.row
        del self._awake_in[self._homes[row]][block.name]
        blockrow.write(block, self.facts, row)
        if block.extras is not None and block.extras != _NO_EXTRAS:
            self.extras[row] = block.extras

    def _unfolded(self, row: int) -> Block:
        directory = self._directories[self._homes[row]]
        assert directory is not None
        block = Block.__new__(Block)  # all that follows is set once, and not before
        block.generation = self.generations[row]
        block.directory = directory
        block.name = self._name(row)
        block.row = row
        block.state = State.SEALED
        block.published = True
        block.opens = 0
        block.writing = None
        blockrow.read(block, self.facts, row)
        block.extras = self.extras.get(row)
        return block


def _name_tag(number: int, name: bytes) -> int:
    """Return the tag of a name in the directory of that number."""
    return (hash(name) ^ number * _HOME_MIX) & _TAG


def _may_fold(block: Block) -> bool:
    return (
        block.state is State.SEALED
        and block.published
        and not block.opens
        and block.lookups <= COUNTS_MAX
        and len(block.digest) == DIGEST_BYTES
    )
