"""Blocks that are sealed here go to their homes in the background."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from ctxfs.codec.digest import EMPTY
from ctxfs.core.block import Block, Directory, State
from ctxfs.core.key import is_lock, is_temporary
from ctxfs.core.tombstones import Tombstone
from ctxfs.device.lanes import Source
from ctxfs.errors import BlockNotFound, CtxfsError
from ctxfs.store.deletions import Deletions
from ctxfs.store.duequeue import DueQueue
from ctxfs.store.elsewhere import PREFIXES, attributes_of
from ctxfs.store.hotbytes import sendable
from ctxfs.store.inflight import InFlight
from ctxfs.store.serving import directory_attributes
from ctxfs.store.store import Store
from ctxfs.store.toldonce import ToldOnce
from ctxfs.wire.messages import Offer, Reason, Refused, Stored

log = logging.getLogger(__name__)

PUSHES_MAX: Final = 8  # blocks at a time
IN_FLIGHT_BYTES_MAX: Final = 256 << 20
PENDING_MAX: Final = 1 << 16  # blocks; the rest is left to repair
TEMPORARY_GRACE_S: Final = 30.0  # most are renamed long before
BACKOFF_MIN_S: Final = 0.25
BACKOFF_MAX_S: Final = 60.0
LOOK_S: Final = 1.0
AHEAD_MANY: Final = 1024  # blocks that were sent unsealed: from here on it is looked who is gone
OURSELVES: Final = -1  # the owner of what is open for us


class Homes(Protocol):
    """Who holds what, and the way there."""

    def homes(self, key: bytes, replicas: int | None = None) -> tuple[str, ...]:
        """Names of the members that are to hold a key; we may be among them. `replicas`: how many,
        if not as all others.
        """

    def wanted(self, replicas: int | None = None) -> int:
        """How many there are to be, also where there are fewer members."""

    async def push(self, name: str, offer: Offer, source: Source) -> Stored | Refused:
        """Send a block, or learn why it is not wanted. `source` stays. Raises CtxfsError."""


@dataclass(slots=True)
class ReplicatorCounters:
    """What came of pushes to each home, since the start."""

    pushed: int = 0
    pushed_bytes: int = 0
    had: int = 0  # had it already: no byte was sent
    gone: int = 0  # was deleted, as the home knows
    refused: int = 0  # had no room, or was busy
    failed: int = 0
    left_to_repair: int = 0  # blocks that did not fit the queue
    ahead: int = 0  # blocks that were sent before they were sealed, since somebody waited


@dataclass(slots=True)
class _Pending:
    """A block, or the sign of a directory, that is not at all of its homes yet."""

    version: int
    due_s: float
    reached: set[str] = field(default_factory=set)
    tries: int = 0
    is_repair: bool = False
    after_s: float = 0.0  # a home asked not to be asked again before
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class _Ahead:
    """What was sent of a block that is not sealed."""

    digest: bytes
    pending: _Pending


class Replicator:
    """Pushes blocks to their homes. The queue holds numbers, bytes are held while they are sent.

    `me`: our name among the homes. A block of which nothing is known here is taken to be at all of
    its homes: it came from elsewhere, or is complete. Of those up to `unsure_to` nobody knows.
    """

    def __init__(
        self,
        store: Store,
        deletions: Deletions,
        homes: Homes,
        me: str,
        *,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
        pending_max: int = PENDING_MAX,
        temporary_grace_s: float = TEMPORARY_GRACE_S,
    ) -> None:
        self.counters = ReplicatorCounters()
        self._store = store
        self._catalog = store.catalog
        self._deletions = deletions
        self._homes = homes
        self._me = me
        self._in_flight = InFlight(in_flight_bytes_max)
        self._pending_max = pending_max
        self._grace_s = temporary_grace_s
        self._pending: OrderedDict[int, _Pending] = OrderedDict()  # by inode
        self._ahead: dict[int, _Ahead] = {}  # by generation
        self.changed = trio.Event()  # members came or went; another one each time
        # Blocks up to this generation may lack homes though they are not pending: members came,
        # or we did, and repair has not looked through them all since.
        self.unsure_to = 0
        self.left_to_repair: Callable[[], None] = lambda: None  # a block is, from now on
        self.was_there: Callable[[int], None] = lambda length_bytes: None  # to repair: not sent
        self._due = DueQueue()  # of inodes
        self._under_way: set[int] = set()
        self._told = ToldOnce(log, "blocks")

    # -- what is to be sent

    def sealed(self, block: Block) -> None:
        """A block is here that a program wrote, or has another name."""
        ahead = self._ahead.pop(block.generation, None)
        if ahead is not None and ahead.pending.version == block.version:
            if ahead.digest == block.digest:
                self._pending[block.generation] = ahead.pending
            else:
                self._catalog.renew(block)  # through a mapping that outlived its close
        grace_s = self._grace_s if is_temporary(block.name) else 0.0
        self.replicate(block, grace_s)

    def replicate(self, block: Block, after_s: float = 0.0, *, is_repair: bool = False) -> None:
        """Send a block, wherever it came from, to those of its homes that lack it."""
        if block.published and not is_lock(block.name) and self._wanted(block):
            self._add(block.generation, block.version, after_s)
            if is_repair:  # who had it may have lost it
                pending = self._pending[block.generation]
                pending.is_repair, pending.reached = True, set()

    def directory_made(self, directory: Directory) -> None:
        """Send the sign that a directory is there, to be found without a block in it."""
        if self._wanted(directory):
            self._add(directory.inode, directory.inode, 0.0)

    def retry(self) -> None:
        """Members came or went: try all that waits at once."""
        self.changed.set()
        self.changed = trio.Event()
        for number, pending in self._pending.items():
            pending.after_s = 0.0
            if pending.tries:
                self._schedule(number, pending, trio.current_time())

    def _add(self, number: int, version: int, after_s: float) -> None:
        old = self._pending.pop(number, None)
        pending = _Pending(version, 0.0)
        if old is not None:
            pending.done = old.done
            if old.version == version:
                pending.reached, pending.tries = old.reached, old.tries
        self._pending[number] = pending
        self._schedule(number, pending, trio.current_time() + after_s)
        while len(self._pending) > self._pending_max:
            _, dropped = self._pending.popitem(last=False)
            dropped.done.set()
            self.counters.left_to_repair += 1
            self.left_to_repair()

    def _schedule(self, number: int, pending: _Pending, due_s: float) -> None:
        pending.due_s = due_s
        self._due.add(due_s, number)

    # -- what became of it

    def was_offered(self, block: Block) -> bool:
        """Whether anybody else may know of this version: not while its temporary name is young."""
        if block.state is State.WRITING:
            return False
        pending = self._pending.get(block.generation)
        return pending is None or pending.version != block.version or pending.tries > 0

    def reached(self, block: Block) -> tuple[int, int]:
        """How many other members are to hold a block, and how many of these do."""
        wanted = self._wanted(block)
        pending = self._pending.get(block.generation)
        if pending is None or pending.version != block.version:
            return len(wanted), 0 if self._is_unsure(block) else len(wanted)
        return len(wanted), len(wanted & pending.reached)

    def _is_unsure(self, block: Block) -> bool:
        return block.generation <= self.unsure_to

    @property
    def waiting(self) -> int:
        """How many blocks are not complete."""
        return len(self._pending)

    async def wait(self, block: Block) -> bool:
        """Return once all homes have a sealed block; False for what is not sealed, or left to
        repair. It is tried at once. Raises BlockNotFound where it is gone.
        """
        if block.state is State.WRITING:
            return False
        if block.generation not in self._pending and self._is_unsure(block):
            self.replicate(block)
        reached = self._wanted(block)
        while (pending := self._pending.get(block.generation)) is not None:
            if not pending.tries and pending.due_s > trio.current_time():
                self._schedule(block.generation, pending, trio.current_time())
            with trio.move_on_after(LOOK_S):  # nobody tells us that a block went
                await pending.done.wait()
            if block.is_gone:
                raise BlockNotFound(repr(block.name))
            reached = pending.reached
        return self._wanted(block) <= reached

    async def confirm(self, block: Block) -> bool:
        """Ask all homes for a sealed block again, whatever is known, and send it where it is not.

        Whether they have it, and are as many as there are to be. Raises BlockNotFound.
        """
        pending = self._pending.get(block.generation)
        if pending is None or pending.version != block.version:
            self.replicate(block)
        elif pending.tries:
            self._schedule(block.generation, pending, trio.current_time())
        return await self.wait(block) and self._has_homes(block)

    async def send_ahead(self, block: Block, digest: bytes, content: memoryview) -> bool:
        """Send a published block that is not sealed yet, as it is now; nobody changes `content`
        meanwhile. Whether all homes have it, and are as many as there are to be.
        """
        ahead = self._ahead.get(block.generation)
        if ahead is not None and ahead.pending.version == block.version and ahead.digest != digest:
            self._catalog.renew(block)
        if ahead is None or ahead.pending.version != block.version:
            self._forget_gone()
            ahead = self._ahead[block.generation] = _Ahead(digest, _Pending(block.version, 0.0))
            self.counters.ahead += 1
        offer = Offer(
            self._key(block),
            block.version,
            len(content),
            digest,
            attributes_of(block, self._catalog.clock()),
            0,
        )
        missing = self._wanted(block) - ahead.pending.reached
        async with self._in_flight.of(len(content) * len(missing)):
            await self._push_all(offer, content, missing, ahead.pending)
        return self._wanted(block) <= ahead.pending.reached and self._has_homes(block)

    def _forget_gone(self) -> None:
        """Blocks that were never sealed."""
        if len(self._ahead) >= AHEAD_MANY:
            known = self._catalog.names.by_inode
            self._ahead = {
                number: ahead
                for number, ahead in self._ahead.items()
                if isinstance(node := known.get(number), Block) and not node.is_gone
            }

    def _has_homes(self, block: Block) -> bool:
        homes = self._homes.homes(self._key(block), block.replicas)
        return len(homes) >= self._homes.wanted(block.replicas)

    def missing(self, block: Block) -> tuple[str, ...]:
        """The homes that are not known to have a block."""
        ahead = self._ahead.get(block.generation)
        pending = self._pending.get(block.generation) or (ahead and ahead.pending)
        return tuple(sorted(self._wanted(block) - pending.reached)) if pending else ()

    def _wanted(self, node: Block | Directory) -> set[str]:
        replicas = node.replicas if isinstance(node, Block) else None
        return set(self._homes.homes(self._key(node), replicas)) - {self._me}

    def _key(self, node: Block | Directory) -> bytes:
        key = self._catalog.names.key_of(node)
        return PREFIXES + key if isinstance(node, Directory) else key

    # -- sending

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what is due until cancelled."""
        slots = trio.Semaphore(PUSHES_MAX)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                await slots.acquire()
                nursery.start_soon(self._attempt, await self._due.next(self._takes), slots)

    def _takes(self, due_s: float, number: int) -> bool:
        pending = self._pending.get(number)
        if pending is None or pending.due_s != due_s or number in self._under_way:
            return False
        self._under_way.add(number)
        return True

    async def _attempt(self, number: int, slots: trio.Semaphore) -> None:
        pending = self._pending.get(number)
        try:
            # It may have been left to repair since.
            is_over = pending is None or await self._send(number, pending)
        finally:
            self._under_way.discard(number)
            slots.release()
        if pending is None or self._pending.get(number) is not pending:
            self._again(number)  # it changed meanwhile
        elif is_over:
            del self._pending[number]
            pending.done.set()
        else:
            pause_s = min(BACKOFF_MIN_S * 2.0 ** (pending.tries - 1), BACKOFF_MAX_S)
            due_s = max(trio.current_time() + pause_s, pending.after_s)
            self._schedule(number, pending, due_s)

    def _again(self, number: int) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            self._schedule(number, pending, max(pending.due_s, trio.current_time()))

    async def _send(self, number: int, pending: _Pending) -> bool:
        """Try all homes that are missing; whether there is nothing more to be done."""
        node = self._catalog.names.by_inode.get(number)
        if isinstance(node, Directory):
            pending.tries += 1
            return node.removed or await self._send_directory(node, pending)
        if node is None or node.state is not State.SEALED or not node.published:
            return True  # gone, or written again: its seal comes here
        if node.version != pending.version:
            return True  # overtaken by another name, of which we are told
        missing = self._wanted(node) - pending.reached
        if not missing or not self._catalog.is_here(node):
            return True
        pending.tries += 1
        try:
            async with self._in_flight.of(node.size * len(missing)):
                await self._send_block(node, missing, pending)
        except CtxfsError as error:
            log.info("%r is not sent now: %s", node.name, error)
        return node.is_gone or self._wanted(node) <= pending.reached

    async def _send_block(self, block: Block, missing: set[str], pending: _Pending) -> None:
        """Lease the bytes, and send them to each. Raises CtxfsError where they cannot be had."""
        # Its writer starts a new generation from here on, instead of going on with this one.
        self._catalog.fresh.pop(block.generation, None)
        handle = await self._store.open_for_read(block, OURSELVES)
        try:
            offer = Offer(
                self._key(block),
                pending.version,
                block.size,
                block.digest,
                attributes_of(block, self._catalog.clock()),
                0,
            )
            source = sendable(handle.file, 0, block.size)
            try:
                if block.state is State.SEALED and block.version == pending.version:
                    await self._push_all(offer, source, missing, pending)
                if block.revision != offer.attributes.revision:
                    self._catalog.block_amended(block)  # who has it now was not told
            finally:
                if isinstance(source, memoryview):
                    source.release()
        finally:
            self._store.release(handle)

    async def _send_directory(self, directory: Directory, pending: _Pending) -> bool:
        key, attributes = self._key(directory), directory_attributes(directory)
        offer = Offer(key, directory.inode, 0, EMPTY, attributes, 0)
        missing = self._wanted(directory) - pending.reached
        await self._push_all(offer, memoryview(b""), missing, pending)
        return self._wanted(directory) <= pending.reached

    async def _push_all(
        self, offer: Offer, source: Source, missing: set[str], pending: _Pending
    ) -> None:
        async with trio.open_nursery() as nursery:
            for name in sorted(missing):
                nursery.start_soon(self._push, name, offer, source, pending)

    async def _push(self, name: str, offer: Offer, source: Source, pending: _Pending) -> None:
        try:
            answer = await self._homes.push(name, offer, source)
        except CtxfsError as error:
            self.counters.failed += 1
            self._told.waits(name, error)
            return
        if isinstance(answer, Stored):
            self._told.takes(name)
            self.counters.pushed += 1
            self.counters.pushed_bytes += offer.size
            pending.reached.add(name)
        elif answer.reason is Reason.HAVE:
            self.counters.had += 1
            pending.reached.add(name)
            if pending.is_repair:
                self.was_there(offer.size)
        elif answer.reason is Reason.GONE:
            self.counters.gone += 1
            pending.reached.add(name)  # it is not to be there
            await self._deletions.hear([Tombstone(offer.key, answer.version, answer.until_ns)])
        else:
            self.counters.refused += 1
            if answer.reason is Reason.NO_ROOM:
                self._told.waits(name, "it has no room")
            after_s = trio.current_time() + answer.retry_ms / 1000
            pending.after_s = max(pending.after_s, after_s)
