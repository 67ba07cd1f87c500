"""The index: every block and directory, where its copies are, and that it is written down.

Nothing here awaits, so each call is one step for everybody else.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from ctxfs.core.block import NOT_HOT, Block, Directory, Extras, Node, State, Writing
from ctxfs.core.columns import U64
from ctxfs.core.eviction import Lru
from ctxfs.core.expiry import ExpiryQueue
from ctxfs.core.key import is_lock
from ctxfs.core.meta import (
    NOT_REFUSED,
    BlockMeta,
    DirectoryMeta,
    Drop,
    Entry,
    JournalEntry,
    MakeDirectory,
    Put,
    RemoveDirectory,
    Transient,
    TransientFlag,
)
from ctxfs.core.namespace import Namespace
from ctxfs.core.times import NEVER, Now
from ctxfs.core.versions import VersionClock
from ctxfs.store.counters import Counters
from ctxfs.store.events import Events
from ctxfs.tiers.cold import ColdTier
from ctxfs.tiers.hot import HotFile, HotTier
from ctxfs.tiers.warm import WarmTier

FIRST_GENERATION = 1024  # inode numbers below are the daemon's own
FRESH_MAX = 4096  # sealed blocks whose writer may still go on with them


class Clock(Protocol):
    """Where the time comes from."""

    def __call__(self) -> Now: ...


class Catalog:
    """Blocks by name and by inode, in the order in which they leave each tier."""

    def __init__(
        self,
        clock: Clock,
        hot: HotTier,
        cold: ColdTier | None,
        events: Events,
        counters: Counters,
        warm: WarmTier | None = None,
    ) -> None:
        self.clock = clock
        self.hot = hot
        self.warm = warm
        self.cold = cold
        self.events = events
        self.counters = counters
        self.names = Namespace()
        self.hot_order = Lru(self.names.table)
        self.warm_order = Lru(self.names.table)
        self.warm_content_bytes = 0  # what the blocks in the warm tier are, inflated
        self.cold_order = Lru(self.names.table)
        self.expiry = ExpiryQueue(self.names.table.all_deadlines)
        self.expiry_changed: Callable[[], None] = lambda: None
        # For who has told others where a name (directory's inode, name) leads, or what the
        # attributes of an inode are. A block that changes name, copies or attributes is told of.
        self.name_changed: Callable[[int, bytes], None] = lambda directory, name: None
        self.attributes_changed: Callable[[int], None] = lambda inode: None
        # For who has handed out the hot file of a generation, which goes now.
        self.hot_goes: Callable[[int], None] = lambda generation: None
        self.default_ttl_ns = 0  # where no directory says otherwise; 0: none
        self.keeps_transients = False  # a mount may outlive us: docs/direct.md
        # In a cluster (docs/cluster.md): what issues numbers that nobody else does, and who is
        # told that a block is there to be sent, or that a key was deleted.
        self.versions: VersionClock | None = None
        self.block_sealed: Callable[[Block], None] = lambda block: None
        self.key_deleted: Callable[[bytes, Block], None] = lambda key, block: None
        # The same where attributes changed that others are to know.
        self.block_amended: Callable[[Block], None] = lambda block: None
        # The same where it expired, with attributes that not all may have heard of.
        self.block_expired: Callable[[bytes, Block], None] = lambda key, block: None
        # The same of directories, which others find by a sign (ctxfs/store/elsewhere.py).
        self.directory_made: Callable[[Directory], None] = lambda directory: None
        self.directory_removed: Callable[[bytes], None] = lambda path: None
        # Blocks of which there is no copy here, or none that is to be kept: version and holders.
        self.elsewhere: dict[int, tuple[str, ...]] = {}
        self.last_copy_left: Callable[[Block], None] = lambda block: None  # of those
        self.memory_outlived = False  # the daemon before us, so that all its changes are known
        self.block_count = 0
        self.writing_count = 0
        self.next_generation = FIRST_GENERATION
        self.next_stamp = 1
        # Sealed, and nobody but the process that wrote it opened it since: generation → process.
        self.fresh: OrderedDict[int, int] = OrderedDict()
        # What fsync put on the cold tier of a block that was still being written: the content as
        # it was then, under a generation of its own (a *shadow*), until the sealed block is there.
        self.shadows: dict[int, BlockMeta] = {}  # generation of the block → its shadow
        self._shadow_metas: dict[int, BlockMeta] = {}  # generation of the shadow → the same
        # What lost its name to a generation that is not sealed yet: since when, and the blocks.
        self._replaced: dict[int, tuple[int, list[Block]]] = {}
        self._kept: set[int] = set()  # the generations of these blocks
        # Invariant: sealed blocks with a hot copy are in hot_order, those with a warm one in
        # warm_order, those the cold tier holds in cold_order; writing and gone blocks are in none.

    # -- numbers

    def new_generation(self) -> int:
        """Return a number no content ever had."""
        if self.versions is not None:
            return self.new_version()
        self.next_generation += 1
        return self.next_generation - 1

    def new_version(self) -> int:
        """Return one that nobody in the cluster has, and is above all that were seen."""
        assert self.versions is not None
        return self.versions.next(self.clock().wall_ns // 1000)

    def new_stamp(self) -> int:
        """Return a number higher than that of any change before."""
        self.next_stamp += 1
        return self.next_stamp - 1

    # -- writing down

    def record(self, block: Block) -> None:
        """Write down a sealed block after a change of its attributes or name."""
        self.attributes_changed(block.generation)
        block.stamp = self.new_stamp()
        entry = Put(block.meta(self.names.key_of(block), self.clock()))
        self.hot.record(entry)
        if self.cold is not None and self.cold.holds(block.generation):
            self.cold.note(entry)

    def record_change(self, block: Block) -> None:
        """Write down whatever state a block is in."""
        if block.state is State.SEALED:
            self.record(block)
        else:
            self.record_transient(block)

    def amend(self, block: Block) -> None:
        """Write down a block whose attributes changed, all of which travel: others are told."""
        is_shared = block.state is State.SEALED and block.published and not is_lock(block.name)
        if self.versions is None or not is_shared:
            self.record_change(block)
            return
        block.more().revision = self.new_version()
        self.record(block)
        self.block_amended(block)

    def record_transient(self, block: Block) -> None:
        """Write down a block that is being written, or is gone and open, for the next daemon."""
        if self.keeps_transients and block.generation not in self._kept:
            block.stamp = self.new_stamp()
            self.hot.record(self._transient(block))

    def _transient(self, block: Block) -> Transient:
        flags = TransientFlag(0)
        if block.published:
            flags |= TransientFlag.PUBLISHED
        if block.is_gone:
            flags |= TransientFlag.GONE
        meta = block.meta(self.names.key_of(block), self.clock())
        writing = block.writing
        if writing is None:
            return Transient(meta, 0, flags)
        if writing.seen:
            flags |= TransientFlag.SEEN
        if writing.time_given:
            flags |= TransientFlag.TIME_GIVEN
        base = writing.base.generation if writing.base is not None else 0
        refused = NOT_REFUSED if writing.refused_at is None else writing.refused_at
        opener = 0 if block.opens else writing.opener
        known = self.shadows.get(block.generation)
        shadow = known.generation if known is not None else 0
        return Transient(meta, writing.owner, flags, opener, base, refused, shadow, writing.coming)

    def record_directory(self, directory: Directory) -> None:
        """Write down a directory after a change."""
        self.attributes_changed(directory.inode)
        directory.stamp = self.new_stamp()
        self._record_everywhere(MakeDirectory(directory.meta(self.names.key_of(directory))))

    def _record_everywhere(self, entry: Entry) -> None:
        self.hot.record(entry)
        if self.cold is not None:
            self.cold.note(entry)

    def describe(self, generation: int) -> BlockMeta | None:
        """Return what is to be written down of a live block; None for any other."""
        block = self.names.by_inode.peek(generation)
        if not isinstance(block, Block) or block.state is not State.SEALED:
            return self._shadow_metas.get(generation)
        return block.meta(self.names.key_of(block), self.clock())

    def describe_directory(self, inode: int) -> DirectoryMeta | None:
        """Return what is to be written down of a live directory; None for any other."""
        directory = self.names.by_inode.get(inode)
        if not isinstance(directory, Directory) or directory.removed or not directory.stamp:
            return None
        return directory.meta(self.names.key_of(directory))

    def journal_beginning(self) -> Iterator[JournalEntry]:
        """Yield what a rewritten hot journal must hold beside the sealed blocks in memory."""
        for directory in self.names.by_inode.directories.values():
            if directory.stamp and not directory.removed:
                yield MakeDirectory(directory.meta(self.names.key_of(directory)))
        now = self.clock()
        for _, waiting in self._replaced.values():
            yield from (Put(old.meta(self.names.key_of(old), now)) for old in waiting)
        if self.keeps_transients:
            for block in self.names.table.awake.values():
                if block.state is not State.SEALED and block.generation not in self._kept:
                    yield self._transient(block)

    def journal_entries(self, generations: Iterable[int]) -> Iterator[JournalEntry]:
        """Yield what it must hold of those of the generations that are in memory now, sealed."""
        now = self.clock()
        for generation in generations:
            block = self.names.by_inode.peek(generation)
            if not isinstance(block, Block) or block.state is not State.SEALED:
                continue
            if block.is_hot or self.is_warm(block):
                yield Put(block.meta(self.names.key_of(block), now))

    def in_memory(self) -> U64:
        """Return the generations of blocks that are hot, then of those that are warm alone.

        The most recently used come first.
        """
        hot, warm = self.hot_order.generations(), self.warm_order.generations()
        return np.concatenate([hot, warm[~np.isin(warm, hot)]])

    # -- copies

    def cold_bytes(self, block: Block) -> int:
        """Physical bytes of the cold copy; 0 if there is none."""
        return self.cold.physical_bytes(block.generation) if self.cold is not None else 0

    def is_cold(self, block: Block) -> bool:
        """Whether the cold tier holds a copy."""
        return self.cold is not None and self.cold.holds(block.generation)

    def is_warm(self, block: Block) -> bool:
        """Whether the warm tier holds a copy."""
        return self.warm is not None and block.generation in self.warm

    def warm_bytes(self, block: Block) -> int:
        """Physical bytes of the warm copy; 0 if there is none."""
        copy = self.warm.copy(block.generation) if self.warm is not None else None
        return copy.physical_bytes if copy is not None else 0

    def arrived_warm(self, block: Block) -> None:
        """The warm tier holds a copy from now on."""
        self.attributes_changed(block.generation)
        if block not in self.warm_order:
            self.warm_content_bytes += block.size
        self.warm_order.add(block)

    def drop_warm(self, block: Block) -> None:
        """Remove the warm copy; harmless if there is none."""
        if self.warm is not None and block.generation in self.warm:
            self.attributes_changed(block.generation)
            self.warm.drop(block.generation)
            if block in self.warm_order:
                self.warm_content_bytes -= block.size
                self.warm_order.remove(block)

    def is_below(self, block: Block) -> bool:
        """Whether a tier below the hot one holds a copy, so that the hot one may go at once."""
        return self.is_warm(block) or self.is_cold(block) or block.generation in self.elsewhere

    def is_here(self, block: Block) -> bool:
        """Whether any tier of this host holds a copy."""
        return block.is_hot or self.is_warm(block) or self.is_cold(block)

    def set_shadow(self, block: Block, shadow: BlockMeta) -> None:
        """The cold tier holds the content of an unsealed block as it is now, for fsync."""
        self.drop_shadow(block)
        self.shadows[block.generation] = self._shadow_metas[shadow.generation] = shadow

    def drop_shadow(self, block: Block) -> None:
        """The shadow is of no use any more: the block itself is there, or gone."""
        shadow = self.shadows.pop(block.generation, None)
        if shadow is not None and self.cold is not None:
            del self._shadow_metas[shadow.generation]
            self.cold.drop(shadow.generation, self.new_stamp())

    def _rename_shadow(self, block: Block) -> None:
        shadow = self.shadows.get(block.generation)
        if shadow is None or self.cold is None:
            return
        self.cold.leaves_name(shadow.generation, shadow.key)
        # With the version that it has from now on: its own is older than what the name led to.
        key, stamp = self.names.key_of(block), self.new_stamp()
        shadow = replace(shadow, key=key, stamp=stamp, origin=block.origin)
        self.shadows[block.generation] = self._shadow_metas[shadow.generation] = shadow
        self.cold.note(Put(shadow))

    def _changed_beneath(self, directory: Directory, name: bytes) -> None:
        """A published name came, went, or leads elsewhere."""
        directory.mtime_ns = self.clock().wall_ns
        self.attributes_changed(directory.inode)
        self.name_changed(directory.inode, name)

    def drop_hot(self, block: Block, *, spare: bool = False) -> None:
        """Remove the hot copy; the room comes back when nobody has it open any more.

        `spare`: its memory may be kept a while for another block that is promoted.
        """
        if block.is_hot:
            self.attributes_changed(block.generation)
            self.hot_goes(block.generation)
            size = block.size if spare else 0
            self.hot.remove(block.generation, block.hot_bytes, spare_size=size)
            block.hot_bytes = NOT_HOT
            self.hot_order.remove(block)
            if block.generation in self.elsewhere:
                self.last_copy_left(block)

    def drop(self, block: Block) -> None:
        """End a generation: no name, no copies. Bytes that are open last until they are closed."""
        if not block.is_gone:
            self._end(block)
            # First what it replaced: that must not be found again where this one is gone.
            self.release_replaced(block.generation)
            self._remove_copies(block)

    def _end(self, block: Block) -> None:
        """From here on no program finds it."""
        if block.published:
            self._changed_beneath(block.directory, block.name)
        self.attributes_changed(block.generation)
        self.names.unname(block)
        if block.state is State.WRITING:
            self.writing_count -= 1
        self.block_count -= 1
        block.state = State.GONE
        block.expires_ns = NEVER
        self.hot_order.remove(block)
        self.cold_order.remove(block)
        self.fresh.pop(block.generation, None)
        self.elsewhere.pop(block.generation, None)

    def _remove_copies(self, block: Block) -> None:
        # Written down before the file goes: who dies in between has lost nothing.
        self._record_gone(block)
        self.drop_hot(block)
        self.drop_warm(block)
        self.drop_shadow(block)
        self.names.bury(block)
        self.forget_if_unused(block)

    def _record_gone(self, block: Block) -> None:
        if block.opens and self.keeps_transients:
            self.record_transient(block)
        elif block.stamp:
            block.stamp = self.new_stamp()
            self.hot.record(Drop(block.generation, block.stamp))
        if self.is_cold(block):
            assert self.cold is not None
            self.cold.drop(block.generation, block.stamp)

    def forget_if_unused(self, node: Block | Directory) -> None:
        """Let go of an inode that neither a name, an open description nor the kernel needs."""
        if isinstance(node, Block):
            unused = node.is_gone and not node.opens and not node.lookups
            if unused and node.generation not in self._kept:
                self.names.forget(node)
        elif node.removed and not node.lookups:
            self.names.forget(node)

    # -- blocks and directories come and go

    def new_block(self, directory: Directory, name: bytes) -> Block:
        """Return a new, unpublished generation with default lifetime."""
        block = Block(self.new_generation(), directory, name)
        now = self.clock()
        block.created_ns = block.mtime_ns = block.ctime_ns = block.atime_ns = now.wall_ns
        block.used_ns = now.boot_ns
        block.extras = self.default_extras(directory)
        self.names.add_private(block)
        self.block_count += 1
        self.writing_count += 1
        ttl_ns = self.names.default_ttl_ns(directory)
        if ttl_ns < 0:
            ttl_ns = self.default_ttl_ns
        self.set_expiry(block, now.boot_ns + ttl_ns if ttl_ns > 0 else NEVER)
        return block

    def default_extras(self, directory: Directory) -> Extras | None:
        """What a block has from the beginning that is made here."""
        replicas = self.names.default_replicas(directory)
        return Extras(replicas=replicas) if replicas else None

    def set_expiry(self, block: Block, deadline_boot_ns: int) -> None:
        """Give a block its deadline."""
        block.expires_ns = deadline_boot_ns
        if self.expiry.set(block.generation, deadline_boot_ns):
            self.expiry_changed()

    def deadline_of(self, generation: int) -> int:
        """Return the current deadline of a generation, NEVER if it is gone."""
        node = self.names.by_inode.peek(generation)
        return node.expires_ns if isinstance(node, Block) else NEVER

    def publish(self, block: Block, directory: Directory, name: bytes) -> None:
        """Switch a name to a generation; what it led to before is over."""
        now = self.clock()
        was_published = block.published
        place, was_at = (directory, name), (block.directory, block.name)
        if self.versions is not None:
            self._new_content(block, self.names.find(directory, name))
        if self.cold is not None and was_at != place:
            self.cold.leaves_name(block.generation, self.names.key_of(block))
        old = self.names.publish(block, directory, name)
        block.ctime_ns = now.wall_ns
        if was_published and was_at != place:
            self._changed_beneath(*was_at)
        self._changed_beneath(*place)
        if block.writing is not None and not was_published:
            if not block.writing.time_given:
                block.mtime_ns = now.wall_ns
            self.counters.published += 1
        self._rename_shadow(block)
        self.attributes_changed(block.generation)
        self.record_change(block)
        if old is not None:
            self._replace(old, block)
        if block.state is State.SEALED:
            self.block_sealed(block)

    def adopt(self, block: Block, directory: Directory, name: bytes) -> None:
        """Publish a sealed block that came from another host, with a hot copy.

        What the name led to is over, and nobody is told so: who wrote this has seen to that.
        Raises IsDirectory, NameTooLong, BlockNotFound where the directory is gone.
        """
        old = self.names.publish(block, directory, name)
        self.block_count += 1
        self.set_expiry(block, block.expires_ns)
        self.hot_order.add(block)
        self._changed_beneath(directory, name)
        self.record(block)
        if old is not None:
            self._replace(old, block)

    def put_in_place(self, block: Block) -> None:
        """Give a block that is being written its name, after the daemon before us did."""
        old = self.names.publish(block, block.directory, block.name)
        if old is not None:
            self._replace(old, block)

    def _new_content(self, block: Block, old: Node | None) -> None:
        """Before a block gets a name: what it and its own name led to is deleted on all hosts."""
        if block.published:
            self.key_deleted(self.names.key_of(block), block)
        if isinstance(old, Block) and old is not block:
            self.key_deleted(self.names.key_of(old), old)
        self._renumber(block)
        self.elsewhere.pop(block.generation, None)

    def _renumber(self, block: Block) -> None:
        """It is a new version, with the attributes that it has now."""
        block.origin = self.new_version()
        if block.extras is not None:
            block.extras.revision = 0

    def renew(self, block: Block) -> None:
        """Others were sent other content as this version of a published block: it is a new one."""
        self.key_deleted(self.names.key_of(block), block)
        self._renumber(block)
        self.record_change(block)

    def _replace(self, old: Block, by: Block) -> None:
        """What a name led to is over; but until what has the name now is sealed, a daemon that
        dies would leave neither to the next one. So its copies stay a moment longer.
        """
        if by.state is State.SEALED:
            self.drop(old)
            return
        if old.state is not State.SEALED:
            if old.generation not in self.shadows:
                # What it replaced is what a crash is to leave, as long as none of this is synced.
                before = self._replaced.pop(old.generation, None)
                if before is not None:
                    self._replaced[by.generation] = before
            self.drop(old)
            return
        self._end(old)
        self._kept.add(old.generation)
        _, waiting = self._replaced.setdefault(by.generation, (self.clock().boot_ns, []))
        waiting.append(old)

    def acquire(self, block: Block) -> HotFile:
        """Return the hot file of a block that may be gone, and was open in the daemon's former
        life. Raises as `HotTier.acquire`."""
        is_kept = not block.is_gone or block.generation in self._kept
        return (self.hot.acquire if is_kept else self.hot.acquire_gone)(block.generation)

    def release_replaced(self, by: int) -> bool:
        """Remove copies that were kept for a generation that is sealed now, or gone."""
        _, waiting = self._replaced.pop(by, (0, []))
        for block in waiting:
            self._kept.discard(block.generation)
            self._remove_copies(block)
        return bool(waiting)

    def free_replaced(self) -> bool:
        """Room is short in the hot tier: do not keep copies there for what is not sealed yet. What
        was synced is on the cold tier, and is kept there. Whether any went."""
        freed = False
        for by, (since_ns, waiting) in list(self._replaced.items()):
            synced = [block for block in waiting if self.is_cold(block)]
            self._replaced[by] = since_ns, [block for block in waiting if block not in synced]
            freed |= self.release_replaced(by)
            if synced:
                self._replaced[by] = since_ns, synced
            for block in synced:
                if not block.opens:  # else it would not be free, and not be found by a successor
                    freed |= block.is_hot
                    self.drop_hot(block)
        return freed

    def replaced_before(self, limit_ns: int) -> list[int]:
        """Return generations that something is kept for since before a time of the boot clock."""
        return [by for by, (since_ns, _) in self._replaced.items() if since_ns < limit_ns]

    def sealed(self, block: Block, digest: bytes) -> None:
        """A generation became immutable."""
        owner = block.writing.owner if block.writing is not None else 0
        seen = block.writing is None or block.writing.seen
        block.digest = digest
        block.state = State.SEALED
        block.writing = None
        self.writing_count -= 1
        self.hot_order.add(block)
        if self.is_cold(block):
            self.cold_order.add(block)
        if not seen:
            self.fresh[block.generation] = owner
            if len(self.fresh) > FRESH_MAX:
                self.fresh.popitem(last=False)
        self.record(block)
        self.release_replaced(block.generation)
        self.counters.sealed += 1
        self.counters.sealed_bytes += block.size
        self.tell("sealed", block, tier="hot")
        self.block_sealed(block)

    def unsealed(self, block: Block, writing: Writing) -> None:
        """A generation that nobody else saw is being written again."""
        self.attributes_changed(block.generation)
        if self.versions is not None:
            self.key_deleted(self.names.key_of(block), block)
            self._renumber(block)
        block.state = State.WRITING
        block.writing = writing
        self.writing_count += 1
        self.hot_order.remove(block)
        self.drop_warm(block)
        self.fresh.pop(block.generation, None)
        block.digest = b""
        block.stamp = self.new_stamp()
        if self.keeps_transients:
            self.record_transient(block)
        else:
            self.hot.record(Drop(block.generation, block.stamp))

    def make_directory(self, parent: Directory, name: bytes) -> Directory:
        """Make an empty prefix. The caller sets owner and mode, then records it."""
        directory = self.names.make_directory(parent, name, self.new_generation())
        directory.mtime_ns = self.clock().wall_ns
        self._changed_beneath(parent, name)
        return directory

    def remove_directory(self, directory: Directory) -> None:
        """Take away an empty prefix."""
        parent = directory.parent
        self.names.remove_directory(directory)
        assert parent is not None
        self._changed_beneath(parent, directory.name)
        if directory.stamp:
            self._record_everywhere(RemoveDirectory(directory.inode, self.new_stamp()))
        self.forget_if_unused(directory)

    # -- telling

    def tell(self, kind: str, block: Block, **facts: object) -> None:
        """Emit an event about a block."""
        self.events.emit(
            kind,
            self.clock().wall_ns,
            key=os.fsdecode(self.names.key_of(block)),
            generation=block.generation,
            size_bytes=block.size,
            **facts,
        )
