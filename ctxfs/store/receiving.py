"""Blocks that other hosts send here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ctxfs.core.block import Block, Directory, State
from ctxfs.core.key import is_lock, split_key
from ctxfs.errors import (
    BlockGone,
    CopyCorrupt,
    CtxfsError,
    NotDirectory,
    NotPermitted,
    PeerBusy,
)
from ctxfs.store.arriving import Arriving, ArrivingDirectory
from ctxfs.store.deletions import Deletions
from ctxfs.store.elsewhere import PREFIXES, replace_attributes, take_attributes
from ctxfs.store.hotbytes import received_digest
from ctxfs.store.keys import block_at, directory_at
from ctxfs.store.store import Store
from ctxfs.tiers.hot import HotFile
from ctxfs.wire.messages import Attributes, Durability, Offer, Reason, Refused

log = logging.getLogger(__name__)

RETRY_MS = 500  # when to offer again what could not be taken for a moment
_READ = 0o444


@dataclass(slots=True)
class ReceiverCounters:
    """What came of offers, since the start."""

    received: int = 0
    received_bytes: int = 0
    had: int = 0  # was here already, this version or a newer one
    corrupt: int = 0  # did not match the digest that it was offered with
    no_room: int = 0
    amended: int = 0  # of blocks that were here, the attributes


class Receiver:
    """`to_medium`: a block counts as stored once it is on the cold tier's medium, where there is a
    cold tier; else, as soon as it is in memory.
    """

    def __init__(
        self,
        store: Store,
        deletions: Deletions,
        *,
        to_medium: bool = False,
    ) -> None:
        self.counters = ReceiverCounters()
        self.to_medium = to_medium
        self._store = store
        self._catalog = store.catalog
        self._promoter = store.mover.promoter
        self._deletions = deletions
        self._arriving: set[bytes] = set()  # keys of which a block is on its way
        # Who is told that a member has older attributes of a block than are here.
        self.behind: Callable[[Block, str], None] = lambda block, member: None
        # Who is told that a block beats a version that nobody said was overwritten.
        self.beats: Callable[[Block, int], None] = lambda block, version: None
        # Who is told that another number of members is to hold a block.
        self.replicas_changed: Callable[[Block], None] = lambda block: None

    @property
    def arriving(self) -> int:
        """How many blocks are on their way."""
        return len(self._arriving)

    # -- blocks

    async def offer(self, offer: Offer, member: str) -> Arriving | ArrivingDirectory | Refused:
        """Make room for a block that a member offers, or say why it is not wanted.

        Raises NotPermitted for what is never taken, VersionAhead, TierFull, TierTrouble.
        """
        key = offer.key
        if is_lock(key) or offer.size > self._store.content.block_bytes_max:
            raise NotPermitted("a lock file, or larger than a block may be")
        self._see(max(offer.version, offer.attributes.revision))
        if offer.held_only:
            return self._hear_attributes(offer, member)
        if (refusal := self._unwanted(offer, member)) is not None:
            return refusal
        if key.startswith(PREFIXES):
            return ArrivingDirectory(lambda: self._take_directory(offer))
        if key in self._arriving or self._catalog.hot.is_crowded:
            return Refused(reason=Reason.BUSY, retry_ms=RETRY_MS)
        self._arriving.add(key)
        try:
            return await self._make_room(offer, member)
        except BaseException as error:
            self._arriving.discard(key)
            if isinstance(error, CtxfsError):
                self.counters.no_room += 1
            raise

    async def _make_room(self, offer: Offer, member: str) -> Arriving:
        catalog = self._catalog
        # In no directory until all of it is here: who fails to send it leaves nothing behind.
        block = Block(catalog.new_generation(), catalog.names.root, split_key(offer.key)[-1])
        block.size, block.digest, block.origin = offer.size, offer.digest, offer.version
        file = await self._promoter.arriving_file(block)

        async def publish() -> Durability:
            return await self._publish(offer, block, file, member)

        try:
            return Arriving(file, publish, lambda: self._let_go(offer, file))
        except BaseException:
            self._let_go(offer, file)
            raise

    def _let_go(self, offer: Offer, file: HotFile) -> None:
        """A block does not come, or not any more."""
        self._arriving.discard(offer.key)
        self._catalog.hot.remove(file.generation, file.physical_bytes)
        self._store.mover.moves.release_file(file)
        self._store.mover.moves.lease_ended()

    def _see(self, version: int) -> None:
        """What is written here from now on is newer than this version."""
        if self._catalog.versions is not None:
            self._catalog.versions.see(version, self._catalog.clock().wall_ns // 1000)

    def _unwanted(self, offer: Offer, member: str) -> Refused | None:
        """Why a block is not taken now, if so."""
        key, version = offer.key, offer.version
        dead = self._deletions.table.get(key)
        if dead is not None and version <= dead.version:
            return Refused(reason=Reason.GONE, version=dead.version, until_ns=dead.until_ns)
        if key.startswith(PREFIXES):
            is_there = directory_at(self._catalog, key.removeprefix(PREFIXES)) is not None
            return Refused(reason=Reason.HAVE, version=version) if is_there else None
        block = block_at(self._catalog, key)
        if block is not None and block.version >= version:
            if block.version > version or self._catalog.is_here(block):
                self._keep(block)
                self._compare_attributes(block, offer, member)
                if block.version > version:
                    self.beats(block, version)
                self.counters.had += 1
                return Refused(reason=Reason.HAVE, version=block.version)
            if block.generation in self._promoter.flights:
                return Refused(reason=Reason.BUSY, retry_ms=RETRY_MS)
        if not self._deletions.may_accept(key, version, member):
            return Refused(reason=Reason.BUSY, retry_ms=RETRY_MS, text="may have been deleted")
        return None

    def _hear_attributes(self, offer: Offer, member: str) -> Refused:
        """A member says what the attributes are of a block that may be here, or known of."""
        key, version = offer.key, offer.version
        dead = self._deletions.table.get(key)
        if dead is not None and version <= dead.version:
            return Refused(reason=Reason.GONE, version=dead.version, until_ns=dead.until_ns)
        if key in self._arriving:  # with those that it had before, it may be
            return Refused(reason=Reason.BUSY, retry_ms=RETRY_MS)
        block = block_at(self._catalog, key)
        if block is not None and block.version < version and block.state is State.SEALED:
            self._catalog.tell("removed", block, by="peer")
            self._catalog.drop(block)
        if block is None or block.version < version:
            return Refused(reason=Reason.MISS)
        self._compare_attributes(block, offer, member)
        return Refused(reason=Reason.HAVE, version=block.version)

    def _compare_attributes(self, block: Block, offer: Offer, member: str) -> None:
        """Of one version, the attributes that were changed last are right, here and there."""
        told = offer.attributes.revision
        if block.version != offer.version or block.state is not State.SEALED:
            return
        if told < block.revision:
            self.behind(block, member)
        if told <= block.revision:
            return
        catalog, wanted = self._catalog, block.replicas
        replace_attributes(block, offer.attributes, catalog.clock())
        catalog.set_expiry(block, block.expires_ns)
        catalog.record(block)
        self.counters.amended += 1
        if block.replicas != wanted:
            self.replicas_changed(block)

    def _keep(self, block: Block) -> None:
        """A copy that was fetched for a reader is to stay: who offered it counts on it."""
        if self._catalog.is_here(block):
            self._catalog.elsewhere.pop(block.generation, None)

    async def _publish(self, offer: Offer, block: Block, file: HotFile, member: str) -> Durability:
        """All bytes are here: verify them, and show the block unless something newer came."""
        try:
            if await received_digest(file) != offer.digest:
                self.counters.corrupt += 1
                raise CopyCorrupt("what arrived does not match its digest")
            *parents, name = split_key(offer.key)
            directory = await self._directory(parents, offer.attributes)
            if await self._is_late(offer, member):
                self._let_go(offer, file)
                return Durability.MEMORY
            # No await from the last look at what is here: nothing comes in between.
            self._show(offer, block, file, directory, name)
        except BaseException:
            self._let_go(offer, file)
            raise
        self._arriving.discard(offer.key)
        self._store.mover.moves.release_file(file)
        self._store.mover.moves.lease_ended()
        return await self._secure(block)

    async def _is_late(self, offer: Offer, member: str) -> bool:
        """Whether this version or a newer one came meanwhile. Raises BlockGone, PeerBusy."""
        while (block := block_at(self._catalog, offer.key)) is not None:
            flight = self._promoter.flights.get(block.generation)
            if flight is None or block.version != offer.version:
                break
            await flight.done.wait()  # a reader here fetches the same: it is not to be disturbed
        refusal = self._unwanted(offer, member)
        if refusal is not None and refusal.reason is Reason.GONE:
            raise BlockGone("it was removed meanwhile", refusal.version, refusal.until_ns)
        if refusal is not None and refusal.reason is not Reason.HAVE:
            raise PeerBusy(refusal.text)
        return refusal is not None

    def _show(
        self, offer: Offer, block: Block, file: HotFile, directory: Directory, name: bytes
    ) -> None:
        catalog = self._catalog
        take_attributes(block, offer.attributes, catalog.clock())
        block.state = State.SEALED
        block.hot_bytes = file.physical_bytes
        catalog.hot.arrived(file)
        old = block_at(catalog, offer.key)
        catalog.adopt(block, directory, name)
        if old is not None and old.version < block.version:
            self.beats(block, old.version)
        self.counters.received += 1
        self.counters.received_bytes += block.size
        catalog.tell("moved", block, **{"from": "remote", "to": "hot"})

    async def _secure(self, block: Block) -> Durability:
        """Where the block is safe, once that is as was asked for."""
        cold = self._catalog.cold
        if not self.to_medium or cold is None:
            return Durability.MEMORY
        try:
            await self._store.mover.demoter.demote(block, keep_hot=True)
            await cold.sync()
        except CtxfsError as error:
            log.warning("%r is in memory alone: %s", block.name, error)
            return Durability.MEMORY
        return Durability.MEDIUM

    # -- directories

    async def _directory(self, parents: list[bytes], attributes: Attributes) -> Directory:
        """The directory of a block that arrives, made where it is missing.

        What other hosts know of it holds; else it is of the block's owner, and those who may read
        the block may look into it. Raises NotDirectory.
        """
        directory = self._catalog.names.root
        for name in parents:
            if name not in directory.entries and self._store.elsewhere is not None:
                await self._store.elsewhere.search(directory, name)
            child = directory.entries.get(name)
            if child is None:
                mode = 0o700 | attributes.mode & _READ | (attributes.mode & _READ) >> 2
                child = self._make_directory(directory, name, attributes, mode)
            if isinstance(child, Block):
                raise NotDirectory(f"{name!r} is a block here")
            directory = child
        return directory

    def _make_directory(
        self, parent: Directory, name: bytes, attributes: Attributes, mode: int
    ) -> Directory:
        directory = self._catalog.make_directory(parent, name)
        directory.mode, directory.uid, directory.gid = mode, attributes.uid, attributes.gid
        self._catalog.record_directory(directory)
        return directory

    async def _take_directory(self, offer: Offer) -> None:
        """Make a directory that another host has. Raises NotDirectory, IsDirectory."""
        *parents, name = split_key(offer.key.removeprefix(PREFIXES))
        parent = await self._directory(parents, offer.attributes)
        child = parent.entries.get(name)
        if isinstance(child, Block):
            raise NotDirectory(f"{name!r} is a block here")
        if child is None:
            mode = offer.attributes.mode & 0o7777
            self._make_directory(parent, name, offer.attributes, mode)
