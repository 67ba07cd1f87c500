"""Room in the hot tier, and who moves blocks. What goes is decided in core, carried out here."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

import trio

from ctxfs.core.block import Block, State
from ctxfs.core.eviction import choose
from ctxfs.core.key import is_temporary
from ctxfs.core.meta import Placement
from ctxfs.errors import BlockNotFound, CtxfsError, TierFull
from ctxfs.store.catalog import Catalog
from ctxfs.store.coding import Coding
from ctxfs.store.demoting import Demoter
from ctxfs.store.evicting import Evictor
from ctxfs.store.moves import Moves
from ctxfs.store.promoting import Promoter
from ctxfs.tiers.hot import HotFile

log = logging.getLogger(__name__)

DEMOTIONS_AT_ONCE = 8
ORPHANS_POLL_S = 0.05  # how often files that are gone, and mapped, are looked at for room
TEMPORARY_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverLimits:
    """When the hot tier makes room, and how long anybody waits."""

    high_ratio: float
    low_ratio: float
    room_wait_s: float
    read_deadline_s: float
    temporary_wait_ns: int
    cold_bytes_per_day: int | None = None


class Mover:
    """The only one who holds all tiers."""

    def __init__(self, catalog: Catalog, limits: MoverLimits, coding: Coding | None = None) -> None:
        self._catalog = catalog
        self._limits = limits
        self._hot = catalog.hot
        self._cold = catalog.cold
        self.coding = coding or Coding()
        self.moves = Moves(catalog)
        self.evictor = Evictor(catalog)
        self.demoter = Demoter(
            catalog, self.moves, self.evictor, self.coding, limits.cold_bytes_per_day
        )
        self.promoter = Promoter(
            catalog,
            self.moves,
            self.coding,
            self.demoter.warming,
            self.reserve,
            limits.read_deadline_s,
        )
        self._turn = trio.StrictFIFOLock()  # one at a time makes room, in order of asking
        self._crowded = trio.Event()
        self._waiting: Counter[int] = Counter()  # generations that want to grow, or to come

    @property
    def limits(self) -> MoverLimits:
        """What bounds it; another one counts at once."""
        return self._limits

    @limits.setter
    def limits(self, limits: MoverLimits) -> None:
        self._limits = limits
        self.promoter.deadline_s = limits.read_deadline_s
        self.demoter.bytes_per_day = limits.cold_bytes_per_day

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve: promotions that outlive who asked for them, and room made ahead of need."""
        async with trio.open_nursery() as nursery:
            self.promoter.nursery = nursery
            task_status.started()
            while True:
                await self._crowded.wait()
                self._crowded = trio.Event()
                await self._make_room_ahead()

    # -- room in the hot tier

    async def reserve(
        self, need_bytes: int, own: HotFile | None = None, promoted: int | None = None
    ) -> None:
        """Set room aside in the hot tier, evicting or demoting what may go.

        `own` is the file that is to grow, `promoted` the generation that is to come. Raises
        TierFull at once where nothing may ever go, otherwise after the room wait.
        """
        if need_bytes <= 0:
            return
        if not self._turn.locked() and self._hot.try_reserve(need_bytes):
            self._look_ahead()
            return
        own_bytes = own.physical_bytes if own is not None else 0
        if need_bytes + own_bytes > self._hot.block_capacity_bytes:
            self._catalog.counters.no_space += 1
            raise TierFull("the block is larger than the hot tier")
        self._catalog.counters.room_waits += 1
        with self._waits(own.generation if own is not None else promoted):
            with trio.move_on_after(self.limits.room_wait_s):
                async with self._turn:
                    asked_at = trio.current_time()
                    while not self._hot.try_reserve(need_bytes):
                        await self._free_or_wait(need_bytes - self._hot.room_bytes, asked_at)
                        await trio.lowlevel.checkpoint_if_cancelled()  # it may not have waited
                    return
        self._catalog.counters.no_space += 1
        raise TierFull("the hot tier is full and what is in it may not go")

    def reserve_at_once(self, need_bytes: int) -> bool:
        """Set room aside if that takes no waiting. Where it is short, more is made ahead."""
        done = not self._turn.locked() and self._hot.try_reserve(need_bytes)
        self._look_ahead()
        return done

    @contextlib.contextmanager
    def _waits(self, generation: int | None) -> Iterator[None]:
        """A generation that waits for room gives none back itself."""
        if generation is None:
            yield
            return
        self._waiting[generation] += 1
        self.moves.lease_ended()  # who has its turn may have hoped for this one
        try:
            yield
        finally:
            self._waiting[generation] -= 1
            if not self._waiting[generation]:
                del self._waiting[generation]

    def _used_bytes(self) -> int:
        """Without what goes by itself when room is short."""
        hot = self._hot
        return hot.used_bytes + hot.reserved_bytes - hot.spares.physical_bytes

    def _look_ahead(self) -> None:
        used = self._used_bytes()
        if used > self.limits.high_ratio * self._hot.capacity_bytes:
            self._crowded.set()

    async def _make_room_ahead(self) -> None:
        used = self._used_bytes()
        excess = used - int(self.limits.low_ratio * self._hot.capacity_bytes)
        victims = self._victims(excess, strict=True)
        await self._leave_hot_all(victims)

    async def _free_or_wait(self, need_bytes: int, asked_at: float) -> None:
        changed = self.moves.next_change()
        stuck: set[int] = set()
        if self._catalog.free_replaced():
            return
        if await self._free(need_bytes, stuck, strict=True):
            return
        if self._victims(need_bytes, strict=False, but=stuck):
            # Nothing but new temporary files: those that are renamed in time may go then.
            grace_s = min(TEMPORARY_GRACE_S, self.limits.room_wait_s / 2)
            with trio.move_on_at(asked_at + grace_s):
                await changed.wait()
                return
            if await self._free(need_bytes, stuck, strict=False):
                return
        orphaned = self._hot.orphaned_bytes
        if not orphaned and not self._may_change():
            self._catalog.counters.no_space += 1
            raise TierFull("the hot tier is full and nothing in it may go")
        # Nobody is told when the last mapping of an unlinked file ends.
        with trio.move_on_after(ORPHANS_POLL_S if orphaned else math.inf):
            await changed.wait()

    async def _free(self, need_bytes: int, stuck: set[int], *, strict: bool) -> bool:
        """Let what may go leave; True if anything did. What could not is added to `stuck`."""
        while victims := self._victims(need_bytes, strict=strict, but=stuck):
            if await self._leave_hot_all(victims):
                return True
            stuck.update(block.generation for block in victims)
        return False

    async def free_one(self) -> None:
        """Let at least one block leave the hot tier, however small. Raises TierFull."""
        async with self._turn:
            if not await self._free(1, set(), strict=False):
                raise TierFull("the hot tier has no room for another file")
            self._hot.spares.drop()

    def _may_change(self) -> bool:
        """Whether room may come back by itself: something moves, is written, or is open."""
        waiting = [self._catalog.names.by_inode.get(number) for number in self._waiting]
        writing = sum(isinstance(b, Block) and b.state is State.WRITING for b in waiting)
        if self._catalog.writing_count > writing or self.moves.moving - self._waiting.keys():
            return True
        if self._hot.holds_removed(but=self._waiting.keys()):
            return True
        now_ns = self._catalog.clock().boot_ns
        return any(
            block.opens and self._may_ever_leave(block, now_ns)
            for block in self._catalog.names.table.awake.values()
            if block in self._catalog.hot_order
        )

    def _may_ever_leave(self, block: Block, now_ns: int) -> bool:
        """Whether a hot block may go once nobody has it open."""
        if block.placement is Placement.HOT or block.generation in self._waiting:
            return False
        if self._cold is not None or self._catalog.is_warm(block):
            return True
        return self.evictor.may_evict(block, now_ns)

    def _victims(self, need_bytes: int, *, strict: bool, but: Container[int] = ()) -> list[Block]:
        now = self._catalog.clock()
        demotes = self.demoter.cold_admits()

        def may_go(block: Block) -> bool:
            if block.opens or block.generation in self.moves.moving or block.generation in but:
                return False
            if block.state is not State.SEALED or block.placement is Placement.HOT:
                return False
            if self._catalog.is_below(block):
                return True
            young = now.boot_ns - block.used_ns < self.limits.temporary_wait_ns
            if strict and young and is_temporary(block.name):
                return False
            return demotes or self.evictor.may_evict(block, now.boot_ns)

        order = self._catalog.hot_order.leaving()
        return choose(order, need_bytes, lambda block: max(block.hot_bytes, 1), may_go)

    async def _leave_hot_all(self, victims: list[Block]) -> bool:
        """Carry out; True if at least one left."""
        freed = False
        limiter = trio.CapacityLimiter(DEMOTIONS_AT_ONCE)

        async def leave(block: Block) -> None:
            nonlocal freed
            async with limiter:
                if await self._leave_hot(block):
                    freed = True

        async with trio.open_nursery() as nursery:
            for block in victims:
                if self.demoter.warming is None and (
                    self._cold is None or self._catalog.is_below(block)
                ):
                    freed |= await self._leave_hot(block)
                else:
                    nursery.start_soon(leave, block)
        self.moves.lease_ended()
        return freed

    async def _leave_hot(self, block: Block) -> bool:
        if not _may_leave_now(block):
            return block.is_gone
        if block.generation in self._catalog.elsewhere:
            self._catalog.drop_hot(block, spare=True)
            self._catalog.tell("moved", block, **{"from": "hot", "to": "remote"})
            return True
        if await self._warm_up(block):
            return True
        if not _may_leave_now(block):
            return block.is_gone
        if self._catalog.is_cold(block):
            self._catalog.drop_hot(block, spare=True)
            self._catalog.tell("moved", block, **{"from": "hot", "to": "cold"})
            return True
        may_evict = self.evictor.may_evict(block, self._catalog.clock().boot_ns)
        if self._cold is not None and may_evict and not self.demoter.cold_admits():
            self._catalog.counters.not_admitted += 1
        elif self._cold is not None:
            try:
                await self.demoter.demote(block)
                return not block.is_hot
            except BlockNotFound:
                return True  # overwritten, unlinked or expired meanwhile
            except CtxfsError as error:
                # Of a device that fails, the tier has said so; not once more for each block.
                level = logging.WARNING if self._cold.takes_blocks else logging.DEBUG
                log.log(level, "cannot move %r to the cold tier: %s", block.name, error)
        if not self.evictor.may_evict(block, self._catalog.clock().boot_ns):
            return False
        self.evictor.evict(block)
        return True

    async def _warm_up(self, block: Block) -> bool:
        """Leave the hot tier for the warm one, if that is better than the cold one."""
        warming = self.demoter.warming
        if warming is None:
            return False
        if not self._catalog.is_warm(block):
            if block.generation in self.moves.moving or not warming.wants(block):
                return False
            try:
                if not await self.demoter.compress(block):
                    return False
            except BlockNotFound:
                return True
            except CtxfsError as error:
                log.warning("cannot move %r to the warm tier: %s", block.name, error)
                return False
        if block.opens or not block.is_hot or block.is_gone:
            return False
        self._catalog.drop_hot(block, spare=True)
        self._catalog.tell("moved", block, **{"from": "hot", "to": "warm"})
        return True

    async def move_to_warm(self, block: Block) -> None:
        """Keep a block in the warm tier alone, but for a cold copy it has. Raises TierFull where
        compressing it does not pay, or there is no room; and what `ensure_hot` and `compress` do.
        """
        if not self._catalog.is_warm(block):
            block.opens += 1
            try:
                await self.promoter.ensure_hot(block)
                if not await self.demoter.compress(block):
                    raise TierFull("the warm tier takes no copy: no room, or no gain")
            finally:
                block.opens -= 1
                self.moves.lease_ended()
        if not block.opens and block.is_hot:
            self._catalog.drop_hot(block, spare=True)

    async def wait_landed(self) -> None:
        """Return when what is on its way to the cold tier now has arrived."""
        pending = self.moves.moving - self.promoter.flights.keys()
        while pending := pending & self.moves.moving:
            await self.moves.next_change().wait()

    def is_moving(self, block: Block) -> bool:
        """Whether a copy of it is being made."""
        return block.generation in self.moves.moving


def _may_leave_now(block: Block) -> bool:
    """Whether a block has a hot copy that nobody uses."""
    return block.state is State.SEALED and not block.opens and block.is_hot
