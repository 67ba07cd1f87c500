"""Copies that members lack after others came or went: found in the background, and throttled."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import trio

from ctxfs.core.block import Block, State
from ctxfs.core.members import Membership
from ctxfs.core.placement import Placement, hash_keys
from ctxfs.core.repair import SECOND_NS, TokenBucket, plan, presumed
from ctxfs.store.catalog import Catalog
from ctxfs.store.replicating import Replicator

log = logging.getLogger(__name__)

BATCH: Final = 4096  # keys that are planned for at a time
WAITING_MAX: Final = 1024  # blocks that wait to be sent: no more are looked for meanwhile
PAUSE_S: Final = 0.2


class Repairer:
    """Walks through all blocks after each change; a change meanwhile begins it anew."""

    def __init__(
        self, catalog: Catalog, replicator: Replicator, me: str, replicas: int, bytes_per_s: int
    ) -> None:
        """`replicas`: homes of a block that says nothing else."""
        self._catalog = catalog
        self._replicator = replicator
        self._me = me
        self._replicas = replicas
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s, time.monotonic_ns())
        self._change: tuple[Placement, Placement] | None = None
        self._wanted = trio.Event()
        self.repaired = 0  # blocks that were handed over to be sent

    def changed(self, before: Membership, after: Membership) -> None:
        """Members came or went."""
        first = self._change[0] if self._change is not None else Placement(before)
        self._change = first, Placement(after)
        self._wanted.set()

    def doubt(self, members: Membership) -> None:
        """Others may lack anything that is here: what was to be sent is not known any more."""
        self._change = Placement(()), Placement(members)
        self._wanted.set()

    def apply(self, replicas: int, bytes_per_s: int, members: Membership) -> None:
        """Go by these from now on; where blocks are to have more homes, they get them."""
        now_ns = time.monotonic_ns()
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s, now_ns)
        if replicas != self._replicas:
            self._replicas = replicas
            self.doubt(members)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            if self._change is None:
                continue
            change, count = self._change, self.repaired
            if await self._repair(*change) and self._change == change:
                self._change = None
            if self.repaired > count:
                log.info("%d blocks are sent to members that lack them", self.repaired - count)

    async def _repair(self, before: Placement, after: Placement) -> bool:
        """Whether it came to the end."""
        me = after.index(self._me)
        if me is None:
            return True
        generations = iter([block.generation for block in self._all_blocks()])
        while batch := list(islice(generations, BATCH)):
            if self._wanted.is_set():
                return False
            blocks = [block for block in map(self._held, batch) if block is not None]
            for replicas, some in self._by_replicas(blocks).items():
                hashes = hash_keys(self._catalog.names.key_of(block) for block in some)
                holds = presumed(hashes, before, after, replicas)
                holds[:, me] = True
                rows = plan(hashes, holds, after, replicas).of(me).row
                for row in dict.fromkeys(rows.tolist()):
                    await self._send(some[row])
            await trio.lowlevel.checkpoint()
        return True

    def _by_replicas(self, blocks: Iterable[Block]) -> dict[int, list[Block]]:
        """Blocks by how many homes each is to have."""
        groups: dict[int, list[Block]] = {}
        for block in blocks:
            groups.setdefault(block.replicas or self._replicas, []).append(block)
        return groups

    def _all_blocks(self) -> Iterator[Block]:
        names = self._catalog.names
        yield from names.blocks_beneath(names.root)

    def _held(self, generation: int) -> Block | None:
        """A sealed block with a copy here."""
        block = self._catalog.names.by_inode.get(generation)
        if not isinstance(block, Block) or block.state is not State.SEALED:
            return None
        return block if self._catalog.is_here(block) else None

    async def _send(self, block: Block) -> None:
        while self._replicator.waiting > WAITING_MAX:  # noqa: ASYNC110
            await trio.sleep(PAUSE_S)
        wait_ns = self._bucket.take(block.size, time.monotonic_ns())
        if wait_ns:
            await trio.sleep(wait_ns / SECOND_NS)
        if not block.is_gone:
            self._replicator.replicate(block)
            self.repaired += 1
