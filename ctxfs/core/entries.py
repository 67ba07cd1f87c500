"""The table of blocks, with the directories beside it, as what is in a directory and as inodes."""

from __future__ import annotations

from collections.abc import Iterator

from ctxfs.core.block import Block, Directory, Node
from ctxfs.core.blocktable import BlockTable


class TableEntries:
    """What is in a directory, by name: blocks of the table, and directories. See `Entries`."""

    __slots__ = ("_awake", "_number", "_table", "directories")

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._number = 0  # of the directory in the table, once a block was in it
        self._awake = table.awake_in(0)
        self.directories: dict[bytes, Directory] = {}

    def get(self, name: bytes, /) -> Node | None:
        """Return what has the name."""
        block = self._awake.get(name)
        if block is not None:
            return block
        return self.directories.get(name) or self._table.find_name(self._number, name)

    def block(self, name: bytes) -> Block | None:
        """Return the block that has the name."""
        return self._table.find_name(self._number, name)

    def __getitem__(self, name: bytes, /) -> Node:
        node = self.get(name)
        if node is None:
            raise KeyError(name)
        return node

    def __contains__(self, name: bytes, /) -> bool:
        return name in self.directories or self._table.has_name(self._number, name)

    def __iter__(self) -> Iterator[bytes]:
        yield from self.directories
        yield from self._table.names_in(self._number)

    def __len__(self) -> int:
        return len(self.directories) + self._table.count_in(self._number)

    def values(self) -> Iterator[Node]:
        """Yield all, awake."""
        yield from self.directories.values()
        for row in self._table.rows_in(self._number):
            yield self._table.at(row)

    def peek(self) -> Iterator[Node]:
        """Yield all to be read at once, and no more: blocks may be copies."""
        yield from self.directories.values()
        for row in self._table.rows_in(self._number):
            yield self._table.peek(row)

    def number_for(self, directory: Directory) -> int:
        """Return the number under which the table knows this directory, which these are of."""
        if not self._number:
            self._number = self._table.add_directory(directory)
            self._awake = self._table.awake_in(self._number)
        return self._number

    def end(self) -> None:
        """The directory goes. It is empty."""
        if self._number:
            self._table.remove_directory(self._number)
            self._number = 0
            self._awake = self._table.awake_in(0)


class Inodes:
    """Blocks and directories by inode."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._awake = table.awake
        self.directories: dict[int, Directory] = {}

    def get(self, inode: int, /) -> Node | None:
        """Return what has the number, awake."""
        block = self._awake.get(inode)
        if block is not None:
            return block
        return self.directories.get(inode) or self._table.find(inode)

    def peek(self, inode: int, /) -> Node | None:
        """Return what has the number, to be read at once, and no more: it may be a copy."""
        return self.directories.get(inode) or self._table.peek_at(inode)

    def __getitem__(self, inode: int, /) -> Node:
        node = self.get(inode)
        if node is None:
            raise KeyError(inode)
        return node

    def __contains__(self, inode: int, /) -> bool:
        return self.get(inode) is not None
