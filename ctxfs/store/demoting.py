"""Down: blocks are written to the warm and the cold tier."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from ctxfs.core.block import Block, State
from ctxfs.core.budget import WriteBudget
from ctxfs.core.eviction import choose
from ctxfs.core.meta import BlockMeta, Put
from ctxfs.device.engine import Span
from ctxfs.device.memorypool import POOL
from ctxfs.errors import BlockNotFound, CopyCorrupt, TierFull, TierTrouble
from ctxfs.store.catalog import Catalog
from ctxfs.store.coding import Coding
from ctxfs.store.evicting import Evictor
from ctxfs.store.hotbytes import readable_span
from ctxfs.store.moves import Moves
from ctxfs.store.sharing import Sharer
from ctxfs.store.warming import Warming
from ctxfs.tiers.cold_twins import Twin

COLD_ROOM_TRIES = 32  # what is shared may be counted, and not become free


class Demoter:
    """Makes copies in lower tiers. `bytes_per_day`: what may be written to the cold one."""

    def __init__(
        self,
        catalog: Catalog,
        moves: Moves,
        evictor: Evictor,
        coding: Coding,
        bytes_per_day: int | None,
    ) -> None:
        self._catalog = catalog
        self._moves = moves
        self._evictor = evictor
        self.coding = coding
        self.bytes_per_day = bytes_per_day
        self._cold = catalog.cold
        self.sharer = Sharer(catalog.cold, coding)
        self._budget = WriteBudget(bytes_per_day, catalog.clock().boot_ns)
        self.warming = (
            Warming(
                catalog,
                catalog.warm,
                coding,
                write_cold=self._save_warm,
                may_leave=self._may_leave_warm,
                evict=evictor.evict,
            )
            if catalog.warm is not None
            else None
        )

    async def demote(self, block: Block, *, keep_hot: bool = False) -> None:
        """Write a sealed block to the cold tier; then drop its hot copy unless it is open.

        Raises TierFull, DeviceError, BlockNotFound if the block went away meanwhile.
        """
        async with self._moves.alone(block):
            if block.is_gone:
                raise BlockNotFound("it went away before it could be moved")
            if not self._catalog.is_cold(block):
                await self._write_cold(block)
        if keep_hot:
            return
        if not block.opens:
            self._catalog.drop_hot(block, spare=True)
        self._catalog.drop_warm(block)

    async def _write_cold(self, block: Block) -> None:
        assert self._cold is not None
        meta = block.meta(self._catalog.names.key_of(block), self._catalog.clock())
        was_hot = block.is_hot
        if not await self._write_cold_from_warm(block, meta):
            with self._moves.hot_file(block) as file:
                async with readable_span(file) as (span, view):
                    await self.put_cold(meta, span, view, own=self._synced(meta))
        if block.is_gone:
            self._cold.drop(block.generation, self._catalog.new_stamp())
            raise BlockNotFound("it went away while it was moved")
        if block.stamp != meta.stamp:  # its attributes changed while it was written
            key = self._catalog.names.key_of(block)
            self._cold.note(Put(block.meta(key, self._catalog.clock())))
        self._catalog.cold_order.add(block)
        self._catalog.attributes_changed(block.generation)
        self._catalog.drop_shadow(block)
        self._catalog.fresh.pop(block.generation, None)
        self._catalog.counters.demoted += 1
        self._catalog.counters.demoted_bytes += block.size
        self._catalog.tell("moved", block, **{"from": "hot" if was_hot else "warm", "to": "cold"})

    def _synced(self, meta: BlockMeta) -> int:
        """Return the generation under which fsync wrote this very content of the block; or 0."""
        shadow = self._catalog.shadows.get(meta.generation)
        if shadow is None or (shadow.digest, shadow.size) != (meta.digest, meta.size):
            return 0
        return shadow.generation

    async def _write_cold_from_warm(self, block: Block, meta: BlockMeta) -> bool:
        """Pass a warm copy on as it is, or inflated where it may not stay like that.

        False where the hot copy is to be written: there is no warm one, or none that is good.
        """
        warm = self._catalog.warm
        copy = warm.copy(block.generation) if warm is not None else None
        if warm is None or copy is None:
            return False
        try:
            if self.coding.may_be_kept(copy.method) and not self.sharer.has_twin(meta):
                with warm.open(block.generation) as stored:
                    await self._put_cold(meta, stored.span(), copy.method)
            else:
                assert self.warming is not None
                with POOL.memory(block.size) as content:
                    await self.warming.fetch(block, content.view)
                    await self.put_cold(meta, content.span(0, block.size), content.view)
        except (CopyCorrupt, TierTrouble):
            if not block.is_hot:
                raise
            return False
        return True

    async def put_cold(
        self, meta: BlockMeta, span: Span, view: memoryview, *, may_share: bool = True, own: int = 0
    ) -> None:
        """Write content to the cold tier, encoded if that pays or is asked for; `span` is `view`
        in whole pages. Evicts from it what may go. Raises TierFull, DeviceError, UnknownKey.

        `may_share`: what is there already is not written again. `own`: what this block's writer
        had synced of it.
        """
        async with self.sharer.one_at_a_time(meta):
            if may_share:
                if not await self._share(meta, view, own):
                    await self._put_content(meta, span, view)
            else:
                # Once its block is sealed, that shares what others do, and this goes.
                to_share = not self.sharer.has_twin(meta)
                await self._put_content(meta, span, view, to_share=to_share)

    async def _share(self, meta: BlockMeta, view: memoryview, own: int) -> bool:
        async def put_alias(twin: Twin) -> None:
            assert self._cold is not None
            await self._with_room(meta, 0, partial(self._cold.put_alias, meta, twin))

        return await self.sharer.share(meta, view, put_alias, own)

    async def _put_content(
        self, meta: BlockMeta, span: Span, view: memoryview, *, to_share: bool = True
    ) -> None:
        async with self.coding.encoded(view, meta.dtype, meta.generation) as made:
            if made is None:
                await self._put_cold(meta, span, 0, to_share=to_share)
            else:
                await self._put_cold(meta, made.span, made.method, to_share=to_share)

    async def _put_cold(
        self, meta: BlockMeta, span: Span, method: int, *, to_share: bool = True
    ) -> None:
        assert self._cold is not None
        put = partial(self._cold.put, meta, span, method=method, to_share=to_share)
        await self._with_room(meta, span.length, put)

    async def _with_room(
        self, meta: BlockMeta, need_bytes: int, put: Callable[[], Awaitable[None]]
    ) -> None:
        """Put something, evicting from the cold tier what may go for it."""
        for _ in range(COLD_ROOM_TRIES):
            try:
                await put()
                return
            except TierFull:
                if not self._evict_cold(meta.generation, need_bytes + 8192):
                    raise
        raise TierFull("the cold tier is full")

    def _evict_cold(self, but: int, need_bytes: int) -> bool:
        """Drop the coldest blocks that may go; True if any did."""
        now_ns = self._catalog.clock().boot_ns

        def may_go(block: Block) -> bool:
            if block.opens or block.generation in self._moves.moving or block.generation == but:
                return False
            return self._evictor.may_evict(block, now_ns)

        order = self._catalog.cold_order.leaving()
        victims = choose(order, need_bytes, self._catalog.cold_bytes, may_go)
        for block in victims:
            if not block.is_gone:  # it may have gone together with another
                self._evictor.evict(block)
        return bool(victims)

    async def compress(self, block: Block) -> bool:
        """Make a warm copy of a hot block; False where that does not pay, or has no room.

        Raises TierTrouble, BlockNotFound if the block went away meanwhile.
        """
        assert self.warming is not None
        async with self._moves.alone(block):
            if block.is_gone or not block.is_hot or self._catalog.is_warm(block):
                return self._catalog.is_warm(block)
            with self._moves.hot_file(block) as file:
                async with readable_span(file) as (_, view):
                    if not await self.warming.admit(block, view):
                        return False
        self._catalog.counters.warmed += 1
        self._catalog.counters.warmed_bytes += block.size
        return True

    def _may_leave_warm(self, block: Block) -> bool:
        if block.opens or block.generation in self._moves.moving or block.state is not State.SEALED:
            return False
        return self.cold_admits() or self._evictor.may_evict(block, self._catalog.clock().boot_ns)

    async def _save_warm(self, block: Block) -> None:
        """Write a block that only the warm tier holds to the cold one, unless that is to be
        spared. Raises as `demote`."""
        if self._cold is None:
            return
        may_evict = self._evictor.may_evict(block, self._catalog.clock().boot_ns)
        if may_evict and not self.cold_admits():
            self._catalog.counters.not_admitted += 1
            return
        await self.demote(block, keep_hot=True)

    def cold_admits(self) -> bool:
        """Whether blocks that make room go to the cold tier: it takes some, and may be written."""
        cold = self._cold
        if cold is None or not cold.takes_blocks:
            return False
        self._budget.change(self.bytes_per_day)
        return self._budget.allows(self._catalog.clock().boot_ns, cold.written_bytes)
