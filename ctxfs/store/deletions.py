"""What was deleted, here and on other hosts: told, heard, and kept for as long as it may matter.

docs/cluster.md has the argument why a deleted block does not come back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import trio

from ctxfs.core.block import Block, State
from ctxfs.core.key import is_lock, is_temporary
from ctxfs.core.tombstones import Listing, Tombstone, Tombstones, Vector
from ctxfs.core.versions import SLOT_BITS, VersionAhead, slot_of
from ctxfs.errors import CtxfsError
from ctxfs.store.catalog import Catalog
from ctxfs.store.elsewhere import PREFIXES
from ctxfs.store.keys import block_at, directory_at

log = logging.getLogger(__name__)

TOLD_AT_ONCE = 1024  # tombstones in one message
EXPIRE_S = 10.0


class Keep(Protocol):
    """Has tombstones outlive the daemon, and the machine."""

    async def __call__(self, tombstones: Sequence[Tombstone]) -> None: ...


class Deletions:
    """`keep_ns`: for how long a deletion is remembered. `note`: has one outlive the daemon, at
    once; `keep`: the machine too. `tell`: all other members, as far as they can be reached."""

    def __init__(
        self,
        catalog: Catalog,
        tombstones: Tombstones,
        keep_ns: int,
        *,
        note: Callable[[Tombstone], None],
        keep: Keep,
        tell: Callable[[Sequence[Tombstone]], Awaitable[None]],
    ) -> None:
        self.table = tombstones
        self._catalog = catalog
        self.keep_ns = keep_ns
        self._note = note
        self._keep = keep
        self._tell = tell
        self._new: list[Tombstone] = []
        self._wanted = trio.Event()
        self._known_to: dict[str, Vector] = {}  # by member: what it knew when we last asked
        # Keys under a temporary name that nobody was ever told of need no tombstone.
        self.was_offered: Callable[[Block], bool] = lambda block: True
        catalog.key_deleted = self.bury
        catalog.directory_removed = self.bury_directory
        catalog.block_expired = self.expired

    # -- here

    def bury(self, key: bytes, block: Block) -> None:
        """A key is deleted here, or leads to other content from now on."""
        if is_lock(block.name):
            return  # of one host alone, as such a file is
        is_own = slot_of(block.version) == self.table.slot
        if is_temporary(block.name) and is_own and not self.was_offered(block):
            return
        self._bury(key, self._catalog.new_version())

    def expired(self, key: bytes, block: Block) -> None:
        """A block expired whose lifetime was changed after it was sealed: a member that was away
        then believes in another. What is newer than that change is to stay, also where it has not
        been heard of here, so the tombstone's version is the lowest that is new.
        """
        table = self.table
        last = max(block.version, block.revision, table.known.get(table.slot, 0))
        version = (last >> SLOT_BITS) + 1 << SLOT_BITS | table.slot
        self._see(version)  # so that it is not issued again
        self._bury(key, version)

    def bury_directory(self, path: bytes) -> None:
        """A directory is removed here: others are not to find the sign of it any more."""
        self._bury(PREFIXES + path, self._catalog.new_version())

    def _bury(self, key: bytes, version: int) -> None:
        until_ns = self._catalog.clock().wall_ns + self.keep_ns
        tombstone = self.table.bury(key, version, until_ns)
        # Before the program hears that it is done: a daemon that dies then says to others that it
        # knows all of its own, and the copies that they have would come back.
        self._note(tombstone)
        self._new.append(tombstone)
        self._wanted.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write down and tell what is deleted here; forget what was kept long enough."""
        task_status.started()
        while True:
            with trio.move_on_after(EXPIRE_S):
                await self._wanted.wait()
            self._wanted = trio.Event()
            while self._new:
                batch, self._new = self._new[:TOLD_AT_ONCE], self._new[TOLD_AT_ONCE:]
                await self._sync_successors()
                await self._keep(batch)  # before anybody is told: docs/cluster.md
                await self._tell(batch)
            self.table.expire(self._catalog.clock().wall_ns)

    async def _sync_successors(self) -> None:
        """A block that was synced before it had its name is older on the medium than the tombstone
        of what it replaced, until its new version is there, too."""
        cold = self._catalog.cold
        if cold is not None and self._catalog.shadows:
            with suppress(CtxfsError):
                await cold.sync()

    # -- elsewhere

    async def hear(self, tombstones: Iterable[Tombstone]) -> None:
        """Others deleted these keys. Returns when a restart would not forget that."""
        new = [each for each in tombstones if self._see(each.version) and self.table.hear(each)]
        # At once: where who told us gives up meanwhile, this is cancelled, and heard again, these
        # are not new any more.
        self._drop(new)
        if new:
            await self._keep(new)

    def learn(self, member: str, listing: Listing) -> None:
        """A member answered to what is known here."""
        if not self._see(listing.highest):
            return
        merged = self.table.merge(listing)
        self._known_to[member] = listing.known
        self._drop(merged.dead)
        if merged.doubt_version:
            self._drop_doubtful(merged.doubt_version)

    def _see(self, version: int) -> bool:
        versions = self._catalog.versions
        assert versions is not None
        try:
            versions.see(version, self._catalog.clock().wall_ns // 1000)
        except VersionAhead as error:
            log.error("a deletion is not believed: %s", error)
            return False
        return True

    def settle(self) -> None:
        """At the start: copies that what was written down beats may have come back with a crash.

        Not so where the memory outlived us: nothing that was deleted here is found again there, but
        what was being replaced by a block that was not sealed yet. That one is lost; this is left.
        """
        dead = []
        for tombstone in self.table:
            block = self._block(tombstone.key)
            is_own = slot_of(tombstone.version) == self.table.slot
            if block is None or not is_own or not self._catalog.memory_outlived:
                dead.append(tombstone)
            elif block.version <= tombstone.version and block.state is State.SEALED:
                block.origin = self._catalog.new_version()
                self._catalog.record(block)
        self._drop(dead)

    def page(self, known: Vector, cursor: int, count: int) -> tuple[list[Tombstone], int]:
        """What one who knows so much has not heard of, by version, from above `cursor` on; and the
        cursor of the next page, 0 where there is none."""
        page = self.table.page(cursor, count)
        new = [each for each in page if each.version > known.get(slot_of(each.version), 0)]
        return new, page[-1].version if len(page) == count else 0

    def may_accept(self, key: bytes, version: int, member: str) -> bool:
        """Whether a copy may be taken from a member, for all that it and we know of deletions."""
        return self.table.may_accept(key, version, self._known_to.get(member, {}))

    def _drop(self, dead: Iterable[Tombstone]) -> None:
        for tombstone in dead:
            if tombstone.key.startswith(PREFIXES):
                self._remove_directory(tombstone)
                continue
            block = self._block(tombstone.key)
            if block is not None and block.version <= tombstone.version:
                self._catalog.tell("removed", block, by="peer")
                self._catalog.drop(block)

    def _block(self, key: bytes) -> Block | None:
        block = block_at(self._catalog, key)
        return None if block is None or is_lock(block.name) else block

    def _remove_directory(self, tombstone: Tombstone) -> None:
        """A directory was removed elsewhere; one that is not empty here stays."""
        directory = directory_at(self._catalog, tombstone.key.removeprefix(PREFIXES))
        if directory is None or directory.inode > tombstone.version or directory.entries:
            return
        self._catalog.remove_directory(directory)

    def _drop_doubtful(self, version: int) -> None:
        """Something was deleted that nobody can name any more: it may be any of these."""
        names = self._catalog.names
        doubtful = [
            block
            for block in names.blocks_beneath(names.root)
            if block.version <= version and block.writing is None
        ]
        for block in doubtful:
            self._catalog.drop(block)
        if doubtful:
            log.warning(
                "%d blocks are dropped: while this host was away, something was deleted and "
                "forgotten since, and it may have been any of these",
                len(doubtful),
            )
