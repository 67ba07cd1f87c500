"""From the last close on: sealing, and fsync of what is not sealed yet."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import trio

from ctxfs.codec.digest import EMPTY, digest
from ctxfs.core.block import Block, State, Writing
from ctxfs.core.key import is_temporary
from ctxfs.core.meta import BlockMeta, Placement
from ctxfs.errors import BlockNotFound, CtxfsError, TierTrouble
from ctxfs.store.catalog import Catalog
from ctxfs.store.hotbytes import content_digest, readable_span
from ctxfs.store.lending import Lending
from ctxfs.store.mover import Mover
from ctxfs.tiers.cold import ColdTier
from ctxfs.tiers.hot import HotFile

log = logging.getLogger(__name__)

SYNC_TRIES = 4
SEAL_AGAIN_S = 1.0
PROMISED_MAX = 65536  # blocks that were synced, the latest


class Assurance(Protocol):
    """What else fsync waits for."""

    @property
    def is_wanted(self) -> bool: ...

    async def assure(self, block: Block) -> None: ...


class Sealing:
    """Makes content immutable, or durable. Errors as those of `Store`."""

    def __init__(self, catalog: Catalog, mover: Mover, lending: Lending) -> None:
        self._catalog = catalog
        self._mover = mover
        self._lending = lending
        self._hot = catalog.hot
        self._cold = catalog.cold
        self._nursery: trio.Nursery | None = None
        self.assurance: Assurance | None = None  # in a cluster
        # Synced: who closes them after that, or gives them another name, waits for replicas, too.
        self._promised: OrderedDict[int, None] = OrderedDict()
        # While a digest is computed from a mapping, nobody may shorten the file beneath it.
        self._frozen: dict[int, trio.Event] = {}

    def begin(self, nursery: trio.Nursery) -> None:
        """Seal in tasks of this nursery, from now on."""
        self._nursery = nursery
        for generation in self._catalog.shadows:
            # The daemon before us died between sealing it and writing it where fsync had.
            block = self._catalog.names.by_inode.get(generation)
            if isinstance(block, Block) and block.state is State.SEALED:
                nursery.start_soon(self._place, block)

    @contextlib.contextmanager
    def freeze(self, block: Block) -> Iterator[None]:
        """Let nobody change the size of a block, or its bytes through us, meanwhile."""
        self._frozen[block.generation] = event = trio.Event()
        try:
            yield
        finally:
            del self._frozen[block.generation]
            event.set()

    async def thawed(self, block: Block) -> None:
        """Return once nobody needs the block to keep its size."""
        while (event := self._frozen.get(block.generation)) is not None:
            await event.wait()

    # -- sealing

    def last_writer_gone(self, block: Block, writing: Writing, file: HotFile) -> None:
        """Nobody has the block open for writing any more: seal it, or drop it."""
        if block.is_gone:
            return
        if block.published and writing.refused_at is None:
            assert self._nursery is not None
            if not self._lending.wake_sealer(block):
                file.leases += 1
                self._nursery.start_soon(self._seal, block, file)
            return
        base = writing.base
        if base is not None and not writing.changed and writing.refused_at is None:
            self._carry_attributes(block, base)
        else:
            self._catalog.counters.discarded += 1
            self._catalog.tell("discarded", block)
        self._catalog.drop(block)

    def _carry_attributes(self, block: Block, base: Block) -> None:
        """Nothing was written: what was set through this descriptor belongs to the old block."""
        if base.is_gone:
            return
        base.mode, base.uid, base.gid = block.mode, block.uid, block.gid
        if block.mtime_ns != block.created_ns:
            base.mtime_ns, base.atime_ns = block.mtime_ns, block.atime_ns
        base.extras = block.extras
        if base.state is State.SEALED:
            self._catalog.amend(base)

    async def _seal(self, block: Block, file: HotFile) -> None:
        """Compute the digest; from there on the block is immutable. Ends a lease on its file."""
        try:
            while True:
                try:
                    await self._seal_now(block, file)
                    return
                except TierTrouble as error:  # too many open files, say: that passes
                    log.warning("%r is sealed later: %s", block.name, error)
                    await trio.sleep(SEAL_AGAIN_S)
        finally:
            self._mover.moves.release_file(file)

    async def _seal_now(self, block: Block, file: HotFile) -> None:
        while True:
            await self.thawed(block)
            writing = block.writing
            if block.state is not State.WRITING or writing is None or writing.writers:
                return  # gone, sealed by another, or opened again: its last close comes here
            if self._lending.may_change(block):  # through a mapping that outlives its close
                await self._lending.pause(block)
                continue
            epoch = writing.epoch
            result = await self._frozen_digest(block, file)
            if block.writing is writing and writing.epoch == epoch and not writing.writers:
                break
        if block.is_gone:
            return
        block.size, block.hot_bytes = file.size, file.physical_bytes
        self._lending.over(block)
        self._catalog.sealed(block, result)
        self._catalog.set_expiry(block, block.expires_ns)
        await self._place(block)
        self._mover.moves.lease_ended()

    async def _frozen_digest(self, block: Block, file: HotFile) -> bytes:
        if not file.size:
            return EMPTY
        with self.freeze(block):
            return await content_digest(file)

    async def _place(self, block: Block) -> None:
        """Carry out a placement, or an fsync, that was asked for before the block was sealed."""
        if block.placement is Placement.WARM and self._catalog.warm is not None:
            try:
                await self._mover.move_to_warm(block)
            except CtxfsError as error:
                log.warning("cannot move %r to the warm tier: %s", block.name, error)
        moves = block.placement is Placement.COLD
        if self._cold is not None and (moves or block.generation in self._catalog.shadows):
            try:
                await self._mover.demoter.demote(block, keep_hot=not moves)
            except BlockNotFound:
                log.debug("%r went while it was moved to the cold tier", block.name)
            except CtxfsError as error:
                log.warning("cannot move %r to the cold tier: %s", block.name, error)

    def settle_resumed(self) -> None:
        """All that was open is again: seal, or drop, what nobody writes any more."""
        for node in list(self._catalog.names.table.awake.values()):
            writing = node.writing
            if node.state is not State.WRITING or not writing:
                continue
            if writing.writers:
                continue
            if node.published and writing.refused_at is None:
                self._seal_resumed(node)
            elif node.published or not (node.opens or writing.opener):
                self._catalog.drop(node)  # the open that it was made for comes again, and anew

    def _seal_resumed(self, block: Block) -> None:
        assert self._nursery is not None
        try:
            file = self._hot.acquire(block.generation)
        except FileNotFoundError:
            self._mover.moves.lost_hot(block)
            return
        self._lending.watch(block, file)
        self._nursery.start_soon(self._seal, block, file)

    async def wait_sealed(self, block: Block) -> None:
        """Return once nobody writes the block and its digest is known.

        Also, with the block unsealed, where its writer has closed it and goes on to have it mapped.
        """
        while block.state is State.WRITING and block.writing and not block.writing.writers:
            if self._lending.is_held(block):
                return
            await self.thawed(block)
            await self._lending.wait_looked(block)
        if block.is_gone:
            raise BlockNotFound(repr(block.name))

    async def wait_settled(self) -> None:
        """Return when everything that was published and closed is sealed."""
        for block in list(self._catalog.names.table.awake.values()):
            if block.published and block.state is State.WRITING:
                with contextlib.suppress(BlockNotFound):
                    await self.wait_sealed(block)

    # -- fsync

    async def sync(self, block: Block) -> None:
        """Return when the block's content is on the cold tier's medium, if there is one; in a
        cluster where that is wanted, also on the members that are to hold it.

        Others are not shown what has no name yet, or one that is temporary: they are waited for
        when it gets another, by `keep_promise`. Raises ReplicasMissing.
        """
        if self._cold is not None:
            await self._sync_here(block, self._cold)
        if self.assurance is None or not self.assurance.is_wanted:
            return
        self._promised[block.generation] = None
        if len(self._promised) > PROMISED_MAX:
            self._promised.popitem(last=False)
        await self.keep_promise(block)

    @property
    def has_promises(self) -> bool:
        """Whether `has_promised` may be true of any block."""
        return bool(self._promised)

    def has_promised(self, block: Block) -> bool:
        """Whether a close or a rename is to wait: `keep_promise`."""
        return block.generation in self._promised

    async def keep_promise(self, block: Block) -> None:
        """Return when the members that are to hold a block that was synced have it under the name
        that it has now. Raises ReplicasMissing.
        """
        if self.assurance is None or not (self.assurance.is_wanted and self.has_promised(block)):
            return
        if block.published and not is_temporary(block.name):
            await self.assurance.assure(block)

    async def _sync_here(self, block: Block, cold: ColdTier) -> None:
        if block.state is State.WRITING and block.writing and not block.writing.writers:
            await self.wait_sealed(block)
        if block.state is State.SEALED:
            if not self._catalog.is_cold(block):
                await self._mover.demoter.demote(block, keep_hot=True)
        elif block.writing is not None:
            await self._sync_writing(block, block.writing)
        await cold.sync()

    async def sync_names(self) -> None:
        """Return when names and attributes as they are now are on the cold tier's medium."""
        if self._cold is not None:
            # A record on its way has the name, or is of the block, that was there before.
            await self._mover.wait_landed()
            await self._cold.sync()

    async def _old_settled(self, block: Block) -> None:
        """Wait until what the name leads to now is sealed, if that is all that is missing.

        Its stamp must be lower than the shadow's: after a power cut the higher one has the name.
        """
        old = self._catalog.names.find(block.directory, block.name)
        if isinstance(old, Block) and old is not block:
            with contextlib.suppress(BlockNotFound):
                await self.wait_sealed(old)

    async def _sync_writing(self, block: Block, writing: Writing) -> None:
        """Write the content as it is now, as a shadow that sealing replaces."""
        assert self._cold is not None
        await self._old_settled(block)
        file = self._hot.acquire(block.generation)
        try:
            for _ in range(SYNC_TRIES):
                is_lent = self._lending.look(block)  # then it may change at any time, unseen
                epoch = writing.epoch
                if writing.durable_epoch == epoch and not is_lent:
                    return
                await self.thawed(block)
                shadow = await self._put_shadow(block, file, is_lent=is_lent)
                if block.state is not State.WRITING or block.writing is not writing:
                    self._cold.drop(shadow.generation, self._catalog.new_stamp())
                    return
                writing.durable_epoch = epoch
                self._catalog.set_shadow(block, shadow)
                if is_lent or writing.epoch == epoch:
                    return
        finally:
            self._mover.moves.release_file(file)

    async def _put_shadow(self, block: Block, file: HotFile, *, is_lent: bool) -> BlockMeta:
        """Write the content to the cold tier under a generation of its own."""
        size = file.size
        generation = self._catalog.new_generation()
        if block.writing is not None:
            # A successor must not take the shadow for a block that came under this name.
            block.writing.coming = generation
            self._catalog.record_transient(block)
        with self.freeze(block):
            async with readable_span(file, copied=is_lent) as (span, view):
                content = await trio.to_thread.run_sync(digest, view)
                shadow = replace(
                    block.meta(self._catalog.names.key_of(block), self._catalog.clock()),
                    generation=generation,
                    stamp=self._catalog.new_stamp(),
                    digest=content,
                    size=size,
                )
                await self._mover.demoter.put_cold(shadow, span, view, may_share=False)
        return shadow
