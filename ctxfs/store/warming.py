"""Between the hot and the warm tier: what is compressed, when that pays, and what leaves again."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import trio

from ctxfs.core.block import Block, State
from ctxfs.core.eviction import choose
from ctxfs.core.meta import Placement
from ctxfs.errors import BlockNotFound, CtxfsError
from ctxfs.store.catalog import Catalog
from ctxfs.store.coding import Coding, Encoded
from ctxfs.tiers.warm import WarmCopy, WarmTier

log = logging.getLogger(__name__)

RATIO_MAX = 8  # a block that is larger than the tier by more is not worth a try
SIZE_MIN = 16 << 10  # below, a file of its own costs more than compression saves


class Warming:
    """What comes into the warm tier and leaves it. The caller keeps others from the same block."""

    def __init__(
        self,
        catalog: Catalog,
        warm: WarmTier,
        coding: Coding,
        *,
        write_cold: Callable[[Block], Awaitable[None]],
        may_leave: Callable[[Block], bool],
        evict: Callable[[Block], None],
    ) -> None:
        """`write_cold` makes a cold copy; `may_leave`: nobody moves or pinned the block;
        `evict` drops it whole."""
        self._catalog = catalog
        self._warm = warm
        self._coding = coding
        self._write_cold = write_cold
        self._may_leave = may_leave
        self._evict = evict
        self._turn = trio.StrictFIFOLock()
        self.worth = coding.worth

    def wants(self, block: Block) -> bool:
        """Whether a warm copy of a hot block is worth a try: it may pay, and beats a cold one."""
        if block.size < SIZE_MIN or block.size // RATIO_MAX > self._warm.capacity_bytes:
            return False
        if not self.worth.is_promising(block.dtype):
            return False
        return not self._catalog.is_cold(block) or self.worth.inflates_faster_than_cold()

    async def admit(self, block: Block, view: memoryview) -> bool:
        """Make a warm copy from the content; False where that does not pay, or has no room.

        Raises TierTrouble, BlockNotFound if the block went away meanwhile.
        """
        coding = self._coding
        async with coding.encoded(view, block.dtype, block.generation, shorter=True) as made:
            if made is None or not await self._reserve(made.length_bytes, block):
                return False
            await self._write(block, made)
        return True

    async def _write(self, block: Block, encoded: Encoded) -> None:
        copy = WarmCopy(encoded.length_bytes, encoded.method)
        try:
            await trio.to_thread.run_sync(
                self._warm.write, block.generation, copy.method, encoded.view
            )
        except BaseException:
            self._warm.unreserve(copy.length_bytes)
            raise
        self._warm.arrived(block.generation, copy)
        if block.state is not State.SEALED:
            self._warm.drop(block.generation)
            raise BlockNotFound("it went away while it was compressed")
        self._catalog.arrived_warm(block)

    async def fetch(self, block: Block, target: memoryview) -> None:
        """Inflate a warm copy. The caller compares the digest.

        Raises BlockNotFound, TierTrouble, CopyCorrupt, UnknownKey, NewerStream.
        """
        with self._warm.open(block.generation) as stored:
            began = time.perf_counter()
            await self._coding.decode(stored.view, target, block.generation)
            self.worth.inflated(block.size, time.perf_counter() - began)
        self._catalog.warm_order.use(block)

    # -- room

    async def _reserve(self, length_bytes: int, block: Block) -> bool:
        """Set room aside, letting the least recently used go. False where too few may."""
        if length_bytes > self._warm.capacity_bytes:
            return False
        async with self._turn:
            tried: set[int] = {block.generation}
            while not self._warm.try_reserve(length_bytes):
                need = length_bytes - self._warm.room_bytes
                victims = self._victims(need, tried)
                if not victims:
                    return False
                tried.update(victim.generation for victim in victims)
                for victim in victims:
                    await self._leave(victim)
            return True

    def _victims(self, need_bytes: int, tried: set[int]) -> list[Block]:
        """Those that are elsewhere too go first: that costs nothing."""

        def bytes_of(block: Block) -> int:
            copy = self._warm.copy(block.generation)
            return copy.physical_bytes if copy is not None else 0

        def is_elsewhere(block: Block) -> bool:
            if block.generation in tried or block.placement is Placement.WARM:
                return False
            return block.is_hot or self._catalog.is_cold(block)

        def may_go(block: Block) -> bool:
            if block.generation in tried or block.placement is Placement.WARM:
                return False
            return self._may_leave(block)

        order = self._catalog.warm_order
        return choose(order.leaving(), need_bytes, bytes_of, is_elsewhere) or choose(
            order.leaving(), need_bytes, bytes_of, may_go
        )

    async def _leave(self, block: Block) -> None:
        """Let go of a warm copy; of the last copy there is, by way of the cold tier."""
        if not block.is_hot and not self._catalog.is_cold(block):
            try:
                await self._write_cold(block)
            except BlockNotFound:
                return
            except CtxfsError as error:
                log.warning("%r leaves the warm tier: %s", block.name, error)
        if block.is_hot or self._catalog.is_cold(block):
            self._catalog.drop_warm(block)
        elif self._may_leave(block) and not block.is_gone:
            self._evict(block)
