"""Up: blocks come into the hot tier, verified; and every copy is verified on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ctxfs.codec.digest import digest
from ctxfs.core.block import Block
from ctxfs.device.engine import Span
from ctxfs.device.mapping import Mapping
from ctxfs.device.memorypool import POOL
from ctxfs.errors import (
    BlockNotFound,
    CopyCorrupt,
    CtxfsError,
    DeadlineExceeded,
    DeviceError,
    NewerStream,
    TierTrouble,
    UnknownKey,
)
from ctxfs.store.catalog import Catalog
from ctxfs.store.coding import Coding
from ctxfs.store.elsewhere import Elsewhere
from ctxfs.store.hotbytes import content_digest, received_digest
from ctxfs.store.moves import Moves
from ctxfs.store.warming import Warming
from ctxfs.tiers.hot import HotFile, physical_ceiling

log = logging.getLogger(__name__)

ALLOCATE_INLINE_BYTES = 256 << 10
COPY_IS_GOOD = (UnknownKey, NewerStream)  # it cannot be read here and now, and stays


class Reserve(Protocol):
    """Sets room aside in the hot tier for a generation that is to come. Raises TierFull."""

    async def __call__(self, need_bytes: int, *, promoted: int) -> None: ...


@dataclass(slots=True)
class _Flight:
    """One promotion, however many wait for it."""

    done: trio.Event = field(default_factory=trio.Event)
    error: CtxfsError | None = None


class Promoter:
    """One flight for each block, however many ask. `deadline_s`: how long each of them waits."""

    def __init__(
        self,
        catalog: Catalog,
        moves: Moves,
        coding: Coding,
        warming: Warming | None,
        reserve: Reserve,
        deadline_s: float,
    ) -> None:
        self._catalog = catalog
        self._moves = moves
        self._coding = coding
        self._warming = warming
        self._reserve = reserve
        self.deadline_s = deadline_s
        self._hot = catalog.hot
        self._cold = catalog.cold
        self.elsewhere: Elsewhere | None = None
        self.flights: dict[int, _Flight] = {}
        self.nursery: trio.Nursery | None = None  # of flights, which outlive who asked for them

    async def ensure_hot(self, block: Block) -> None:
        """Return when the block has a hot copy. The caller holds a lease (`opens`).

        Raises BlockNotFound, CopyCorrupt, DeviceError, DeadlineExceeded, TierFull.
        """
        if block.is_hot:
            return
        if not self._catalog.is_below(block):
            raise BlockNotFound("no tier holds it")
        flight = self.flights.get(block.generation)
        if flight is None:
            flight = self.flights[block.generation] = _Flight()
            assert self.nursery is not None
            self.nursery.start_soon(self._fly, block, flight)
        with trio.move_on_after(self.deadline_s):
            await flight.done.wait()
            if flight.error is not None:
                raise type(flight.error)(str(flight.error))
            return
        raise DeadlineExceeded("the cold tier did not answer in time")

    async def _fly(self, block: Block, flight: _Flight) -> None:
        block.opens += 1
        self._moves.moving.add(block.generation)
        try:
            await self._promote(block)
        except CtxfsError as error:
            flight.error = error
        finally:
            block.opens -= 1
            self._moves.moving.discard(block.generation)
            del self.flights[block.generation]
            flight.done.set()
            self._catalog.forget_if_unused(block)
            self._moves.lease_ended()

    async def _promote(self, block: Block) -> None:
        file = await self.arriving_file(block)
        try:
            source = await self._fill(block, file)
            if block.is_gone:
                raise BlockNotFound("it went away while it was promoted")
            self._hot.arrived(file)
            block.hot_bytes = file.physical_bytes
            self._catalog.hot_order.add(block)
            self._catalog.attributes_changed(block.generation)
            if source == "remote" and self.elsewhere is not None:
                self.elsewhere.arrived(block)
        except BaseException as error:
            self._hot.remove(block.generation, file.physical_bytes)
            if isinstance(error, DeviceError) and not isinstance(error, COPY_IS_GOOD):
                self._copy_failed(block, error)
            raise
        finally:
            self._moves.release_file(file)
        self._catalog.counters.promoted += 1
        self._catalog.counters.promoted_bytes += block.size
        self._catalog.tell("moved", block, **{"from": source, "to": "hot"})

    async def _fill(self, block: Block, file: HotFile) -> str:
        """Fill a hot file from the fastest copy; returns where that is."""
        if await self._inflate(block, file):
            return "warm"
        if self._catalog.is_cold(block) or self.elsewhere is None:
            await self._fetch_cold(block, file)
            return "cold"

        async def is_right() -> bool:
            return await received_digest(file) == block.digest

        await self.elsewhere.fetch(block, file.mapping().view, is_right)
        return "remote"

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
        made_for = self._cold.written_as(block.generation)
        if not length:
            await self._cold.get(block.generation, span, len(view))
            return
        with POOL.memory(length) as stored:
            await self._cold.get(block.generation, stored.span(), length)
            await self._coding.decode(stored.view, view, made_for)

    async def arriving_file(self, block: Block) -> HotFile:
        """Return a file of the block's size with all its pages, to be overwritten whole.

        Raises TierFull, TierTrouble.
        """
        recycled = self._hot.recycle(block.generation, block.size)
        if recycled is not None:
            self._catalog.counters.recycled += 1
            return recycled
        need = physical_ceiling(block.size)
        await self._reserve(need, promoted=block.generation)
        try:
            file = self._hot.create(block.generation, arriving=True)
            try:
                await self._allocate(file, block.size)
            except BaseException:
                self._hot.settle(file)
                self._hot.remove(block.generation, file.physical_bytes)
                self._moves.release_file(file)
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
                with self._moves.hot_file(block) as file:
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

    async def _is_good(
        self, block: Block, tier: str, read: Callable[[Mapping], Awaitable[None]]
    ) -> bool:
        """Whether what `read` puts into memory is the block's content. `tier`: what is told."""
        with POOL.memory(block.size) as mapping:
            try:
                await read(mapping)
            except COPY_IS_GOOD:
                raise
            except (DeviceError, TierTrouble) as error:
                log.error("the %s copy of %r cannot be read: %s", tier, block.name, error)
                return False
            result = await trio.to_thread.run_sync(digest, mapping.view)
        return result == block.digest

    async def _verify_cold(self, block: Block) -> bool:
        return await self._is_good(
            block, "cold", lambda into: self._read_cold(block, into.span(0, block.size), into.view)
        )

    async def _verify_warm(self, block: Block) -> bool:
        warming = self._warming
        assert warming is not None
        return await self._is_good(block, "warm", lambda into: warming.fetch(block, into.view))

    def _copy_failed(self, block: Block, error: DeviceError) -> None:
        """A copy that cannot be read, or is not what was written, is dropped, never served."""
        if block.generation in self._catalog.elsewhere and not self._catalog.is_here(block):
            log.error("%r is nowhere to be had: %s", block.name, error)  # who lied was told of
        else:
            tier = "cold" if self._catalog.is_cold(block) else "warm"
            self._tell_bad_copy(block, tier, error)
        self._catalog.drop(block)

    def _tell_bad_copy(self, block: Block, tier: str, error: CtxfsError) -> None:
        if isinstance(error, CopyCorrupt):
            self._catalog.counters.corrupt += 1
            self._catalog.tell("corrupt", block, tier=tier)
        log.error("the %s copy of %r is lost: %s", tier, block.name, error)
