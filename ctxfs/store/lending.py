"""Hot files lent to the kernel, for reading and for writing (docs/direct.md).

Of what is written to a lent file nobody tells us. So a block's size and time are asked of the
file, room for its growth is set aside ahead, and it is sealed once nobody may change it any more.
"""

from __future__ import annotations

import math
import stat
from dataclasses import dataclass, field

import trio

from ctxfs.core.block import Block, State
from ctxfs.core.key import is_lock
from ctxfs.device import leases
from ctxfs.errors import TierFull
from ctxfs.store.catalog import Catalog
from ctxfs.store.grants import Grants
from ctxfs.store.handle import Handle, Way
from ctxfs.store.mover import Mover
from ctxfs.tiers.hot import HotFile

POLL_S = 0.004  # how often files that grow are looked at
POLL_LARGE_S = 0.001  # while one has used up its first grant
POLL_IDLE_S = 0.05
BUSY_S = 0.2  # since it last grew
IDLE_S = 1.0  # then a writer's grant is for others
SEAL_WAIT_MIN_S = 0.001
SEAL_WAIT_MAX_S = 1.0
SET_ID = stat.S_ISUID | stat.S_ISGID
# A mapping that lives on for so long is one that its owner goes on to use; where the machine is
# busy, the kernel takes a while to let go of a file that was closed.
HELD_S = 0.2


@dataclass(slots=True, eq=False)
class _Written:
    """A block that the kernel writes, or wrote and that is not sealed since."""

    block: Block
    file: HotFile
    facts: tuple[int, int]  # size, and time of change, at the last look
    grown_at: float  # trio's clock
    asks: bool = False  # more room was asked for
    seal_wait_s: float = SEAL_WAIT_MIN_S
    sealer: trio.Event | None = None  # who is to seal it waits for this
    looked: trio.Event = field(default_factory=trio.Event)  # the sealer looks again


class Lending:
    """Which opens are lent, and what is to be known of what they do."""

    def __init__(self, catalog: Catalog, mover: Mover) -> None:
        self._catalog = catalog
        self._mover = mover
        self._hot = catalog.hot
        self._grants = Grants(self._hot.capacity_bytes)
        # Nothing but the kernel's own limit holds who writes without asking.
        self._writes = self._hot.is_alone and leases.are_enabled() and self._grants.are_safe
        self._written: dict[int, _Written] = {}
        self._begun = trio.Event()

    # -- opens

    def lend(self, handle: Handle) -> int | None:
        """Return the descriptor of the hot file if the kernel may serve this open by itself.

        All opens of a block go one way at a time. To be called once for each open of a client, by
        a channel that can lend.
        """
        if not self._may_lend(handle):
            self.keep(handle)
            return None
        handle.way = Way.LENT
        handle.file.lent += 1
        self._catalog.counters.opens_lent += 1
        self._catalog.counters.writers_lent += handle.writable
        return handle.file.fd

    def keep(self, handle: Handle) -> None:
        """The kernel asks us for this open; also after a file could not be lent after all."""
        if handle.way is Way.LENT:
            self._catalog.counters.opens_lent -= 1
            self._catalog.counters.writers_lent -= handle.writable
            handle.file.lent -= 1
        handle.way = Way.KEPT
        handle.file.kept += 1

    def ended(self, handle: Handle) -> None:
        """The open is over."""
        handle.file.lent -= handle.way is Way.LENT
        handle.file.kept -= handle.way is Way.KEPT

    def resume(self, handle: Handle, way: Way) -> None:
        """An open of the daemon's former life goes the way it went then."""
        handle.way = way
        handle.file.lent += way is Way.LENT
        handle.file.kept += way is Way.KEPT
        if way is Way.LENT and handle.block.writing is not None:
            self.watch(handle.block, handle.file)

    def watch(self, block: Block, file: HotFile) -> None:
        """The kernel may have written this unsealed block while no daemon lived, and may still,
        through a mapping. The caller has a lease on the file until the block is sealed or gone.
        """
        if block.generation not in self._written:
            self._may_write(block, file, must=True)
            written = self._written[block.generation]
            written.facts = (-1, -1)
            writing, mtime_ns = block.writing, block.mtime_ns
            given = writing is not None and writing.time_given
            self._look(written)
            if given and writing is not None:  # most likely nothing was written since
                writing.time_given, block.mtime_ns = True, mtime_ns

    def _may_lend(self, handle: Handle) -> bool:
        file, block = handle.file, handle.block
        if file.kept:
            return False
        # What was written without us may still be mapped; our own reads would show old pages.
        must = file.lent > 0 or block.generation in self._written
        if handle.writable:
            return self._may_write(block, file, must=must)
        if must:
            return True
        # A mapping would fill holes with memory that nobody reserved. A lock file is one and the
        # same to all, who change it in turns.
        return block.state is State.SEALED and not is_lock(block.name) and not file.has_holes()

    def _may_write(self, block: Block, file: HotFile, *, must: bool) -> bool:
        if block.generation in self._written:
            return True
        if not must and not self._is_fit(block):
            return False
        want = self._grants.wanted()
        granted = sum(written.file.granted_bytes for written in self._written.values())
        may = granted + want <= self._grants.together_bytes and self._mover.reserve_at_once(want)
        if not may and not must:
            return False
        facts = self._facts(file)
        self._hot.grant(file, want if may else 0)
        now = trio.current_time()
        self._written[block.generation] = _Written(block, file, facts, now)
        self._begun.set()
        return True

    def _is_fit(self, block: Block) -> bool:
        """Whether nothing about a block wants us to see each write."""
        writing = block.writing
        return (
            self._writes
            and self._grants.are_enough
            and writing is not None
            and writing.base is None  # the old content's, as long as nothing is written
            and not block.mode & SET_ID
            and not is_lock(block.name)
        )

    # -- what became of it

    def _facts(self, file: HotFile) -> tuple[int, int]:
        changed_ns = self._hot.settle(file)
        return file.size, changed_ns

    def look(self, block: Block) -> bool:
        """Bring a block up to date with its file; whether it is one that the kernel writes."""
        written = self._written.get(block.generation)
        if written is None:
            return False
        if written.file.leases:
            self._look(written)
        return True

    def _look(self, written: _Written) -> bool:
        """Whether anything has changed that shows."""
        facts = self._facts(written.file)
        block = written.block
        if block.is_hot:
            block.hot_bytes = written.file.physical_bytes
        if facts == written.facts:
            return False
        written.facts = facts
        written.grown_at = trio.current_time()
        block.size = facts[0]
        writing = block.writing
        if writing is not None:
            writing.epoch += 1
            writing.changed = True
            writing.time_given = False
            block.mode &= ~SET_ID  # as a write takes them away
            # The kernel's clock for files is a little behind the one that publishing is told by.
            block.mtime_ns = block.ctime_ns = max(block.mtime_ns, facts[1])
        return True

    def changed_by_us(self, block: Block) -> None:
        """What just happened to the file was our doing, and is accounted for."""
        written = self._written.get(block.generation)
        if written is not None:
            written.facts = self._facts(written.file)

    # -- sealing

    def may_change(self, block: Block) -> bool:
        """Whether somebody else may still change the bytes. Raises TierTrouble."""
        written = self._written.get(block.generation)
        if written is None:
            return False
        if self._hot.is_written_elsewhere(written.file):
            return True
        self._look(written)
        return False

    async def pause(self, block: Block) -> None:
        """Wait a while, until it pays to ask again whether a block may change."""
        written = self._written[block.generation]
        wait_s = written.seal_wait_s
        written.seal_wait_s = min(2 * wait_s, SEAL_WAIT_MAX_S)
        written.sealer = trio.Event()
        try:
            with trio.move_on_after(wait_s):
                await written.sealer.wait()
        finally:
            written.sealer = None
            written.looked.set()
            written.looked = trio.Event()

    async def wait_looked(self, block: Block) -> None:
        """Return when it pays to ask again whether a block is sealed."""
        written = self._written.get(block.generation)
        if written is not None and written.sealer is not None:
            await written.looked.wait()
        await trio.lowlevel.checkpoint()

    def wake_sealer(self, block: Block) -> bool:
        """Whether somebody waits to seal the block, and looks again now."""
        written = self._written.get(block.generation)
        if written is None or written.sealer is None:
            return False
        written.sealer.set()
        written.seal_wait_s = SEAL_WAIT_MIN_S
        return True

    def is_held(self, block: Block) -> bool:
        """Whether a closed block is not sealed because somebody goes on to have it mapped."""
        written = self._written.get(block.generation)
        return written is not None and written.sealer is not None and written.seal_wait_s > HELD_S

    def over(self, block: Block) -> None:
        """The block is sealed, or gone and closed: its file changes no more, or it is no matter."""
        self._grants.seen(block.size)
        written = self._written.pop(block.generation, None)
        if written is not None:
            self._hot.grows_no_more(written.file)

    # -- room

    async def run(self) -> None:
        """Serve: look after files that grow without asking, so that room is there before them."""
        wait_s = POLL_S
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(POLL_LARGE_S if wait_s == POLL_LARGE_S else POLL_S)
                wait_s = self._look_around(nursery)
                if wait_s > POLL_S:
                    self._begun = trio.Event()
                    with trio.move_on_after(wait_s):
                        await self._begun.wait()

    def _look_around(self, nursery: trio.Nursery) -> float:
        """Look at each file; until the next look, seconds."""
        now = trio.current_time()
        latest = -math.inf
        is_large = False
        for number, written in list(self._written.items()):
            if not written.file.leases:  # it was discarded
                del self._written[number]
                continue
            if self._look(written):
                is_large |= self._top_up(written, nursery)
            elif written.file.granted_bytes and now - written.grown_at > IDLE_S:
                self._hot.take_grant(written.file)
                self._mover.moves.lease_ended()
            latest = max(latest, written.grown_at)
        if not self._written:
            return math.inf
        if is_large:
            return POLL_LARGE_S
        return POLL_S if now - latest < BUSY_S else POLL_IDLE_S

    def _top_up(self, written: _Written, nursery: trio.Nursery) -> bool:
        """Whether a good part of the grant was used up."""
        want = self._grants.wanted(written.file.physical_bytes)
        need = want - written.file.granted_bytes
        if need < want // 4:
            return False
        if written.asks:
            return True
        if self._mover.reserve_at_once(need):
            self._hot.grant(written.file, need)
        else:
            written.asks = True
            nursery.start_soon(self._ask, written, need)
        return True

    async def _ask(self, written: _Written, need: int) -> None:
        """Have others make room; where there is none, the kernel says so to the writer."""
        try:
            await self._mover.reserve(need, written.file)
        except TierFull:
            return
        finally:
            written.asks = False
        if self._written.get(written.block.generation) is written and written.file.leases:
            self._hot.grant(written.file, need)
        else:
            self._hot.unreserve(need)
