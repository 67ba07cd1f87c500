"""What a file system call means for blocks. Knows no channel: plain values in and out.

Every method raises CtxfsError for what a program is to see, or RetryLookup.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable

from ctxfs.core.block import Block, Directory, Node, State
from ctxfs.core.key import NAME_BYTES_MAX
from ctxfs.core.namespace import ROOT_INODE
from ctxfs.errors import (
    BadValue,
    BlockExists,
    BlockNotFound,
    CopyCorrupt,
    CtxfsError,
    DeadlineExceeded,
    DeviceError,
    DirectoryNotEmpty,
    IsDirectory,
    NoAttribute,
    NotDirectory,
    NotPermitted,
    NotYours,
    PeerError,
    TierFull,
    TierTrouble,
)
from ctxfs.store.attributes import Attributes
from ctxfs.store.handle import Handle
from ctxfs.store.store import NewOwner, Store
from mountd import process
from mountd.alertness import Alertness
from mountd.control import DIRECTORY_INODE, DIRECTORY_NAME, ControlDirectory
from mountd.deadlines import Deadlines
from mountd.listings import Listings
from mountd.nodes import Nodes
from mountd.openfiles import Opened, OpenFiles
from mountd.permissions import R_BIT, W_BIT, groups_of, may
from mountd.redirects import Redirects, RetryLookup
from mountd.session import OpenFile, Session
from mountd.values import PAGE_BYTES, WRITES, Attr, Caller, Missing, SetAttr, Space

log = logging.getLogger(__name__)

TIME_NS_MAX = 2**63 - 1  # what is written down: from the year 1677 to 2262
TROUBLE = (DeadlineExceeded, DeviceError, PeerError, TierFull, TierTrouble)
_NO_BLOCKS = {DIRECTORY_NAME, b"", b".", b".."}


class CrossDirectory(CtxfsError):
    """A directory with keys beneath cannot be renamed: its blocks' keys would all change."""

    code = errno.EXDEV  # mv copies instead


class Operations:
    """One for both channels."""

    def __init__(
        self,
        store: Store,
        attributes: Attributes,
        control: ControlDirectory,
        deadlines: Deadlines,
        alertness: Alertness,
        *,
        trouble_is_error: bool,
        session: Session | None = None,
    ) -> None:
        """`session`: where open files are written down for a daemon that takes over."""
        self._store = store
        self.catalog = self._catalog = store.catalog
        self._names = store.catalog.names
        self._attributes = attributes
        self._control = control
        self.nodes = Nodes(store, attributes, control)
        self.files = OpenFiles(store, control, session)
        # Numbers of directories must not come twice in a mount's life, but are not written down.
        first = 1 if session is None else self._catalog.clock().boot_ns
        self.listings = Listings(self._names, self.nodes, control, first)
        self.deadlines = deadlines  # of the requests that the channel has put to sleep
        self.alertness = alertness  # is told by the channel how many there are
        self._session = session
        self.trouble_is_error = trouble_is_error
        self._redirects = Redirects(store, session)
        self._unnoted: list[Handle] = []

    # -- names and attributes

    def lookup(self, parent: int, name: bytes, caller: Caller) -> Attr:
        """Find a name. Counts one reference of the kernel."""
        found = self.find(parent, name, caller)
        if isinstance(found, Missing):
            raise BlockNotFound(repr(name))
        return found

    async def lookup_everywhere(self, parent: int, name: bytes, caller: Caller) -> Attr:
        """Like `lookup`, after others were asked, if need be."""
        found = self.find(parent, name, caller)
        if isinstance(found, Missing) and self.may_be_elsewhere(parent, name):
            found = await self.find_everywhere(parent, name, caller)
        if isinstance(found, Missing):
            raise BlockNotFound(repr(name))
        return found

    async def find_everywhere(self, parent: int, name: bytes, caller: Caller) -> Attr | Missing:
        """Like `find`, after others were asked."""
        directory = self._names.by_inode.get(parent)
        if isinstance(directory, Directory) and self._store.elsewhere is not None:
            await self._store.elsewhere.search(directory, name)
        return self.find(parent, name, caller)

    def may_be_elsewhere(self, parent: int, name: bytes) -> bool:
        """Whether other hosts are to be asked before a name leads nowhere."""
        directory = self._names.by_inode.get(parent)
        elsewhere = self._store.elsewhere
        if elsewhere is None or not isinstance(directory, Directory):
            return False
        return elsewhere.is_worth_asking(directory, name)

    def find(self, parent: int, name: bytes, caller: Caller) -> Attr | Missing:
        """Like `lookup`, where a name that leads nowhere is nothing out of the ordinary."""
        directory = self._names.by_inode.get(parent)
        if not isinstance(directory, Directory):
            return self._find_in_control(parent, name)
        if directory is self._names.root and name == DIRECTORY_NAME:
            return self.nodes.control_attr(DIRECTORY_INODE)
        owner = None
        if self._store.is_private(directory, name):
            owner = process.process_of(caller.pid)
        node = self._store.look(directory, name, owner, caller.pid)
        self._redirects.looked_up(caller.pid, (directory, name), node)
        if node is None:
            self._catalog.counters.misses += 1
            return Missing(self.nodes.name_s(directory, name, None))
        node.lookups += 1
        return self.nodes.attr(node)

    def is_nothing(self, parent: int, name: bytes, thread: int) -> bool:
        """Whether a name surely leads nowhere, for anybody, and that is all there is to say of it:
        half of `find` is about what may be there. Counts a miss."""
        directory = self._names.by_inode.get(parent)
        if (
            not isinstance(directory, Directory)
            or self._names.find(directory, name) is not None
            or self._store.is_private(directory, name)
            or self._store.elsewhere is not None
            or thread in self._redirects
            or len(name) > NAME_BYTES_MAX
            or name in _NO_BLOCKS
        ):
            return False
        self._catalog.counters.misses += 1
        return True

    def is_private(self, inode: int) -> bool:
        """Whether a block is found by name by its writer alone."""
        node = self._names.by_inode.get(inode)
        return isinstance(node, Block) and not node.published and not node.is_gone

    def is_gone(self, inode: int) -> bool:
        """Whether no name leads to a block any more, and its bytes go with its last open."""
        node = self._names.by_inode.get(inode)
        return not isinstance(node, Block) or node.is_gone

    def is_written_under(self, parent: int, name: bytes) -> bool:
        """Whether a name leads elsewhere for somebody who writes under it."""
        directory = self._names.by_inode.get(parent)
        return isinstance(directory, Directory) and self._store.is_private(directory, name)

    def _find_in_control(self, parent: int, name: bytes) -> Attr:
        if parent != DIRECTORY_INODE:
            self.nodes.directory(parent)  # raises what is wrong with it
        file = self._control.by_name.get(name)
        if file is None:
            raise BlockNotFound(repr(name))
        return self.nodes.control_attr(file.inode)

    def forget(self, inode: int, count: int) -> None:
        """The kernel gave up references."""
        node = self._names.by_inode.get(inode)
        if node is not None:
            node.lookups = max(0, node.lookups - count)
            self._catalog.forget_if_unused(node)

    def getattr(self, inode: int) -> Attr:
        """Stat."""
        node = self._names.by_inode.get(inode)
        if node is not None:
            return self.nodes.attr(node)
        if self._control.has(inode):
            return self.nodes.control_attr(inode)
        raise RetryLookup

    async def setattr(
        self, inode: int, change: SetAttr, handle: int | None, caller: Caller
    ) -> Attr:
        """Chmod, chown, utimens and truncate."""
        if self._control.has(inode):
            raise NotPermitted(".ctx belongs to the daemon")
        node = self.nodes.node(inode)
        if isinstance(node, Block):
            self._store.content.refresh(node)
        if change.size is not None:
            if isinstance(node, Directory):
                raise IsDirectory(repr(node.name))
            await self._set_size(node, change.size, handle, caller)
        before = node.mode, node.uid, node.gid, node.mtime_ns
        if change.mode is not None:
            node.mode = stat.S_IMODE(change.mode)
        node.uid = node.uid if change.uid is None else change.uid
        node.gid = node.gid if change.gid is None else change.gid
        now_ns = self._catalog.clock().wall_ns
        if change.mtime_ns is not None:
            node.mtime_ns = _in_range(change.mtime_ns)
            if isinstance(node, Block) and node.writing is not None:
                node.writing.time_given = True
        if isinstance(node, Directory):
            self._catalog.record_directory(node)
            return self.nodes.attr(node)
        node.ctime_ns = now_ns
        if change.atime_ns is not None:
            node.atime_ns = _in_range(change.atime_ns)
        if (node.mode, node.uid, node.gid, node.mtime_ns) != before:
            self._catalog.amend(node)
        else:  # when it was used is of this host alone
            self._catalog.record_change(node)
        return self.nodes.attr(node)

    def kill_privileges(self, inode: int) -> None:
        """Somebody without the right to keep them changed the file: setuid and setgid go."""
        node = self._names.by_inode.get(inode)
        if isinstance(node, Block):
            node.mode &= ~stat.S_ISUID
            if node.mode & stat.S_IXGRP:
                node.mode &= ~stat.S_ISGID

    async def _set_size(self, block: Block, size: int, handle: int | None, caller: Caller) -> None:
        opened = self.files.writer(handle)
        if opened is not None:
            await self._store.content.truncate(opened.block, size, opened)
            return
        owner = process.process_of(caller.pid)
        if block.writing is not None and self._store.goes_on(block, owner, 0):
            await self._store.content.truncate(block, size)
            return
        if size == block.size:
            return
        # truncate(2) of a sealed block: a new generation with that length takes the name. Those
        # who have the old one open keep it, so the answer is about the old one, unchanged.
        base = self._names.find(block.directory, block.name) if block.is_gone else block
        if not isinstance(base, Block):
            raise BlockNotFound(repr(block.name))
        if base is not block and not may(base, W_BIT, caller.uid, groups_of(caller)):
            raise NotYours("the name was taken by somebody else meanwhile")
        new = await self._store.new_generation(block.directory, block.name, owner, base=base)
        writer = await self._store.open_for_write(new, owner, 0)
        try:
            await self._store.content.truncate(new, size, writer)
            self._store.publish_on_close(writer)
        finally:
            self._store.release(writer)

    # -- files

    def resume(self) -> list[OpenFile]:
        """Take over from the daemon before this one; returns the files that are open."""
        self._redirects.resume()
        return self.files.resume()

    def is_marked(self, request: int) -> bool:
        """Whether the effect of this request was written down before the daemon was replaced."""
        return self._session is not None and self._session.is_marked(request)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[int, Attr]:
        """Make and open a block."""
        directory = self.nodes.directory(parent)
        if parent == ROOT_INODE and name == DIRECTORY_NAME:
            raise BlockExists(".ctx belongs to the daemon")
        old = self._names.find(directory, name)
        if isinstance(old, Block) and not flags & os.O_EXCL:
            # It came after the kernel looked, so nobody has asked for permission yet.
            groups = groups_of(caller)
            if not all(may(old, bit, caller.uid, groups) for bit in (R_BIT, W_BIT)):
                raise NotYours("the name was taken by somebody else meanwhile")
        owner = process.process_of(caller.pid)
        who = self._new_owner(directory, mode, caller)
        self._redirects.end(caller.pid)
        handle = await self._store.create(directory, name, who, owner, flags)
        handle.block.lookups += 1
        opened = Opened(handle, newest_pid=_newest_pid(caller))
        number = self.files.add(opened, handle.block.generation, caller)
        return number, self.nodes.attr(handle.block)

    def _new_owner(self, parent: Directory, mode: int, caller: Caller) -> NewOwner:
        gid = parent.gid if parent.mode & stat.S_ISGID else caller.gid
        return NewOwner(caller.uid, gid, stat.S_IMODE(mode))

    async def make_file(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attr:
        """Mknod: an empty block, published at once; anything but a file is not for us."""
        if not stat.S_ISREG(mode):
            raise NotPermitted("only files and directories live here")
        number, _ = await self.create(parent, name, mode, os.O_EXCL | os.O_WRONLY, caller)
        handle = self.files.get(number).handle
        assert handle is not None
        self._store.publish_on_close(handle)
        self.files.release(number)
        return self.nodes.attr(handle.block)

    def open_at_once(self, inode: int, thread: int) -> Handle | None:
        """Open a sealed hot block for reading, as most opens do; None where `open` is to be asked.

        Most of the time of `open` goes into what is only to be asked elsewhere. The caller numbers
        it, or gives it to `not_opened`.
        """
        node = self._names.by_inode.get(inode)
        if (
            not isinstance(node, Block)
            or node.state is not State.SEALED
            or thread in self._redirects
        ):
            return None
        handle = self._store.open_hot(node, self._reader(node, thread))
        if handle is not None:
            self._unnoted.append(handle)
        return handle

    def not_opened(self, handle: Handle) -> None:
        """There is no room for what `open_at_once` returned."""
        self._unnoted.remove(handle)
        self._store.release(handle)

    def note_opens(self) -> None:
        """Note that blocks were used; to be called when `open_at_once` was answered."""
        while self._unnoted:
            handle = self._unnoted.pop()
            self._store.used(handle.block, handle.owner)

    async def open(self, inode: int, flags: int, caller: Caller) -> tuple[int, bool]:
        """Open a file; returns the handle and whether it is to bypass the page cache."""
        control = self._control.by_inode.get(inode)
        writes = flags & WRITES
        if control is not None:
            if writes:
                raise NotPermitted(".ctx can only be read")
            return self.files.add(Opened(reader=control.open()), inode, caller), True
        node = self._names.by_inode.get(inode)
        if node is None:  # the kernel has it from a daemon before us: it leads elsewhere by now
            if self._redirects.take(caller, None) is not None:
                raise BlockNotFound(f"inode {inode}")
            self._redirects.begin(caller, None)
        if isinstance(node, Directory):
            raise IsDirectory(repr(node.name))
        if writes:
            handle = await self._open_for_write(node, flags, caller)
            opened = Opened(handle, newest_pid=_newest_pid(caller))
            return self.files.add(opened, inode, caller), False
        before = self._redirects.take(caller, node)
        if node.is_gone and not node.opens and before is None:
            self._redirects.begin(caller, node)  # its name may lead to another block
        owner = self._reader(node, caller.pid)
        try:
            handle = await self._store.open_for_read(node, owner)
        except CtxfsError as error:
            shown = self._trouble(node, error)
            if isinstance(shown, BlockNotFound) and node.is_gone and before is None:
                self._redirects.begin(caller, node)  # its name may lead to another block by now
            raise shown from error
        finally:
            if before is not None and before.held is not None:
                self._store.upkeep.let_go(before.held)
        return self.files.add(Opened(handle), inode, caller), False

    def _reader(self, block: Block, thread: int) -> int:
        """Return who reads; asked of /proc only where it matters."""
        writing = block.writing
        owner = writing.owner if writing is not None else self._catalog.fresh.get(block.generation)
        if owner is None:
            return 0
        # The first thread of a process has its number, and most have no other.
        return owner if owner == thread else process.process_of(thread)

    def _trouble(self, block: Block, error: CtxfsError) -> CtxfsError:
        """Return what a program sees of an error. That a tier failed is counted apart."""
        if not isinstance(error, TROUBLE):
            return error
        self._catalog.counters.trouble += 1
        self._catalog.tell("trouble", block, error=str(error))
        log.warning("open of %r: %s", block.name, error)
        # Memory of a copy that is gone is no use to anybody; the store dropped it already.
        if not self.trouble_is_error or isinstance(error, CopyCorrupt):
            return BlockNotFound(str(error))
        return error

    async def _open_for_write(self, block: Block, flags: int, caller: Caller) -> Handle:
        owner = process.process_of(caller.pid)
        before = self._redirects.take(caller, block)
        if self._store.goes_on(block, owner, flags):
            await self._store.sealing.thawed(block)
            if self._store.goes_on(block, owner, flags):
                return await self._store.open_for_write(block, owner, flags)
        if before is not None and before.block is block:
            # The kernel came back to the same inode: it was reached through a descriptor.
            if before.instead is not None:
                self._store.upkeep.discard_unopened(before.instead)
            raise NotPermitted("the block is sealed; open it by its name to write it anew")
        base: Node | None = block
        if block.is_gone:  # overwritten or unlinked between lookup and open
            base = self._names.find(block.directory, block.name)
            # Who truncates would most likely create, too. Sent back, it might find the name taken
            # by somebody else, and could not be sent back again.
            creates = flags & os.O_TRUNC and not block.directory.removed
            if base is None and before is None and not creates:
                self._redirects.begin(caller, block)
        if before is not None:
            raise BlockNotFound("its name was given away twice while it was opened")
        if flags & os.O_TRUNC or not isinstance(base, Block):
            base = None
        new = await self._store.new_generation(block.directory, block.name, owner, base=base)
        assert new.writing is not None
        new.writing.opener = caller.pid
        self._catalog.record_transient(new)
        self._redirects.begin(caller, block, new)

    async def fsync_directory(self) -> None:
        """Return when names and attributes are on the cold tier's medium."""
        await self._store.sealing.sync_names()

    # -- names

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attr:
        """Make a prefix."""
        directory = self.nodes.directory(parent)
        who = self._new_owner(directory, mode, caller)
        if directory.mode & stat.S_ISGID:
            who = NewOwner(who.uid, who.gid, who.mode | stat.S_ISGID)
        made = self._store.make_directory(directory, name, who)
        made.lookups += 1
        return self.nodes.attr(made)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Take away an empty prefix."""
        directory = self.nodes.directory(parent)
        if directory is self._names.root and name == DIRECTORY_NAME:
            raise NotPermitted(".ctx belongs to the daemon")
        self._store.remove_directory(directory, name)

    def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        """Take a name away."""
        directory = self.nodes.directory(parent)
        owner = process.process_of(caller.pid) if self._store.is_private(directory, name) else 0
        self._store.unlink(directory, name, owner)

    def lie_elsewhere(self, *places: tuple[int, bytes]) -> bool:
        """Whether names (parent and name) lead to blocks that only others have: `bring_here`."""
        return bool(self._catalog.elsewhere and self._elsewhere_only(places))

    def has_promised(self, *places: tuple[int, bytes]) -> bool:
        """Whether one who renames these is to wait for other hosts: `keep_promise` afterwards."""
        sealing = self._store.sealing
        if not sealing.has_promises:
            return False
        return any(sealing.has_promised(block) for block in self._blocks_at(places))

    async def keep_promise(self, *places: tuple[int, bytes]) -> None:
        """Return when what was synced, and has these names now, is where it is to be."""
        for block in self._blocks_at(places):
            await self._store.sealing.keep_promise(block)

    async def bring_here(self, *places: tuple[int, bytes]) -> None:
        """Fetch what these names lead to, before they change: others know it by these alone."""
        for block in self._elsewhere_only(places):
            await self._store.promote(block)

    def _elsewhere_only(self, places: Iterable[tuple[int, bytes]]) -> list[Block]:
        return [
            block
            for block in self._blocks_at(places)
            if block.generation in self._catalog.elsewhere and not self._catalog.is_here(block)
        ]

    def _blocks_at(self, places: Iterable[tuple[int, bytes]]) -> list[Block]:
        found = []
        for parent, name in places:
            directory = self._names.by_inode.get(parent)
            node = self._names.find(directory, name) if isinstance(directory, Directory) else None
            if isinstance(node, Block):
                found.append(node)
        return found

    def rename(
        self,
        old_parent: int,
        old_name: bytes,
        new_parent: int,
        new_name: bytes,
        caller: Caller,
        *,
        replace: bool,
        exchange: bool,
    ) -> None:
        """Rename; of a block that is being written, this publishes it."""
        source_in, target_in = self.nodes.directory(old_parent), self.nodes.directory(new_parent)
        ends = (old_parent, old_name), (new_parent, new_name)
        if (ROOT_INODE, DIRECTORY_NAME) in ends:
            raise NotPermitted(".ctx belongs to the daemon")
        owner = None
        if self._store.is_private(source_in, old_name):
            owner = process.process_of(caller.pid)
        source = self._store.find(source_in, old_name, owner)
        if exchange:
            target = self._store.find(target_in, new_name, None)
            if isinstance(source, Directory) or isinstance(target, Directory):
                raise CrossDirectory("only blocks can be exchanged")
            self._store.exchange(source, target)
        elif isinstance(source, Directory):
            self._rename_directory(source, target_in, new_name, replace=replace)
        else:
            self._store.rename(source, target_in, new_name, replace=replace)

    def _rename_directory(
        self, source: Directory, parent: Directory, name: bytes, *, replace: bool
    ) -> None:
        if source.entries or self._catalog.versions is not None:
            # In a cluster, nobody knows whether others have keys beneath it.
            raise CrossDirectory("a directory with keys beneath keeps its name")
        target = self._names.find(parent, name)
        if target is source:
            return
        if target is not None:
            if not replace:
                raise BlockExists(repr(name))
            if not isinstance(target, Directory):
                raise NotDirectory(repr(name))
            if target.entries:
                raise DirectoryNotEmpty(repr(name))
            self._catalog.remove_directory(target)
        was_at = self._names.key_of(source)
        self._names.move_directory(source, parent, name)
        self._catalog.record_directory(source)
        self._catalog.directory_removed(was_at)
        self._catalog.directory_made(source)

    # -- the file system

    def statfs(self) -> Space:
        """Capacity and free physical bytes over the local tiers."""
        hot = self._catalog.hot
        total = hot.capacity_bytes
        free = max(0, hot.room_bytes)
        if self._catalog.warm is not None:
            total += self._catalog.warm.capacity_bytes
            free += max(0, self._catalog.warm.room_bytes)
        if self._catalog.cold is not None:
            for device in self._catalog.cold.statistics():
                total += device.capacity_bytes
                free += device.free_bytes
        return Space(total // PAGE_BYTES, free // PAGE_BYTES, self._catalog.block_count)

    # -- extended attributes

    def _attributed(self, inode: int) -> Node:
        if self._control.has(inode):
            raise NotPermitted(".ctx belongs to the daemon")
        return self.nodes.node(inode)

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return the value of an attribute."""
        if not name.startswith(b"user.") or self._control.has(inode):
            raise NoAttribute(os.fsdecode(name))
        return self._attributes.get(self.nodes.node(inode), name)

    def listxattr(self, inode: int) -> list[bytes]:
        """Return the names of attributes that are set."""
        if self._control.has(inode):
            return []
        return self._attributes.names(self.nodes.node(inode))

    async def setxattr(self, inode: int, name: bytes, value: bytes, caller: Caller) -> None:
        """Set an attribute; moves are done when this returns."""
        if self._control.has(inode):
            await self._control.set_attribute(inode, name, value, caller.uid)
            return
        node = self.nodes.node(inode)
        try:
            await self._attributes.set(node, name, value)
        except BadValue as error:
            log.warning("setxattr on %r: %s", node.name, error)
            raise

    async def removexattr(self, inode: int, name: bytes) -> None:
        """Take an attribute away."""
        await self._attributes.remove(self._attributed(inode), name)


def _newest_pid(caller: Caller) -> int:
    """Return the newest process; 0 where the channel will say who closes, and it is not needed."""
    return 0 if caller.request else process.newest_pid()


def _in_range(time_ns: int) -> int:
    """Return a time, or the nearest that can be kept, as other file systems do."""
    return max(-TIME_NS_MAX, min(TIME_NS_MAX, time_ns))
