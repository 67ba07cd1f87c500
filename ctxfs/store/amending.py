"""What all who may have a block are told: attributes that change after it was sealed, and that it
beat a version of another host of which its writer did not know.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from ctxfs.core.block import Block, State
from ctxfs.core.key import is_temporary
from ctxfs.core.tombstones import Tombstone
from ctxfs.errors import CtxfsError
from ctxfs.store.catalog import Catalog
from ctxfs.store.deletions import Deletions
from ctxfs.store.duequeue import DueQueue
from ctxfs.store.elsewhere import attributes_of
from ctxfs.store.toldonce import ToldOnce
from ctxfs.wire.messages import Offer, Reason, Refused

log = logging.getLogger(__name__)

TELLING_MAX: Final = 16  # blocks at a time
PENDING_MAX: Final = 1 << 16  # blocks; the rest is left to repair
PAUSE_MIN_S: Final = 0.25
PAUSE_MAX_S: Final = 60.0


class Members(Protocol):
    """Who there is, and the way there."""

    @property
    def others(self) -> tuple[str, ...]:
        """Names of all other members."""

    async def amend(self, name: str, offer: Offer) -> Refused:
        """Tell the attributes of a block that it may have. Raises CtxfsError."""


@dataclass(slots=True)
class AmendingCounters:
    """What came of telling attributes, since the start."""

    amended: int = 0  # blocks whose attributes were changed here
    told: int = 0  # members, of one block each
    untold: int = 0  # times that one could not be told, and is tried again
    corrected: int = 0  # members that had older attributes than are here
    left_to_repair: int = 0  # blocks that did not fit the queue


@dataclass(slots=True)
class _Pending:
    """A block of which not all know the attributes yet. `names`: who does not.

    `beaten`: an older version that some may have, and believe to be the newest; 0: none.
    """

    names: set[str]
    beaten: int = 0
    tries: int = 0
    is_under_way: bool = False
    changes: int = 0


class Amending:
    """Tells all members, of which any may have a copy, and again those that did not answer.

    What is told is what the attributes are by then. A member that left is given up: when it comes
    back and offers what it has, it is told (`Receiver.behind`).
    """

    def __init__(self, catalog: Catalog, deletions: Deletions, members: Members) -> None:
        self.counters = AmendingCounters()
        self._catalog = catalog
        self._deletions = deletions
        self._members = members
        self._pending: OrderedDict[int, _Pending] = OrderedDict()  # by generation
        self._due = DueQueue()  # of generations
        self.was_offered: Callable[[Block], bool] = lambda block: True
        self._told = ToldOnce(log, "attributes")

    @property
    def waiting(self) -> int:
        """Of how many blocks somebody has to be told."""
        return len(self._pending)

    def amended(self, block: Block) -> None:
        """Attributes of a block were changed here."""
        self.counters.amended += 1
        if not is_temporary(block.name) or self.was_offered(block):
            self._add(block, self._members.others)

    def behind(self, block: Block, member: str) -> None:
        """A member has older ones."""
        self.counters.corrected += 1
        self._add(block, (member,))

    def beats(self, block: Block, version: int) -> None:
        """An older version is about of which nobody said that it was overwritten: who wrote this
        one did not know of it. The deletion may just be on its way, so not at once.
        """
        pending = self._add(block, self._members.others, PAUSE_MIN_S)
        pending.beaten = max(pending.beaten, version)

    def retry(self) -> None:
        """Members came or went: try all that waits at once."""
        now_s = trio.current_time()
        for generation, pending in self._pending.items():
            if pending.tries:
                self._schedule(generation, now_s)

    def _add(self, block: Block, names: Iterable[str], after_s: float = 0.0) -> _Pending:
        pending = self._pending.setdefault(block.generation, _Pending(set()))
        pending.names |= set(names)
        pending.changes += 1
        self._schedule(block.generation, trio.current_time() + after_s)
        while len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)
            self.counters.left_to_repair += 1
        return pending

    def _schedule(self, generation: int, at_s: float) -> None:
        self._due.add(at_s, generation)

    # -- telling

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell what is due until cancelled."""
        slots = trio.Semaphore(TELLING_MAX)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                await slots.acquire()
                nursery.start_soon(self._attempt, await self._due.next(self._takes), slots)

    def _takes(self, _: float, generation: int) -> bool:
        pending = self._pending.get(generation)
        if pending is None or pending.is_under_way:
            return False
        pending.is_under_way = True
        return True

    async def _attempt(self, generation: int, slots: trio.Semaphore) -> None:
        pending = self._pending.get(generation)
        if pending is None:  # it was left to repair since
            slots.release()
            return
        changes = pending.changes
        try:
            untold = await self._tell_all(generation, pending)
        finally:
            pending.is_under_way = False
            slots.release()
        if self._pending.get(generation) is not pending:
            return
        if pending.changes != changes:  # who was told, was told what was right before
            self._schedule(generation, trio.current_time())
        elif untold:
            pending.names, pending.tries = untold, pending.tries + 1
            pause_s = min(PAUSE_MIN_S * 2.0 ** (pending.tries - 1), PAUSE_MAX_S)
            self._schedule(generation, trio.current_time() + pause_s)
        else:
            del self._pending[generation]

    async def _tell_all(self, generation: int, pending: _Pending) -> set[str]:
        """Returns who is to be told again."""
        block = self._catalog.names.by_inode.get(generation)
        if not isinstance(block, Block) or block.is_gone:
            return set()
        key = self._catalog.names.key_of(block)
        dead = self._deletions.table.get(key)
        is_news = pending.beaten > (dead.version if dead is not None else 0)
        if block.state is not State.SEALED:
            return pending.names if is_news else set()
        if not (block.revision or is_news):
            return set()  # another version by now, which has its attributes with it
        untold: set[str] = set()
        offer = Offer(
            key,
            block.version,
            block.size,
            block.digest,
            attributes_of(block, self._catalog.clock()),
            0,
        )
        async with trio.open_nursery() as nursery:
            for name in pending.names & set(self._members.others):
                nursery.start_soon(self._tell, name, offer, untold)
        return untold

    async def _tell(self, name: str, offer: Offer, untold: set[str]) -> None:
        try:
            answer = await self._members.amend(name, offer)
        except CtxfsError as error:
            self.counters.untold += 1
            self._told.waits(name, error)
            untold.add(name)
            return
        if answer.reason is Reason.BUSY:
            untold.add(name)
            return
        self._told.takes(name)
        self.counters.told += 1
        if answer.reason is Reason.GONE:
            await self._deletions.hear([Tombstone(offer.key, answer.version, answer.until_ns)])
