"""Moves blocks between tiers, and makes room. What goes is decided in core; this carries it out."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterator
from dataclasses import dataclass, field

import trio

from ctxfs.codec.digest import digest, digest_of_pieces
from ctxfs.core.block import Block, Directory, State
from ctxfs.core.budget import WriteBudget
from ctxfs.core.eviction import choose
from ctxfs.core.key import is_temporary
from ctxfs.core.meta import BlockMeta, Placement, Put
from ctxfs.device.engine import Span
from ctxfs.device.mapping import Mapping
from ctxfs.errors import (
    BlockNotFound,
    CopyCorrupt,
    CtxfsError,
    DeadlineExceeded,
    DeviceError,
    NewerStream,
    TierFull,
    TierTrouble,
    UnknownKey,
)
from ctxfs.store.catalog import Catalog
from ctxfs.store.coding import Coding
from ctxfs.store.warming import Warming
from ctxfs.tiers.hot import HotFile, physical_ceiling

log = logging.getLogger(__name__)

DEMOTIONS_AT_ONCE = 8
DIGEST_INLINE_BYTES = 128 << 10  # below this a thread costs more than the digest
ALLOCATE_INLINE_BYTES = 256 << 10
COLD_ROOM_TRIES = 8
ORPHANS_POLL_S = 0.05  # how often files that are gone, and mapped, are looked at for room
TEMPORARY_GRACE_S = 2.0
ANONYMOUS = -1  # a mapping of no file
COPY_IS_GOOD = (UnknownKey, NewerStream)  # it cannot be read here and now, and stays


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverLimits:
    """When the hot tier makes room, and how long anybody waits."""

    high_ratio: float
    low_ratio: float
    room_wait_s: float
    read_deadline_s: float
    temporary_wait_ns: int
    cold_bytes_per_day: int | None = None


@dataclass(slots=True)
class _Flight:
    """One promotion, however many wait for it."""

    done: trio.Event = field(default_factory=trio.Event)
    error: CtxfsError | None = None


class Mover:
    """The only one who holds two tiers."""

    def __init__(self, catalog: Catalog, limits: MoverLimits, coding: Coding | None = None) -> None:
        self._catalog = catalog
        self.limits = limits
        self.coding = coding or Coding()
        self._hot = catalog.hot
        self._cold = catalog.cold
        self._warming = (
            Warming(
                catalog,
                catalog.warm,
                self.coding,
                write_cold=self._save_warm,
                may_leave=self._may_leave_warm,
                evict=self.evict,
            )
            if catalog.warm is not None
            else None
        )
        self._budget = WriteBudget(limits.cold_bytes_per_day, catalog.clock().boot_ns)
        self._turn = trio.StrictFIFOLock()  # one at a time makes room, in order of asking
        self._changed = trio.Event()
        self._is_awaited = False
        self._crowded = trio.Event()
        self._flights: dict[int, _Flight] = {}
        self._moving: set[int] = set()
        self._waiting: Counter[int] = Counter()  # generations that want to grow, or to come
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve: promotions that outlive who asked for them, and room made ahead of need."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                await self._crowded.wait()
                self._crowded = trio.Event()
                await self._make_room_ahead()

    # -- room in the hot tier

    def lease_ended(self) -> None:
        """Somebody let go of bytes; who waits for room may try again."""
        if self._is_awaited:  # mostly nobody does
            self._is_awaited = False
            self._changed.set()
            self._changed = trio.Event()

    def _next_change(self) -> trio.Event:
        """Return what is set when a lease ends; to be taken before looking, so as to miss none."""
        self._is_awaited = True
        return self._changed

    def release_file(self, file: HotFile) -> None:
        """Give up a lease on a hot file; if it was removed, its room may have come back."""
        self._hot.release(file)
        if file.removed:
            self.lease_ended()

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
        self.lease_ended()  # who has its turn may have hoped for this one
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
        changed = self._next_change()
        stuck: set[int] = set()
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
        if self._catalog.writing_count > writing or self._moving - self._waiting.keys():
            return True
        if self._hot.holds_removed(but=self._waiting.keys()):
            return True
        now_ns = self._catalog.clock().boot_ns
        return any(
            block.opens and self._may_ever_leave(block, now_ns)
            for block in self._catalog.hot_order.leaving()
        )

    def _may_ever_leave(self, block: Block, now_ns: int) -> bool:
        """Whether a hot block may go once nobody has it open."""
        if block.placement is Placement.HOT or block.generation in self._waiting:
            return False
        if self._cold is not None or self._catalog.is_warm(block):
            return True
        return self.may_evict(block, now_ns)

    def _is_below(self, block: Block) -> bool:
        """Whether a lower tier holds a copy, so that the hot one may go at once."""
        return self._catalog.is_warm(block) or self._catalog.is_cold(block)

    def _cold_admits(self) -> bool:
        """Whether blocks that make room go to the cold tier: it takes some, and may be written."""
        cold = self._cold
        if cold is None or not cold.takes_blocks:
            return False
        self._budget.change(self.limits.cold_bytes_per_day)
        return self._budget.allows(self._catalog.clock().boot_ns, cold.written_bytes)

    def _victims(self, need_bytes: int, *, strict: bool, but: Container[int] = ()) -> list[Block]:
        now = self._catalog.clock()
        demotes = self._cold_admits()

        def may_go(block: Block) -> bool:
            if block.opens or block.generation in self._moving or block.generation in but:
                return False
            if block.state is not State.SEALED or block.placement is Placement.HOT:
                return False
            if self._is_below(block):
                return True
            young = now.boot_ns - block.used_ns < self.limits.temporary_wait_ns
            if strict and young and is_temporary(block.name):
                return False
            return demotes or self.may_evict(block, now.boot_ns)

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
                if self._warming is None and (self._cold is None or self._is_below(block)):
                    freed |= await self._leave_hot(block)
                else:
                    nursery.start_soon(leave, block)
        self.lease_ended()
        return freed

    async def _leave_hot(self, block: Block) -> bool:
        if not _may_leave_now(block):
            return block.is_gone
        if await self._warm_up(block):
            return True
        if not _may_leave_now(block):
            return block.is_gone
        if self._catalog.is_cold(block):
            self._catalog.drop_hot(block, spare=True)
            self._catalog.tell("moved", block, **{"from": "hot", "to": "cold"})
            return True
        may_evict = self.may_evict(block, self._catalog.clock().boot_ns)
        if self._cold is not None and may_evict and not self._cold_admits():
            self._catalog.counters.not_admitted += 1
        elif self._cold is not None:
            try:
                await self.demote(block)
                return not block.is_hot
            except BlockNotFound:
                return True  # overwritten, unlinked or expired meanwhile
            except CtxfsError as error:
                # Of a device that fails, the tier has said so; not once more for each block.
                level = logging.WARNING if self._cold.takes_blocks else logging.DEBUG
                log.log(level, "cannot move %r to the cold tier: %s", block.name, error)
        if not self.may_evict(block, self._catalog.clock().boot_ns):
            return False
        self.evict(block)
        return True

    async def _warm_up(self, block: Block) -> bool:
        """Leave the hot tier for the warm one, if that is better than the cold one."""
        warming = self._warming
        if warming is None:
            return False
        if not self._catalog.is_warm(block):
            if block.generation in self._moving or not warming.wants(block):
                return False
            try:
                if not await self.compress(block):
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

    async def compress(self, block: Block) -> bool:
        """Make a warm copy of a hot block; False where that does not pay, or has no room.

        Raises TierTrouble, BlockNotFound if the block went away meanwhile.
        """
        assert self._warming is not None
        while block.generation in self._moving:
            await self._next_change().wait()
        if block.is_gone or not block.is_hot or self._catalog.is_warm(block):
            return self._catalog.is_warm(block)
        self._moving.add(block.generation)
        try:
            with self._hot_file(block) as file:
                async with readable_span(file) as (_, view):
                    done = await self._warming.admit(block, view)
        finally:
            self._moving.discard(block.generation)
            self.lease_ended()
        if done:
            self._catalog.counters.warmed += 1
            self._catalog.counters.warmed_bytes += block.size
        return done

    async def move_to_warm(self, block: Block) -> None:
        """Keep a block in the warm tier alone, but for a cold copy it has. Raises TierFull where
        compressing it does not pay, or there is no room; and what `ensure_hot` and `compress` do.
        """
        if not self._catalog.is_warm(block):
            block.opens += 1
            try:
                await self.ensure_hot(block)
                if not await self.compress(block):
                    raise TierFull("the warm tier takes no copy: no room, or no gain")
            finally:
                block.opens -= 1
                self.lease_ended()
        if not block.opens and block.is_hot:
            self._catalog.drop_hot(block, spare=True)

    def _may_leave_warm(self, block: Block) -> bool:
        if block.opens or block.generation in self._moving or block.state is not State.SEALED:
            return False
        return self._cold_admits() or self.may_evict(block, self._catalog.clock().boot_ns)

    async def _save_warm(self, block: Block) -> None:
        """Write a block that only the warm tier holds to the cold one. Raises as `demote`."""
        if self._cold is None:
            raise TierFull("there is no cold tier")
        await self.demote(block, keep_hot=True)

    async def wait_landed(self) -> None:
        """Return when what is on its way to the cold tier now has arrived."""
        pending = self._moving - self._flights.keys()
        while pending := pending & self._moving:
            await self._next_change().wait()

    def is_moving(self, block: Block) -> bool:
        """Whether a copy of it is being made."""
        return block.generation in self._moving

    # -- down

    async def demote(self, block: Block, *, keep_hot: bool = False) -> None:
        """Write a sealed block to the cold tier; then drop its hot copy unless it is open.

        Raises TierFull, DeviceError, BlockNotFound if the block went away meanwhile.
        """
        cold = self._cold
        assert cold is not None
        while block.generation in self._moving:
            await self._next_change().wait()
        if block.is_gone:
            raise BlockNotFound("it went away before it could be moved")
        if not self._catalog.is_cold(block):
            self._moving.add(block.generation)
            try:
                await self._write_cold(block)
            finally:
                self._moving.discard(block.generation)
                self.lease_ended()
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
            with self._hot_file(block) as file:
                async with readable_span(file) as (span, view):
                    await self.put_cold(meta, span, view)
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

    async def _write_cold_from_warm(self, block: Block, meta: BlockMeta) -> bool:
        """Pass a warm copy on as it is, or inflated where it may not stay like that.

        False where the hot copy is to be written: there is no warm one, or none that is good.
        """
        warm = self._catalog.warm
        copy = warm.copy(block.generation) if warm is not None else None
        if warm is None or copy is None:
            return False
        try:
            if self.coding.may_be_kept(copy.method):
                with warm.open(block.generation) as stored:
                    await self._put_cold(meta, stored.span(), copy.method)
            else:
                assert self._warming is not None
                with Mapping(ANONYMOUS, block.size) as content:
                    await self._warming.fetch(block, content.view)
                    await self.put_cold(meta, content.span(0, block.size), content.view)
        except (CopyCorrupt, TierTrouble):
            if not block.is_hot:
                raise
            return False
        return True

    @contextlib.contextmanager
    def _hot_file(self, block: Block) -> Iterator[HotFile]:
        """Lease the hot file; a file that was removed behind our back is a lost block."""
        try:
            file = self._hot.acquire(block.generation)
        except FileNotFoundError as error:
            self.lost_hot(block)
            raise BlockNotFound("its hot file is gone") from error
        try:
            yield file
        finally:
            self.release_file(file)

    def lost_hot(self, block: Block) -> None:
        """The hot file is gone or wrong: go on with the cold copy, or without the block."""
        self._catalog.counters.trouble += 1
        self._catalog.tell("trouble", block, tier="hot")
        log.error("the hot file of %r is gone", block.name)
        if self._is_below(block):
            self._catalog.drop_hot(block)
        else:
            self._catalog.drop(block)

    async def put_cold(self, meta: BlockMeta, span: Span, view: memoryview) -> None:
        """Write content to the cold tier, encoded if that pays or is asked for; `span` is `view`
        in whole pages. Evicts from it what may go. Raises TierFull, DeviceError, UnknownKey.
        """
        async with self.coding.encoded(view, meta.dtype, meta.generation) as made:
            if made is None:
                await self._put_cold(meta, span, 0)
            else:
                await self._put_cold(meta, made.span, made.method)

    async def _put_cold(self, meta: BlockMeta, span: Span, method: int) -> None:
        assert self._cold is not None
        for _ in range(COLD_ROOM_TRIES):
            try:
                await self._cold.put(meta, span, method=method)
                return
            except TierFull:
                if not self._evict_cold(meta.generation, span.length + 8192):
                    raise
        raise TierFull("the cold tier is full")

    def _evict_cold(self, but: int, need_bytes: int) -> bool:
        """Drop the coldest blocks that may go; True if any did."""
        now_ns = self._catalog.clock().boot_ns

        def may_go(block: Block) -> bool:
            if block.opens or block.generation in self._moving or block.generation == but:
                return False
            return self.may_evict(block, now_ns)

        order = self._catalog.cold_order.leaving()
        victims = choose(order, need_bytes, self._catalog.cold_bytes, may_go)
        for block in victims:
            if not block.is_gone:  # it may have gone together with another
                self.evict(block)
        return bool(victims)

    # -- out

    def may_evict(self, block: Block, now_ns: int) -> bool:
        """Whether nothing that would go with this block is pinned."""
        if block.is_pinned(now_ns):
            return False
        root = self._catalog.names.together_root(block)
        if root is None:
            return True
        return not any(b.is_pinned(now_ns) for b in self._catalog.names.blocks_beneath(root))

    def evict(self, block: Block) -> None:
        """Drop a block for room, with those it must not be parted from."""
        for gone in self.drop_together(block):
            self._catalog.counters.evicted += 1
            self._catalog.counters.evicted_bytes += gone.size
            self._catalog.tell("evicted", gone)

    def drop_together(self, block: Block) -> list[Block]:
        """Drop a block; in a `together` directory all that is in there, and the directory."""
        root = self._catalog.names.together_root(block)
        if root is None:
            self._catalog.drop(block)
            return [block]
        blocks = list(self._catalog.names.blocks_beneath(root))
        for each in blocks:
            self._catalog.drop(each)
        self._remove_tree(root)
        return blocks

    def _remove_tree(self, directory: Directory) -> None:
        for node in list(directory.entries.values()):
            assert isinstance(node, Directory)
            self._remove_tree(node)
        if directory.parent is not None:
            self._catalog.remove_directory(directory)

    # -- up

    async def ensure_hot(self, block: Block) -> None:
        """Return when the block has a hot copy. The caller holds a lease (`opens`).

        Raises BlockNotFound, CopyCorrupt, DeviceError, DeadlineExceeded, TierFull.
        """
        if block.is_hot:
            return
        if not self._is_below(block):
            raise BlockNotFound("no tier holds it")
        flight = self._flights.get(block.generation)
        if flight is None:
            flight = self._flights[block.generation] = _Flight()
            assert self._nursery is not None
            self._nursery.start_soon(self._fly, block, flight)
        with trio.move_on_after(self.limits.read_deadline_s):
            await flight.done.wait()
            if flight.error is not None:
                raise type(flight.error)(str(flight.error))
            return
        raise DeadlineExceeded("the cold tier did not answer in time")

    async def _fly(self, block: Block, flight: _Flight) -> None:
        block.opens += 1
        self._moving.add(block.generation)
        try:
            await self._promote(block)
        except CtxfsError as error:
            flight.error = error
        finally:
            block.opens -= 1
            self._moving.discard(block.generation)
            del self._flights[block.generation]
            flight.done.set()
            self._catalog.forget_if_unused(block)
            self.lease_ended()

    async def _promote(self, block: Block) -> None:
        file = await self._arriving_file(block)
        try:
            source = "warm" if await self._inflate(block, file) else "cold"
            if source == "cold":
                await self._fetch_cold(block, file)
            if block.is_gone:
                raise BlockNotFound("it went away while it was promoted")
            self._hot.arrived(file)
            block.hot_bytes = file.physical_bytes
            self._catalog.hot_order.add(block)
            self._catalog.attributes_changed(block.generation)
        except BaseException as error:
            self._hot.remove(block.generation, file.physical_bytes)
            if isinstance(error, DeviceError) and not isinstance(error, COPY_IS_GOOD):
                self._copy_failed(block, error)
            raise
        finally:
            self.release_file(file)
        self._catalog.counters.promoted += 1
        self._catalog.counters.promoted_bytes += block.size
        self._catalog.tell("moved", block, **{"from": source, "to": "hot"})

    async def _inflate(self, block: Block, file: HotFile) -> bool:
        """Fill a hot file from the warm copy; False where there is none, or none that is good."""
        if self._warming is None or not self._catalog.is_warm(block):
            return False
        try:
            await self._warming.fetch(block, file.mapping().view)
            if await content_digest(file) != block.digest:
                raise CopyCorrupt("the warm copy does not match its digest")
            return True
        except (CopyCorrupt, TierTrouble) as error:
            if block.is_gone:
                raise BlockNotFound("it went away while it was promoted") from error
            if not self._catalog.is_cold(block):
                raise
            if isinstance(error, CopyCorrupt):
                self._tell_bad_copy(block, "warm", error)
                self._catalog.drop_warm(block)
            return False

    async def _fetch_cold(self, block: Block, file: HotFile) -> None:
        """Fill a hot file from the cold copy. Raises DeviceError, UnknownKey, BlockNotFound."""
        if not self._catalog.is_cold(block):
            raise BlockNotFound("it went away while it was promoted")
        began = time.perf_counter()
        await self._read_cold(block, file.span(), file.mapping().view)
        if self._warming is not None:
            self._warming.worth.read_cold(block.size, time.perf_counter() - began)
        if await content_digest(file) != block.digest:
            raise CopyCorrupt("the cold copy does not match its digest")

    async def _read_cold(self, block: Block, span: Span, view: memoryview) -> None:
        """Read the cold copy into memory: `span` is `view` in whole pages."""
        assert self._cold is not None
        length = self._cold.encoded_bytes(block.generation)
        if not length:
            await self._cold.get(block.generation, span)
            return
        with Mapping(ANONYMOUS, length) as stored:
            await self._cold.get(block.generation, stored.span())
            await self.coding.decode(stored.view, view, block.generation)

    async def _arriving_file(self, block: Block) -> HotFile:
        """Return a file of the block's size with all its pages, to be overwritten whole."""
        recycled = self._hot.recycle(block.generation, block.size)
        if recycled is not None:
            self._catalog.counters.recycled += 1
            return recycled
        need = physical_ceiling(block.size)
        await self.reserve(need, promoted=block.generation)
        try:
            file = self._hot.create(block.generation, arriving=True)
            try:
                await self._allocate(file, block.size)
            except BaseException:
                self._hot.settle(file)
                self._hot.remove(block.generation, file.physical_bytes)
                self.release_file(file)
                raise
            self._hot.settle(file)
            return file
        finally:
            self._hot.unreserve(need)  # its pages are there, and count by themselves

    async def _allocate(self, file: HotFile, size: int) -> None:
        if size <= ALLOCATE_INLINE_BYTES:
            self._hot.allocate(file, size)
        else:
            await trio.to_thread.run_sync(self._hot.allocate, file, size)

    async def verify(self, block: Block) -> None:
        """Compare every copy with the digest. Raises CopyCorrupt when one was bad and dropped."""
        bad = []
        block.opens += 1
        try:
            if block.is_hot:
                with self._hot_file(block) as file:
                    good = await content_digest(file) == block.digest
                if not good:
                    bad.append("hot")
            if self._catalog.is_warm(block) and not await self._verify_warm(block):
                bad.append("warm")
            if self._catalog.is_cold(block) and not await self._verify_cold(block):
                bad.append("cold")
        finally:
            block.opens -= 1
        if not bad:
            return
        for tier in bad:
            self._catalog.counters.corrupt += 1
            self._catalog.tell("corrupt", block, tier=tier)
        if bad == ["warm"] and (block.is_hot or self._catalog.is_cold(block)):
            self._catalog.drop_warm(block)
        elif "cold" not in bad and self._catalog.is_cold(block):
            self._catalog.drop_hot(block)
            self._catalog.drop_warm(block)
        elif bad == ["hot"] and self._catalog.is_warm(block):
            self._catalog.drop_hot(block)
        else:  # a generation's cold copy cannot be taken back without the generation
            self._catalog.drop(block)
        raise CopyCorrupt(f"bad copy: {', '.join(bad)}")

    async def _verify_cold(self, block: Block) -> bool:
        with Mapping(ANONYMOUS, block.size) as mapping:
            try:
                await self._read_cold(block, mapping.span(0, block.size), mapping.view)
            except COPY_IS_GOOD:
                raise
            except DeviceError as error:
                log.error("the cold copy of %r cannot be read: %s", block.name, error)
                return False
            result = await trio.to_thread.run_sync(digest, mapping.view)
        return result == block.digest

    async def _verify_warm(self, block: Block) -> bool:
        assert self._warming is not None
        with Mapping(ANONYMOUS, block.size) as mapping:
            try:
                await self._warming.fetch(block, mapping.view)
            except COPY_IS_GOOD:
                raise
            except (DeviceError, TierTrouble) as error:
                log.error("the warm copy of %r cannot be read: %s", block.name, error)
                return False
            result = await trio.to_thread.run_sync(digest, mapping.view)
        return result == block.digest

    def _copy_failed(self, block: Block, error: DeviceError) -> None:
        """A copy that cannot be read, or is not what was written, is dropped, never served."""
        tier = "cold" if self._catalog.is_cold(block) else "warm"
        self._tell_bad_copy(block, tier, error)
        self._catalog.drop(block)

    def _tell_bad_copy(self, block: Block, tier: str, error: CtxfsError) -> None:
        if isinstance(error, CopyCorrupt):
            self._catalog.counters.corrupt += 1
            self._catalog.tell("corrupt", block, tier=tier)
        log.error("the %s copy of %r is lost: %s", tier, block.name, error)


def _may_leave_now(block: Block) -> bool:
    """Whether a block has a hot copy that nobody uses."""
    return block.state is State.SEALED and not block.opens and block.is_hot


async def content_digest(file: HotFile) -> bytes:
    """Return the digest of a file that nobody changes, in a thread when that pays."""
    if file.has_holes():
        return await trio.to_thread.run_sync(lambda: digest_of_pieces(file.pieces()))
    view = file.mapping().view
    if file.size <= DIGEST_INLINE_BYTES:
        return digest(view)
    return await trio.to_thread.run_sync(digest, view)


@contextlib.asynccontextmanager
async def readable_span(
    file: HotFile, *, copied: bool = False
) -> AsyncIterator[tuple[Span, memoryview]]:
    """Give a file's content as memory: whole pages, and the bytes alone.

    `copied`: a copy of it, since somebody may change it. Of a file with holes it is always one.
    """
    if not copied and not file.has_holes():
        yield file.span(), file.mapping().view
        return
    with Mapping(ANONYMOUS, file.size) as copy:
        await trio.to_thread.run_sync(_read_whole, file.fd, copy.view)
        yield copy.span(0, copy.size), copy.view


def _read_whole(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], done)):  # at most 2 GiB each
        done += got
