"""Copies that members lack after others came or went: found in the background, and throttled."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import trio

from ctxfs.core.block import Block, State
from ctxfs.core.members import Membership, difference
from ctxfs.core.placement import Placement, hash_keys
from ctxfs.core.repair import SECOND_NS, TokenBucket, plan, presumed
from ctxfs.store.catalog import Catalog
from ctxfs.store.replicating import Replicator

log = logging.getLogger(__name__)

BATCH: Final = 4096  # keys that are planned for at a time
WAITING_MAX: Final = 1024  # blocks that wait to be sent: no more are looked for meanwhile
PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class _Change:
    """`anew`: members that were started since; what they held `before` may be lost."""

    before: Placement
    after: Placement
    anew: frozenset[str] = frozenset()


class Repairer:
    """Walks through all blocks after each change; a change meanwhile begins it anew.

    Until it is through, the replicator is told that it cannot be sure of blocks from before.
    """

    def __init__(
        self,
        catalog: Catalog,
        replicator: Replicator,
        me: str,
        replicas: int,
        bytes_per_s: int,
        *,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        """`replicas`: homes of a block that says nothing else."""
        self._catalog = catalog
        self._replicator = replicator
        self._me = me
        self._replicas = replicas
        self._waiting_max = waiting_max
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s, time.monotonic_ns())
        self._change: _Change | None = None
        self._now: Placement | None = None  # as far as we were told
        self._wanted = trio.Event()
        self._is_behind = False  # a block was left to us, maybe one that the walk has passed
        self.repaired = 0  # blocks that were handed over to be sent
        self._be_unsure()  # what an earlier life had not sent is not known
        replicator.left_to_repair = self._left
        replicator.was_there = self._was_there

    def changed(self, before: Membership, after: Membership) -> None:
        """Members came or went, or were started anew."""
        change = difference(before, after)
        anew = {each.name for each in (*change.joined, *change.restarted)} - {self._me}
        if not anew and not change.moves_homes:
            return
        first = Placement(before)
        if self._change is not None:
            first, anew = self._change.before, anew | self._change.anew
        self._begin(_Change(first, Placement(after), frozenset(anew)))

    def doubt(self, members: Membership) -> None:
        """Others may lack anything that is here: what was to be sent is not known any more."""
        self._begin(_Change(Placement(()), Placement(members)))

    def _begin(self, change: _Change) -> None:
        self._change, self._now = change, change.after
        self._be_unsure()
        self._wanted.set()

    def apply(self, replicas: int, bytes_per_s: int, members: Membership) -> None:
        """Go by these from now on; where blocks are to have more homes, they get them."""
        now_ns = time.monotonic_ns()
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s, now_ns)
        if replicas != self._replicas:
            self._replicas = replicas
            self.doubt(members)

    def _was_there(self, length_bytes: int) -> None:
        """It took no time of the network."""
        self._bucket.give_back(length_bytes)

    def _be_unsure(self) -> None:
        versions = self._catalog.versions
        self._replicator.unsure_to = versions.highest if versions is not None else 0

    def _left(self) -> None:
        """A block did not fit the replicator's queue."""
        self._is_behind = True
        self._be_unsure()
        if self._change is None:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._now is not None:
            self._is_behind = False
            self._begin(_Change(Placement(()), self._now))

    def _is_through(self) -> None:
        self._change = None
        if self._is_behind:
            self._catch_up()
        else:
            self._replicator.unsure_to = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            if self._change is None:
                continue
            change, count = self._change, self.repaired
            if await self._repair(change) and self._change is change:
                self._is_through()
            if self.repaired > count:
                log.info("%d blocks are sent to members that lack them", self.repaired - count)

    async def _repair(self, change: _Change) -> bool:
        """Whether it came to the end."""
        me = change.after.index(self._me)
        if me is None:
            return False  # until we are a member
        lost = [change.after.index(name) for name in change.anew]
        generations = iter([block.generation for block in self._all_blocks()])
        while batch := list(islice(generations, BATCH)):
            if self._wanted.is_set():
                return False
            blocks = [block for block in map(self._held, batch) if block is not None]
            for replicas, some in self._by_replicas(blocks).items():
                hashes = hash_keys(self._catalog.names.key_of(block) for block in some)
                holds = presumed(hashes, change.before, change.after, replicas)
                holds[:, [column for column in lost if column is not None]] = False
                holds[:, me] = True
                rows = plan(hashes, holds, change.after, replicas).of(me).row
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
        while self._replicator.waiting > self._waiting_max:  # noqa: ASYNC110
            await trio.sleep(PAUSE_S)
        homes, _ = self._replicator.reached(block)
        wait_ns = self._bucket.take(homes * block.size, time.monotonic_ns())
        if wait_ns:
            await trio.sleep(wait_ns / SECOND_NS)
        if not block.is_gone:
            self._replicator.replicate(block, is_repair=True)
            self.repaired += 1
