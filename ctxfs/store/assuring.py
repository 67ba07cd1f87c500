"""What fsync waits for in a cluster beside the medium here: that other members have the block."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

import trio

from ctxfs.codec.digest import EMPTY, digest
from ctxfs.core.block import Block, State
from ctxfs.core.key import is_lock
from ctxfs.errors import BlockNotFound, ReplicasMissing
from ctxfs.store.hotbytes import readable_span
from ctxfs.store.replicating import Replicator
from ctxfs.store.store import Store

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.25  # between two tries where a home did not take it


@dataclass(slots=True)
class AssuringCounters:
    """What came of waiting, since the start."""

    waited: int = 0  # calls
    missing: int = 0  # of these, that ended without all replicas


class Unassured:
    """Stands in while this host shares nothing yet. Satisfies `ctxfs.store.sealing.Assurance`."""

    def __init__(self, *, is_wanted: bool) -> None:
        self.is_wanted = is_wanted

    async def assure(self, block: Block) -> None:
        """Raises ReplicasMissing."""
        await trio.lowlevel.checkpoint()
        raise ReplicasMissing("this host shares nothing before it has a slot in the cluster")


class Assuring:
    """Satisfies `ctxfs.store.sealing.Assurance`."""

    def __init__(self, store: Store, replicator: Replicator) -> None:
        self.counters = AssuringCounters()
        self.is_wanted = False
        self.deadline_s = 10.0
        self._store = store
        self._catalog = store.catalog
        self._replicator = replicator

    async def assure(self, block: Block) -> None:
        """Return when the members that are to hold a block have its content as it is now.

        One that is gone, or is of this host alone, has none. Raises ReplicasMissing.
        """
        if is_lock(block.name):
            return
        self.counters.waited += 1
        with trio.move_on_after(self.deadline_s) as patience:
            while not await self._try(block):
                changed = self._replicator.changed
                with trio.move_on_after(AGAIN_S):
                    await changed.wait()
        if patience.cancelled_caught:
            self.counters.missing += 1
            key = os.fsdecode(self._catalog.names.key_of(block))
            lacking = ", ".join(self._replicator.missing(block)) or "others, which are too few,"
            text = f"{key} is not on {lacking} after {self.deadline_s:g} s"
            log.error("fsync: %s", text)
            raise ReplicasMissing(text)

    async def _try(self, block: Block) -> bool:
        if block.is_gone:
            return True
        try:
            if block.state is State.SEALED:
                return await self._replicator.confirm(block)
            return await self._send_unsealed(block)
        except BlockNotFound:
            return True

    async def _send_unsealed(self, block: Block) -> bool:
        """Send what is published and not sealed yet: that comes after its last close."""
        await self._store.sealing.thawed(block)
        if block.state is not State.WRITING:
            return False
        is_lent = self._store.lending.look(block)
        file = self._catalog.hot.acquire(block.generation)
        try:
            with self._store.sealing.freeze(block):
                if not file.size:
                    return await self._replicator.send_ahead(block, EMPTY, memoryview(b""))
                async with readable_span(file, copied=is_lent) as (_, content):
                    found = await trio.to_thread.run_sync(digest, content)
                    return await self._replicator.send_ahead(block, found, content)
        finally:
            self._store.mover.moves.release_file(file)
