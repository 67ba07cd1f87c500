"""What all who move blocks share: which are on their way, and when somebody lets go of bytes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import trio

from ctxfs.core.block import Block
from ctxfs.errors import BlockNotFound
from ctxfs.store.catalog import Catalog
from ctxfs.tiers.hot import HotFile

log = logging.getLogger(__name__)


class Moves:
    """`moving`: generations of which a copy is being made; nobody else moves or evicts them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._hot = catalog.hot
        self._changed = trio.Event()
        self._is_awaited = False
        self.moving: set[int] = set()

    def lease_ended(self) -> None:
        """Somebody let go of bytes; who waits for room may try again."""
        if self._is_awaited:  # mostly nobody does
            self._is_awaited = False
            self._changed.set()
            self._changed = trio.Event()

    def next_change(self) -> trio.Event:
        """Return what is set when a lease ends; to be taken before looking, so as to miss none."""
        self._is_awaited = True
        return self._changed

    def release_file(self, file: HotFile) -> None:
        """Give up a lease on a hot file; if it was removed, its room may have come back."""
        self._hot.release(file)
        if file.removed:
            self.lease_ended()

    @contextlib.contextmanager
    def hot_file(self, block: Block) -> Iterator[HotFile]:
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
        if self._catalog.is_below(block):
            self._catalog.drop_hot(block)
        else:
            self._catalog.drop(block)

    @contextlib.asynccontextmanager
    async def alone(self, block: Block) -> AsyncIterator[None]:
        """Wait until nobody moves a block, and keep others from it."""
        while block.generation in self.moving:
            await self.next_change().wait()
        self.moving.add(block.generation)
        try:
            yield
        finally:
            self.moving.discard(block.generation)
            self.lease_ended()
