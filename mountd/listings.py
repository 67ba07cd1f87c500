"""Open directories by number, and who sees what in them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ctxfs.core.block import Block, Directory
from ctxfs.core.namespace import Namespace
from ctxfs.errors import TierTrouble
from mountd import process
from mountd.control import DIRECTORY_INODE, ControlDirectory
from mountd.nodes import Nodes
from mountd.permissions import groups_of, may_read
from mountd.values import Attr, Caller


@dataclass(slots=True)
class _Listing:
    """An open directory: what its opener saw when it last began to read."""

    inode: int
    caller: Caller
    entries: list[tuple[int, bytes]] | None = None  # by inode, so that a place is one for ever


class Listings:
    """All directories that are open. Errors as those of `Operations`."""

    def __init__(
        self, names: Namespace, nodes: Nodes, control: ControlDirectory, first: int
    ) -> None:
        """`first`: a number that no directory had in this mount's life, and none above it."""
        self._names = names
        self._nodes = nodes
        self._control = control
        self._listings: dict[int, _Listing] = {}
        self._next = first

    def open(self, inode: int, caller: Caller) -> int:
        """Open a directory; it is looked at when it is read from its beginning."""
        number = self._next
        self._next += 1
        if not self._control.has(inode):
            self._nodes.directory(inode)
        self._listings[number] = _Listing(inode, caller)
        return number

    def read(
        self, number: int, start: int, inode: int = 0, caller: Caller | None = None
    ) -> Iterator[tuple[int, bytes, Attr]]:
        """Yield (place, name, attributes) of what comes behind a place; 0 is the beginning.

        A place is an inode, so that a listing can go on under another daemon, which knows only
        the directory's `inode` and the `caller`.
        """
        listing = self._listings.get(number)
        if listing is None:
            if caller is None:
                raise TierTrouble("the open directory is not known any more")
            listing = self._listings[number] = _Listing(inode, caller)
        if not start or listing.entries is None:  # rewinddir(3) looks anew
            listing.entries = self._entries(listing.inode, listing.caller)
        first = bisect.bisect_left(listing.entries, (start + 1, b""))
        for inode, name in itertools.islice(listing.entries, first, None):
            if self._control.has(inode):
                yield inode, name, self._nodes.control_attr(inode)
                continue
            node = self._names.by_inode.get(inode)
            if node is None or (isinstance(node, Block) and node.is_gone):
                continue
            if node.name == name:  # renamed ones show, or not, under their new name
                yield inode, name, self._nodes.attr(node)

    def _entries(self, inode: int, caller: Caller) -> list[tuple[int, bytes]]:
        if inode == DIRECTORY_INODE:
            return sorted((file.inode, file.name) for file in self._control.files)
        return sorted(self._visible(self._nodes.directory(inode), caller))

    def _visible(self, directory: Directory, caller: Caller) -> Iterator[tuple[int, bytes]]:
        groups = groups_of(caller)
        for node in directory.entries.peek():
            if may_read(node, caller.uid, groups):
                yield (node.generation if isinstance(node, Block) else node.inode), node.name
        owner = None
        private = {}  # two threads may have made the same name: the newest is what it leads to
        for block in self._names.private_in(directory):
            owner = owner or process.process_of(caller.pid)
            mine = block.writing is not None and block.writing.owner == owner and block.opens
            if mine and block.name not in directory.entries:
                private[block.name] = block.generation
        for name, generation in private.items():
            yield generation, name

    def listed(self, inode: int) -> None:
        """An entry was handed to the kernel, which holds a reference now."""
        node = self._names.by_inode.get(inode)
        if node is not None:
            node.lookups += 1

    def close(self, number: int) -> None:
        """The listing is no longer needed."""
        self._listings.pop(number, None)
