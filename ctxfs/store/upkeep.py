"""What time brings: expiry, the end of opens that never came, a short journal, the move down."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import trio

from ctxfs.core.block import Block, State
from ctxfs.errors import CtxfsError, DeviceError
from ctxfs.store.catalog import Catalog
from ctxfs.store.elsewhere import Elsewhere
from ctxfs.store.handle import Handle
from ctxfs.store.mover import Mover

log = logging.getLogger(__name__)

REWRITTEN_AT_ONCE = 256  # blocks; about a millisecond each hundred
HOLD_NS = 1_000_000_000
REPLACED_NS = 2_000_000_000  # for so long a new generation is waited for to be sealed
ABANDONED_NS = 10_000_000_000  # a generation that was made for an open that never came


class Upkeep:
    """Services beside what programs ask for."""

    def __init__(self, catalog: Catalog, mover: Mover, release: Callable[[Handle], None]) -> None:
        """`release` ends an open description."""
        self._catalog = catalog
        self._mover = mover
        self._release = release
        self._hot = catalog.hot
        self._cold = catalog.cold
        self.elsewhere: Elsewhere | None = None
        self._held: dict[Handle, int] = {}  # since when, boot clock
        self._expiry_wake = trio.Event()
        catalog.expiry_changed = self._wake_expiry

    async def run(self) -> None:
        """Expire what is due, and look after the rest once a second."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_expiry)
            nursery.start_soon(self._run_upkeep)

    async def _run_upkeep(self) -> None:
        while True:
            await trio.sleep(1)
            self._discard_abandoned()
            await self._release_replaced()
            self._let_go_of_old()
            self._hot.spares.drop_if_idle()
            if self.elsewhere is not None:
                self.elsewhere.forget_old()
            if self._hot.journal.wants_rewrite:
                await self.rewrite_journal()
            self._hot.journal.keep_ballast()

    async def _release_replaced(self) -> None:
        """Do not wait any longer for what takes long to be sealed."""
        late = self._catalog.replaced_before(self._catalog.clock().boot_ns - REPLACED_NS)
        if late and self._cold is not None:
            # What fsync wrote of what comes must have the name before what had it goes.
            try:
                await self._cold.sync()
            except CtxfsError as error:
                log.warning("what was replaced stays a while longer: %s", error)
                return
        for by in late:
            self._catalog.release_replaced(by)

    # -- expiry

    def _wake_expiry(self) -> None:
        self._expiry_wake.set()

    async def _run_expiry(self) -> None:
        while True:
            deadline_ns = self._catalog.expiry.next_deadline_ns()
            now_ns = self._catalog.clock().boot_ns
            if deadline_ns is not None and deadline_ns <= now_ns:
                self.expire_due()
                await trio.lowlevel.checkpoint()
                continue
            # Looked at once a second at least: a suspended machine moves the boot clock.
            wait_s = 1.0 if deadline_ns is None else min(1.0, (deadline_ns - now_ns) / 1e9)
            self._expiry_wake = trio.Event()
            with trio.move_on_after(wait_s):
                await self._expiry_wake.wait()

    def expire_due(self, at_once_max: int = 256) -> None:
        """Drop blocks whose deadline has come; a bounded number, so that others get their turn."""
        now_ns = self._catalog.clock().boot_ns
        due = self._catalog.expiry.due(now_ns, self._catalog.deadline_of)
        for _, generation in zip(range(at_once_max), due, strict=False):
            block = self._catalog.names.by_inode.get(generation)
            if not isinstance(block, Block) or block.is_gone:
                continue
            if block.state is State.WRITING:  # looked at again when it is sealed
                continue
            self._expire(block)

    def _expire(self, block: Block) -> None:
        for gone in self._mover.evictor.drop_together(block):
            self._catalog.counters.expired += 1
            self._catalog.counters.expired_bytes += gone.size
            self._catalog.tell("expired", gone)
            if gone.revision:
                self._catalog.block_expired(self._catalog.names.key_of(gone), gone)
        self._mover.moves.lease_ended()

    # -- opens that are about to come

    def hold(self, block: Block) -> Handle | None:
        """Lease the bytes of a hot block for an open that is about to come, for a second or two."""
        if not block.is_gone and not block.is_hot:
            return None
        try:
            file = self._catalog.acquire(block)
        except FileNotFoundError:
            return None  # the open finds out, too
        block.opens += 1
        handle = Handle(block, file, -1, writable=False)
        self._held[handle] = self._catalog.clock().boot_ns
        return handle

    def let_go(self, handle: Handle) -> None:
        """End a hold; harmless if it ended by itself."""
        if self._held.pop(handle, None) is not None:
            self._release(handle)

    def _let_go_of_old(self) -> None:
        now_ns = self._catalog.clock().boot_ns
        for handle, since_ns in list(self._held.items()):
            if now_ns - since_ns > HOLD_NS:
                self.let_go(handle)

    def discard_unopened(self, block: Block) -> None:
        """Drop a generation that was made for an open which did not come."""
        if not block.published and not block.opens:
            self._catalog.drop(block)

    def _discard_abandoned(self) -> None:
        now_ns = self._catalog.clock().boot_ns
        for block in list(self._catalog.names.private_blocks()):
            writing = block.writing
            if writing and not block.opens and now_ns - writing.started_ns > ABANDONED_NS:
                self._catalog.drop(block)

    # -- writing down

    async def rewrite_journal(self) -> None:
        """Shorten the hot journal. What it alone knows of cold blocks is written there first.

        Others get their turns meanwhile; what they change is in the new one, too.
        """
        if self._cold is not None:
            try:
                await self._cold.sync()
            except DeviceError as error:
                log.warning("the hot journal stays long: %s", error)
                return
            if self._cold.has_pending_notes:
                return  # changed since; the next round tries again
        catalog = self._catalog
        try:
            with self._hot.journal.rewriting() as add:
                add(catalog.journal_beginning())
                generations = catalog.in_memory()
                for start in range(0, len(generations), REWRITTEN_AT_ONCE):
                    some = generations[start : start + REWRITTEN_AT_ONCE].tolist()
                    add(catalog.journal_entries(some))
                    await trio.lowlevel.checkpoint()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            log.warning("the hot journal stays long: the hot tier's memory is full")

    async def drain(self) -> int:
        """Write every sealed hot block to the cold tier; returns how many could not be."""
        if self._cold is None:
            return 0
        left = 0
        limiter = trio.CapacityLimiter(8)

        async def save(block: Block) -> None:
            nonlocal left
            async with limiter:
                try:
                    if block.state is State.SEALED and not self._catalog.is_cold(block):
                        await self._mover.demoter.demote(block, keep_hot=True)
                except CtxfsError as error:
                    left += 1
                    log.warning("%r is not on the cold tier: %s", block.name, error)

        # The most recently used first: if time runs out, the least valuable are lost.
        latest = self._catalog.in_memory()
        for start in range(0, len(latest), 1024):
            async with trio.open_nursery() as nursery:
                for generation in latest[start : start + 1024].tolist():
                    block = self._catalog.names.by_inode.get(generation)
                    if isinstance(block, Block):
                        nursery.start_soon(save, block)
        return left
