"""The one door for everybody: create, open, read, write, publish, seal, rename, unlink, expire."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass

import trio

from ctxfs.core.block import Block, Directory, Extras, Node, State, Writing
from ctxfs.core.key import check_name, is_lock
from ctxfs.core.meta import Placement
from ctxfs.errors import (
    BlockExists,
    BlockNotFound,
    CtxfsError,
    IsDirectory,
    NotDirectory,
    NotPermitted,
    TierFull,
    TooManyOpen,
)
from ctxfs.store.catalog import Catalog
from ctxfs.store.content import Content
from ctxfs.store.elsewhere import Elsewhere
from ctxfs.store.handle import Handle, Way
from ctxfs.store.lending import Lending
from ctxfs.store.mover import Mover
from ctxfs.store.sealing import Sealing
from ctxfs.store.upkeep import Upkeep
from ctxfs.tiers.hot import HotFile

log = logging.getLogger(__name__)

COPY_BYTES = 8 << 20  # of a block that starts as a copy, per system call


@dataclass(frozen=True, slots=True)
class NewOwner:
    """Whose a new block or directory is."""

    uid: int
    gid: int
    mode: int


class Store:
    """Blocks as programs see them. Errors are CtxfsError; anything else is a bug."""

    def __init__(self, catalog: Catalog, mover: Mover, *, block_bytes_max: int) -> None:
        self.catalog = catalog
        self.mover = mover
        self.lending = Lending(catalog, mover)
        self.sealing = Sealing(catalog, mover, self.lending)
        self.content = Content(
            catalog, mover, self.lending, self.sealing, block_bytes_max=block_bytes_max
        )
        self.upkeep = Upkeep(catalog, mover, self.release)
        self.elsewhere: Elsewhere | None = None  # in a cluster
        self._hot = catalog.hot
        self._nursery: trio.Nursery | None = None

    async def promote(self, block: Block) -> None:
        """Return when the block has a hot copy."""
        block.opens += 1
        try:
            await self.mover.promoter.ensure_hot(block)
        finally:
            block.opens -= 1
            self.catalog.forget_if_unused(block)
            self.mover.moves.lease_ended()

    def prefetch(self, block: Block, *, chain: bool) -> None:
        """Start bringing a block to the hot tier, with `chain` its descendants after it."""
        assert self._nursery is not None
        self._nursery.start_soon(self._prefetch, block, chain)

    async def _prefetch(self, block: Block, chain: bool) -> None:
        wanted = [block, *self._descendants(block)] if chain else [block]
        for each in wanted:
            if each.state is not State.SEALED:
                continue
            try:
                await self.promote(each)
            except CtxfsError as error:
                log.info("prefetch of %r ended: %s", each.name, error)
                return

    def _descendants(self, block: Block) -> list[Block]:
        """Blocks whose chain of parents leads here, the nearest first."""
        names = self.catalog.names
        children: dict[bytes, list[int]] = {}
        for each in names.table.peek_with_extras():
            if each.extras is not None and each.extras.parent:
                children.setdefault(each.extras.parent, []).append(each.generation)
        found = [block]
        for each in found:
            nodes = map(names.by_inode.get, children.pop(names.key_of(each), ()))
            found += [node for node in nodes if isinstance(node, Block)]
        return found[1:]

    async def verify(self, block: Block) -> None:
        """Read every copy again and compare. Raises CopyCorrupt if one was bad (it is dropped)."""
        await self.sealing.wait_sealed(block)
        if block.state is State.SEALED:
            with self.sealing.freeze(block):
                await self.mover.promoter.verify(block)

    def join(self, elsewhere: Elsewhere) -> None:
        """From now on, what is not here may be elsewhere."""
        self.elsewhere = self.mover.promoter.elsewhere = self.upkeep.elsewhere = elsewhere
        self.catalog.last_copy_left = elsewhere.left

    # -- services

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve: seal what was closed, expire what is due, keep the hot journal short."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.sealing.begin(nursery)
            nursery.start_soon(self.upkeep.run)
            nursery.start_soon(self.lending.run)
            task_status.started()
            await trio.sleep_forever()

    # -- names

    def find(self, directory: Directory, name: bytes, owner: int | None) -> Node:
        """Return what a name leads to for this process. Raises BlockNotFound."""
        node = self.look(directory, name, owner)
        if node is None:
            raise BlockNotFound(repr(name))
        return node

    def look(
        self, directory: Directory, name: bytes, owner: int | None, thread: int = 0
    ) -> Node | None:
        """Like `find`; None where there is nothing. Raises NameTooLong, BadValue.

        What was made for an open that did not come yet is for its `thread` alone.
        """
        if owner is not None:
            for block in reversed(self.catalog.names.private_of(directory, name)):
                writing = block.writing
                if writing is None or writing.owner != owner:
                    continue
                if block.opens or writing.opener in (0, thread):
                    return block
        node = self.catalog.names.find(directory, name)
        if node is None:
            check_name(name)
        return node

    def is_private(self, directory: Directory, name: bytes) -> bool:
        """Whether somebody is writing under this name, so that the answer differs by process."""
        return bool(self.catalog.names.private_of(directory, name))

    # -- open and create

    async def create(
        self, directory: Directory, name: bytes, who: NewOwner, owner: int, flags: int
    ) -> Handle:
        """Make and open a new generation under a name, seen by `owner` alone until published."""
        old = self.catalog.names.find(directory, name)
        if isinstance(old, Directory):
            raise IsDirectory(repr(name))
        others = self.catalog.names.private_of(directory, name)
        if flags & os.O_EXCL and (old is not None or any(b.opens for b in others)):
            raise BlockExists(repr(name))
        shared = is_lock(name)
        if shared and old is not None and self.goes_on(old, owner, flags):
            return await self.open_for_write(old, owner, flags)
        base = None if flags & os.O_TRUNC else old
        block = await self.new_generation(directory, name, owner, base=base, who=who)
        if old is None:
            # Not those of one that came while this waited for room.
            block.extras = self.catalog.default_extras(directory)
        self.catalog.record_transient(block)
        self.catalog.counters.creates += 1
        handle = await self._open_writing(block, owner)
        handle.wrote = old is None or bool(flags & os.O_TRUNC)
        if shared:
            self.catalog.publish(block, directory, name)
        return handle

    async def new_generation(
        self,
        directory: Directory,
        name: bytes,
        owner: int,
        *,
        base: Block | None = None,
        who: NewOwner | None = None,
    ) -> Block:
        """Make a private generation; with `base`, one that starts as a copy of it.

        Takes over mode, owner and attributes of what the name leads to now, but for what `who`
        says; the TTL starts over. The caller has it written down (`Catalog.record_transient`).
        """
        if self._hot.is_crowded:
            raise TooManyOpen("too many files are open")
        await self.mover.reserve(1)
        self._hot.unreserve(1)
        block = self.catalog.new_block(directory, name)
        block.writing = Writing(owner, self.catalog.clock().boot_ns, base=base)
        try:
            file = await self._create_file(block)
        except CtxfsError:
            self.catalog.drop(block)
            raise
        block.hot_bytes = 0
        old = self.catalog.names.find(directory, name)
        if isinstance(old, Block):
            block.mode, block.uid, block.gid = old.mode, old.uid, old.gid
            if old.extras is not None:
                block.extras = Extras(
                    old.extras.pin_until_ns,
                    old.extras.placement,
                    old.extras.parent,
                    old.extras.dtype,
                    dict(old.extras.attributes),
                    replicas=old.replicas or block.replicas or 0,
                )
        if who is not None:
            block.mode, block.uid, block.gid = who.mode, who.uid, who.gid
        block.opens += 1
        try:
            if base is not None:
                await self._copy(base, block, file)
        except BaseException:
            block.opens -= 1
            self.mover.moves.release_file(file)
            self.catalog.drop(block)
            raise
        block.opens -= 1
        self.mover.moves.release_file(file)
        return block

    async def _create_file(self, block: Block) -> HotFile:
        try:
            return self._hot.create(block.generation)
        except TierFull:  # empty blocks take no bytes, but inodes of the tmpfs
            await self.mover.free_one()
            return self._hot.create(block.generation)

    async def _copy(self, base: Block, block: Block, file: HotFile) -> None:
        handle = await self.open_for_read(base, owner=-1)
        try:
            self.content.refresh(base)
            self._hot.truncate(file, handle.file.size)
            done = 0
            while done < handle.file.size:
                length = min(COPY_BYTES, handle.file.size - done)
                need = self._hot.growth_ceiling(file, done, length)
                await self.mover.reserve(need, file)
                try:
                    copied = await trio.to_thread.run_sync(
                        os.copy_file_range, handle.file.fd, file.fd, length, done, done
                    )
                finally:
                    self._hot.settle(file)
                    self._hot.unreserve(need)
                if not copied:  # its own writer shortened it meanwhile
                    break
                done += copied
            block.size, block.hot_bytes = file.size, file.physical_bytes
        finally:
            self.release(handle)

    async def open_for_read(self, block: Block, owner: int) -> Handle:
        """Open for reading; a block that is not hot is promoted first. `owner` -1 is ourselves."""
        block.opens += 1
        try:
            was_hot = block.is_hot
            was_warm = self.catalog.is_warm(block)
            if block.is_gone and not block.opens > 1:
                raise BlockNotFound(repr(block.name))
            if self._hot.is_crowded:
                raise TooManyOpen("too many files are open")
            if not was_hot and not block.is_gone:
                await self.mover.promoter.ensure_hot(block)
            try:
                file = self._hot.acquire(block.generation)
            except FileNotFoundError as error:
                if not block.is_gone:  # else it went while it was promoted
                    self.mover.moves.lost_hot(block)
                raise BlockNotFound("its hot file is gone") from error
        except BaseException:
            block.opens -= 1
            self.catalog.forget_if_unused(block)
            raise
        if owner != -1:
            self.used(block, owner, was_hot=was_hot, was_warm=was_warm)
        return Handle(block, file, owner, writable=False)

    def open_hot(self, block: Block, owner: int) -> Handle | None:
        """Open a sealed block that is hot for reading; None: `open_for_read` is to be asked.

        The caller says `used` before anybody gets a turn: who waits for the file need not wait
        for that.
        """
        if not block.is_hot or self._hot.is_crowded:
            return None
        try:
            file = self._hot.acquire(block.generation)
        except FileNotFoundError:
            return None
        block.opens += 1
        return Handle(block, file, owner, writable=False)

    def used(
        self, block: Block, owner: int, *, was_hot: bool = True, was_warm: bool = False
    ) -> None:
        """A process opened it."""
        now = self.catalog.clock()
        block.used_ns, block.atime_ns = now.boot_ns, now.wall_ns
        block.hits += 1
        self.catalog.counters.opens += 1
        if was_hot:
            self.catalog.counters.hits_hot += 1
        elif was_warm:
            self.catalog.counters.hits_warm += 1
        else:
            self.catalog.counters.hits_cold += 1
        self.catalog.hot_order.use(block)
        self.catalog.cold_order.use(block)
        if block.writing is not None and block.writing.owner != owner:
            block.writing.seen = True
        elif self.catalog.fresh.get(block.generation, owner) != owner:
            del self.catalog.fresh[block.generation]

    def resume(
        self, block: Block, owner: int, *, writable: bool, wrote: bool, way: Way
    ) -> Handle | None:
        """Return an open description of the daemon's former life; None if its bytes are lost."""
        try:
            file = self.catalog.acquire(block)
        except FileNotFoundError:
            return None
        block.opens += 1
        handle = Handle(block, file, owner, writable=writable)
        handle.wrote = wrote
        if writable and block.writing is not None:
            block.writing.writers += 1
            block.writing.changed |= wrote
        self.lending.resume(handle, way)
        return handle

    def goes_on(self, block: Block, owner: int, flags: int) -> bool:
        """Whether opening for writing goes on with this generation, or starts a new one.

        It goes on while its own process has it open for writing, or nobody else could see it, or
        nobody else opened it since it was published. A lock file is one and the same to all.
        What was published is never cut: somebody may have it open, or mapped, which nobody tells.
        """
        if block.is_gone:
            return False  # overwritten since its name was looked up; its last close is on its way
        writing = block.writing
        if writing is not None and not block.published:
            return True  # found through its owner's name, or through a descriptor
        is_shared = is_lock(block.name)
        if writing is not None and is_shared:
            return True
        if flags & os.O_TRUNC and not is_shared:
            return False
        if writing is not None and writing.owner == owner:
            return bool(writing.writers) or not writing.seen
        if block.state is not State.SEALED:
            return False
        if self.catalog.is_cold(block) or self.mover.is_moving(block):
            return False
        return is_shared or self.catalog.fresh.get(block.generation) == owner

    async def open_for_write(self, block: Block, owner: int, flags: int) -> Handle:
        """Go on writing a generation for which `goes_on` holds."""
        await self.sealing.thawed(block)
        if block.is_gone:
            raise BlockNotFound(repr(block.name))
        if block.state is State.SEALED:
            if not self.goes_on(block, owner, flags) or not block.is_hot:
                raise NotPermitted("the block is sealed")
            self.catalog.unsealed(block, Writing(owner, self.catalog.clock().boot_ns))
        handle = await self._open_writing(block, owner)
        if flags & os.O_TRUNC:
            handle.wrote = True  # if nothing follows, the block is to be empty
            self.content.refresh(block)
            if block.size:
                await self.content.truncate(handle.block, 0, handle)
        return handle

    async def _open_writing(self, block: Block, owner: int) -> Handle:
        assert block.writing is not None
        file = self._hot.acquire(block.generation)
        block.opens += 1
        block.writing.writers += 1
        return Handle(block, file, owner, writable=True)

    # -- publish, seal, release

    def publish_on_close(self, handle: Handle) -> bool:
        """A descriptor that wrote was closed: its name switches to this generation.

        False where the name is somebody else's by now, and stays so.
        """
        block = handle.block
        self.content.refresh(block)
        writing = block.writing
        if not handle.writable or writing is None or block.published or block.is_gone:
            return True
        if writing.refused_at is not None:
            return True
        if not block.directory.removed and (handle.wrote or writing.changed):
            if not self._may_take_name(block):
                return False
            self.catalog.publish(block, block.directory, block.name)
        return True

    def _may_take_name(self, block: Block) -> bool:
        """Whether a sticky directory lets a block's owner replace what its name leads to.

        The kernel asks when a file is opened or renamed; this one was begun before the other came.
        """
        old = self.catalog.names.find(block.directory, block.name)
        if old is None or not block.directory.mode & stat.S_ISVTX:
            return True
        return block.uid in (0, old.uid, block.directory.uid)

    def release(self, handle: Handle) -> None:
        """The open description is gone: give up the lease; seal after the last writer."""
        block = handle.block
        block.opens -= 1
        self.content.refresh(block)
        self.lending.ended(handle)
        writing = block.writing
        if handle.writable and writing is not None:
            writing.writers -= 1
            if not writing.writers:
                self.sealing.last_writer_gone(block, writing, handle.file)
        self.mover.moves.release_file(handle.file)
        self.catalog.forget_if_unused(block)
        if not block.opens:
            self._let_go(block)
        self.mover.moves.lease_ended()

    def _let_go(self, block: Block) -> None:
        if (
            block.state is State.SEALED
            and block.is_hot
            and (
                (block.placement is Placement.COLD and self.catalog.is_cold(block))
                or (block.placement is Placement.WARM and self.catalog.is_warm(block))
            )
        ):
            self.catalog.drop_hot(block)

    # -- names change

    def rename(
        self, source: Block, directory: Directory, name: bytes, *, replace: bool = True
    ) -> None:
        """Give a block another name, published from here on. Takes over what was there."""
        old = self.catalog.names.find(directory, name)
        if old is not None and not replace:
            raise BlockExists(repr(name))
        self.content.refresh(source)
        if source.writing is not None and source.writing.refused_at is not None:
            raise TierFull("a write to this block had no room")
        if old is not source:
            self.catalog.publish(source, directory, name)
            self.mover.moves.lease_ended()  # what was temporary may go for room now

    def exchange(self, first: Block, second: Block) -> None:
        """Swap the names of two published blocks."""
        places = (first.directory, first.name), (second.directory, second.name)
        for block in (first, second):
            self.catalog.key_deleted(self.catalog.names.key_of(block), block)
        self.catalog.names.unname(first)
        self.catalog.names.unname(second)
        self.catalog.publish(first, *places[1])
        self.catalog.publish(second, *places[0])

    def unlink(self, directory: Directory, name: bytes, owner: int) -> None:
        """Take the name away; the content lasts as long as somebody has it open."""
        private = [
            block
            for block in self.catalog.names.private_of(directory, name)
            if block.writing is not None and block.writing.owner == owner
        ]
        node = self.catalog.names.find(directory, name)
        if isinstance(node, Directory):
            raise IsDirectory(repr(name))
        if node is None and not private:
            check_name(name)
            raise BlockNotFound(repr(name))
        for block in private:
            self.catalog.drop(block)
        if node is not None:
            self.catalog.tell("removed", node)
            self.catalog.key_deleted(self.catalog.names.key_of(node), node)
            self.catalog.drop(node)
        self.mover.moves.lease_ended()

    def make_directory(self, parent: Directory, name: bytes, who: NewOwner) -> Directory:
        """Make an empty prefix. Raises BlockExists."""
        directory = self.catalog.make_directory(parent, name)
        directory.mode, directory.uid, directory.gid = who.mode, who.uid, who.gid
        self.catalog.record_directory(directory)
        self.catalog.directory_made(directory)
        return directory

    def remove_directory(self, parent: Directory, name: bytes) -> None:
        """Take away an empty prefix. Raises BlockNotFound, NotDirectory, DirectoryNotEmpty."""
        node = self.catalog.names.find(parent, name)
        if node is None:
            raise BlockNotFound(repr(name))
        if not isinstance(node, Directory):
            raise NotDirectory(repr(name))
        path = self.catalog.names.key_of(node)
        self.catalog.remove_directory(node)
        self.catalog.directory_removed(path)
