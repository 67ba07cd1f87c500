"""The same content under several keys: written to the cold tier once, and compared before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from ctxfs.core.meta import BlockMeta
from ctxfs.device.memorypool import POOL
from ctxfs.errors import BlockNotFound, CopyCorrupt, DeviceError, NewerStream, UnknownKey
from ctxfs.ondisk.layout import padded
from ctxfs.store.coding import Coding
from ctxfs.tiers.cold import ColdTier
from ctxfs.tiers.cold_twins import Twin

# Shorter ones would save about as many pages as it takes to say that they are the same.
SHARED_BYTES_MIN = 16 << 10
# What was stored cannot be compared, so it is not shared; other errors are nobody's here.
_CANNOT_COMPARE = (BlockNotFound, CopyCorrupt, DeviceError, NewerStream, UnknownKey)

PutAlias = Callable[[Twin], Awaitable[None]]


class Sharer:
    """Finds out whether a block that goes to the cold tier is there already."""

    def __init__(self, cold: ColdTier | None, coding: Coding) -> None:
        self._cold = cold
        self._coding = coding
        self._coming: dict[tuple[bytes, int], trio.Event] = {}  # digest and size
        self.not_same = 0  # contents of one digest that were compared in vain

    def has_twin(self, meta: BlockMeta) -> bool:
        """Whether the content of a block may be stored already."""
        return self._twin(meta) is not None

    def _twin(self, meta: BlockMeta) -> Twin | None:
        if self._cold is None or not self._coding.settings.share or meta.size < SHARED_BYTES_MIN:
            return None
        twin = self._cold.twin(meta)
        if twin is None or not self._coding.may_be_kept(twin.method):
            return None
        return twin

    @asynccontextmanager
    async def one_at_a_time(self, meta: BlockMeta) -> AsyncIterator[None]:
        """Of blocks with one content that come at once, the first is written, and others see it."""
        content = (meta.digest, meta.size)
        while content in self._coming:
            await self._coming[content].wait()
        landed = self._coming[content] = trio.Event()
        try:
            yield
        finally:
            del self._coming[content]
            landed.set()

    async def share(
        self, meta: BlockMeta, view: memoryview, put_alias: PutAlias, own: int = 0
    ) -> bool:
        """Put a block by the content of another one; False where there is none that is the same,
        byte by byte. `view`: its own. Raises what `put_alias` raises.

        `own`: a generation that the same writer wrote, whose digest is proof enough: who makes two
        contents of one digest deceives nobody else.
        """
        twin = self._twin(meta)
        if twin is None:
            return False
        with twin.held() as is_here:
            if not is_here:
                return False
            if twin.content != own and not await self._is_same(twin, view):
                return False
            await put_alias(twin)
        return True

    async def _is_same(self, twin: Twin, view: memoryview) -> bool:
        """Reading wears no drive, and takes less of its time than writing."""
        length = twin.stored_bytes if twin.method else len(view)
        if twin.stored_bytes != padded(length):
            return False
        try:
            with POOL.memory(length) as stored:
                await twin.read(stored.span())
                same = await self._coding.holds(stored.view, twin.method, twin.content, view)
        except _CANNOT_COMPARE:
            same = False
        self.not_same += not same
        return same
