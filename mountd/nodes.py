"""Blocks, directories and files of `.ctx` by inode: what stat shows, and how long it is so."""

from __future__ import annotations

import os
import stat

from ctxfs.core.block import Block, Directory, Node, State
from ctxfs.core.times import NEVER
from ctxfs.errors import BlockNotFound, NotDirectory, NotPermitted
from ctxfs.store.attributes import Attributes
from ctxfs.store.store import Store
from mountd.control import ControlDirectory
from mountd.redirects import RetryLookup
from mountd.values import PAGE_BYTES, Attr, Lifetimes

SECOND_NS = 1_000_000_000
STAT_BLOCK_BYTES = 512
SEALED_ATTR_S = 1.0
DIRECTORY_S = 1.0  # names of directories, for a channel that cannot take them back
# A block's name is believed until so long before it expires, since nobody knows exactly when
# a lifetime that was told begins.
EXPIRY_MARGIN_NS = 3_000_000_000


class Nodes:
    """What the kernel knows by a number. One for both channels."""

    def __init__(self, store: Store, attributes: Attributes, control: ControlDirectory) -> None:
        self._store = store
        self._content = store.content
        self._catalog = store.catalog
        self._names = store.catalog.names
        self._attributes = attributes
        self._control = control
        self.lifetimes = Lifetimes()  # longer for a channel that can take things back

    def node(self, inode: int) -> Node:
        """Return a block or a directory. Raises RetryLookup for one that is not known.

        The kernel has it from a daemon before this one.
        """
        node = self._names.by_inode.get(inode)
        if node is None:
            raise RetryLookup
        return node

    def directory(self, inode: int) -> Directory:
        """Return a directory of blocks. Raises BlockNotFound, NotDirectory, NotPermitted."""
        if self._control.has(inode):
            raise NotPermitted(".ctx belongs to the daemon")
        node = self._names.by_inode.get(inode)
        if node is None:
            raise BlockNotFound(f"inode {inode}")
        if not isinstance(node, Directory):
            raise NotDirectory(repr(node.name))
        return node

    def attr(self, node: Node) -> Attr:
        """Return what stat shows of a block or a directory."""
        if isinstance(node, Directory):
            return self._directory_attr(node)
        self._content.refresh(node)
        physical = self._attributes.stored_bytes(node)
        sealed = node.state is State.SEALED
        return Attr(
            inode=node.generation,
            mode=stat.S_IFREG | node.mode,
            nlink=0 if node.is_gone else 1,
            uid=node.uid,
            gid=node.gid,
            size=node.size,
            blocks=-(-physical // STAT_BLOCK_BYTES),
            atime_ns=node.atime_ns,
            mtime_ns=node.mtime_ns,
            ctime_ns=node.ctime_ns,
            entry_s=self.name_s(node.directory, node.name, node),
            attr_s=SEALED_ATTR_S if sealed else 0.0,
        )

    def _directory_attr(self, directory: Directory) -> Attr:
        return Attr(
            inode=directory.inode,
            mode=stat.S_IFDIR | directory.mode,
            nlink=0 if directory.removed else 2,
            uid=directory.uid,
            gid=directory.gid,
            size=PAGE_BYTES,
            blocks=0,
            atime_ns=directory.mtime_ns,
            mtime_ns=directory.mtime_ns,
            ctime_ns=directory.mtime_ns,
            entry_s=self._directory_name_s(directory),
            attr_s=self.lifetimes.directories,
        )

    def name_s(self, directory: Directory, name: bytes, node: Node | None) -> float:
        """Return for how long the kernel may believe where a name leads; `node` None: nowhere.

        Names change by themselves, so only where they can be taken back; and while somebody writes
        under a name, it leads elsewhere for that process.
        """
        longest = self.lifetimes.names
        if not longest or self._store.is_private(directory, name):
            return 0.0
        if node is None and self._store.elsewhere is not None:
            return min(longest, self._store.elsewhere.missing_s)
        if isinstance(node, Block):
            if not node.published:
                return 0.0
            if node.expires_ns != NEVER:
                left_ns = node.expires_ns - self._catalog.clock().boot_ns - EXPIRY_MARGIN_NS
                return min(longest, max(0.0, left_ns / SECOND_NS))
        return longest

    def _directory_name_s(self, directory: Directory) -> float:
        if directory.parent is None:
            return 0.0
        if self.lifetimes.names:
            return self.name_s(directory.parent, directory.name, directory)
        return 0.0 if self._goes_as_one(directory) else DIRECTORY_S

    def _goes_as_one(self, directory: Directory | None) -> bool:
        while directory is not None:
            if directory.together:
                return True
            directory = directory.parent
        return False

    def control_attr(self, inode: int) -> Attr:
        """Return what stat shows of `.ctx` or of a file there."""
        file = self._control.by_inode.get(inode)
        mode = file.mode if file is not None else stat.S_IFDIR | 0o755
        now_ns = self._catalog.clock().wall_ns
        uid, gid = os.getuid(), os.getgid()
        links = 1 if file is not None else 2
        return Attr(inode, mode, links, uid, gid, 0, 0, now_ns, now_ns, now_ns, 1.0, 0.0)
