"""Names: which key leads to which generation, and for whom.

A published name leads every process to the same block. A generation that is being written and
was not published yet is known by name only to the process (the *owner*) that writes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ctxfs.core.block import Block, Directory, Node
from ctxfs.core.blocktable import BlockTable
from ctxfs.core.entries import Inodes, TableEntries
from ctxfs.core.key import KEY_BYTES_MAX, check_name, split_key
from ctxfs.errors import (
    BlockExists,
    BlockNotFound,
    DirectoryNotEmpty,
    IsDirectory,
    NameTooLong,
    NotDirectory,
)

ROOT_INODE = 1


class Namespace:
    """The tree of directories, the published blocks in it, and the private ones beside it."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self.by_inode = Inodes(self.table)
        self.root = self.new_directory(ROOT_INODE, None, b"")
        self.by_inode.directories[ROOT_INODE] = self.root
        self._private: dict[tuple[int, bytes], list[Block]] = {}
        self.directory_count = 1
        # Invariant: a published block b has b.directory.entries[b.name] is b.
        # Invariant: an unpublished, named block b is in _private[b.directory.inode, b.name].

    def new_directory(self, inode: int, parent: Directory | None, name: bytes) -> Directory:
        """Return a directory that is not in its parent."""
        return Directory(inode, parent, name, TableEntries(self.table))

    # -- keys

    def key_of(self, node: Node) -> bytes:
        """Return the path below the mount; b"" for the root."""
        parts = []
        directory = node.directory if isinstance(node, Block) else node.parent
        name = node.name
        while directory is not None:
            parts.append(name)
            name, directory = directory.name, directory.parent
        return b"/".join(reversed(parts))

    def resolve(self, key: bytes) -> Node:
        """Return what a key leads to. Raises BlockNotFound, NotDirectory."""
        node: Node = self.root
        for name in split_key(key) if key else ():
            if not isinstance(node, Directory):
                raise NotDirectory(repr(key))
            child = node.entries.get(name)
            if child is None:
                raise BlockNotFound(repr(key))
            node = child
        return node

    def find(self, directory: Directory, name: bytes) -> Node | None:
        """Return what the published name leads to."""
        return directory.entries.get(name)

    def block_beside(self, directory: Directory) -> Block | None:
        """Return a block that has the name of a directory, as only what was read may have."""
        assert directory.parent is not None
        return _entries(directory.parent).block(directory.name)

    def number_for(self, directory: Directory) -> int:
        """Return the number under which the table of blocks knows a directory."""
        return _entries(directory).number_for(directory)

    def check_place(self, directory: Directory, name: bytes) -> None:
        """Raise NameTooLong, BadValue, or BlockNotFound if nothing may be put there."""
        check_name(name)
        if len(self.key_of(directory)) + 1 + len(name) > KEY_BYTES_MAX:
            raise NameTooLong(f"a key has at most {KEY_BYTES_MAX} bytes")
        if directory.removed:
            raise BlockNotFound("the directory is gone")

    # -- private names

    def private_of(self, directory: Directory, name: bytes) -> list[Block]:
        """Return the generations being written under this name, newest last."""
        if not self._private:
            return []
        return self._private.get((directory.inode, name), [])

    def private_in(self, directory: Directory) -> Iterator[Block]:
        """Yield all generations being written under names in this directory."""
        for (inode, _), blocks in self._private.items():
            if inode == directory.inode:
                yield from blocks

    def private_blocks(self) -> Iterator[Block]:
        """Yield all generations that are known by name to their owners alone."""
        for blocks in self._private.values():
            yield from blocks

    def add_private(self, block: Block) -> None:
        """Make a generation findable by its owner."""
        self.check_place(block.directory, block.name)
        self._private.setdefault((block.directory.inode, block.name), []).append(block)
        self.table.hold(block)

    def remove_private(self, block: Block) -> None:
        """Forget the private name; harmless if there is none."""
        place = (block.directory.inode, block.name)
        blocks = self._private.get(place)
        if blocks is not None and block in blocks:
            blocks.remove(block)
            if not blocks:
                del self._private[place]

    # -- published names

    def publish(self, block: Block, directory: Directory, name: bytes) -> Block | None:
        """Make the name lead to `block` for everybody, in one step. Returns what it led to."""
        old = directory.entries.get(name)
        if isinstance(old, Directory):
            raise IsDirectory(repr(name))
        self.check_place(directory, name)
        self.unname(block)
        if old is not None and old is not block:
            self.table.leave(old)
            old.published = False
        block.directory, block.name, block.published = directory, name, True
        self.table.enter(block, self.number_for(directory))
        return old if old is not block else None

    def unname(self, block: Block) -> None:
        """Take away the block's name, private or published."""
        if block.published:
            self.table.leave(block)
            block.published = False
        else:
            self.remove_private(block)

    def bury(self, block: Block) -> None:
        """A block without a name is not to get one again; it may still be open, or known."""
        self.table.release(block)

    def forget(self, node: Node) -> None:
        """Drop the inode; for nodes without name, open descriptions and kernel references."""
        if isinstance(node, Block):
            self.table.forget(node)
        else:
            self.by_inode.directories.pop(node.inode, None)

    # -- directories

    def make_directory(self, parent: Directory, name: bytes, inode: int) -> Directory:
        """Make an empty prefix."""
        if name in parent.entries:
            raise BlockExists(repr(name))
        self.check_place(parent, name)
        directory = self.new_directory(inode, parent, name)
        _entries(parent).directories[name] = directory
        self.by_inode.directories[inode] = directory
        self.directory_count += 1
        return directory

    def remove_directory(self, directory: Directory) -> None:
        """Take away an empty prefix. Private generations beneath do not keep it."""
        if directory.entries:
            raise DirectoryNotEmpty(repr(directory.name))
        assert directory.parent is not None
        del _entries(directory.parent).directories[directory.name]
        _entries(directory).end()
        directory.removed = True
        self.directory_count -= 1

    def move_directory(self, directory: Directory, parent: Directory, name: bytes) -> None:
        """Rename an empty prefix onto a free name."""
        self.check_place(parent, name)
        if directory.entries:
            raise DirectoryNotEmpty(repr(directory.name))
        assert directory.parent is not None
        del _entries(directory.parent).directories[directory.name]
        directory.parent, directory.name = parent, name
        _entries(parent).directories[name] = directory

    def blocks_beneath(self, directory: Directory) -> Iterator[Block]:
        """Yield every published block below a prefix."""
        for node in directory.entries.values():
            if isinstance(node, Block):
                yield node
            else:
                yield from self.blocks_beneath(node)

    def is_pinned_beneath(self, directory: Directory, now_boot_ns: int) -> bool:
        """Whether a pin holds now on any block below a prefix."""
        return any(
            node.is_pinned(now_boot_ns)
            if isinstance(node, Block)
            else self.is_pinned_beneath(node, now_boot_ns)
            for node in directory.entries.peek()
        )

    def together_root(self, block: Block) -> Directory | None:
        """Return the outermost directory that holds the block and is marked `together`."""
        found = None
        directory: Directory | None = block.directory
        while directory is not None:
            if directory.together:
                found = directory
            directory = directory.parent
        return found

    def default_ttl_ns(self, directory: Directory | None) -> int:
        """Return the nearest default TTL on the way up; 0 for none, -1 when nobody set one."""
        while directory is not None:
            if directory.default_ttl_ns >= 0:
                return directory.default_ttl_ns
            directory = directory.parent
        return -1

    def default_replicas(self, directory: Directory | None) -> int:
        """Return the nearest default number of replicas on the way up; 0 when nobody set one."""
        while directory is not None:
            if directory.default_replicas:
                return directory.default_replicas
            directory = directory.parent
        return 0


def _entries(directory: Directory) -> TableEntries:
    """What this namespace keeps of a directory of its own."""
    entries = directory.entries
    assert isinstance(entries, TableEntries)
    return entries
