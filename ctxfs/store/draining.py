"""What may go from the cold tier so that a device can be drained into the others."""

from __future__ import annotations

from ctxfs.core.block import Block
from ctxfs.core.eviction import choose
from ctxfs.core.meta import Placement
from ctxfs.store.catalog import Catalog
from ctxfs.store.mover import Mover
from ctxfs.tiers.cold_drain import Drain


class Draining:
    """Drains devices of a cold tier, deciding as its store does who goes."""

    def __init__(self, catalog: Catalog, mover: Mover) -> None:
        self._catalog = catalog
        self._mover = mover

    def begin(self, path: str) -> Drain:
        """A drain of this device, to be run: no new blocks go there from here on.

        Raises NoSuchDevice, DeviceLost, TierFull where no other device takes blocks.
        """
        cold = self._catalog.cold
        assert cold is not None
        return Drain(cold, cold.begin_drain(path), self._make_room)

    def _make_room(self, need_bytes: int) -> bool:
        """Evict the coldest blocks that may go, on any device; True if any did.

        Those whose place the user has asked to be the cold tier stay, as those that are pinned.
        """
        now_ns = self._catalog.clock().boot_ns

        def may_go(block: Block) -> bool:
            if block.opens or self._mover.is_moving(block) or self._is_wanted(block):
                return False
            return self._mover.evictor.may_evict(block, now_ns)

        order = self._catalog.cold_order.leaving()
        victims = choose(order, need_bytes, self._catalog.cold_bytes, may_go)
        for block in victims:
            if not block.is_gone:  # it may have gone together with another
                self._mover.evictor.evict(block)
        return bool(victims)

    def _is_wanted(self, block: Block) -> bool:
        """Whether the user has placed here what would go with this block."""
        root = self._catalog.names.together_root(block)
        going = [block] if root is None else self._catalog.names.blocks_beneath(root)
        return any(each.placement is Placement.COLD for each in going)
