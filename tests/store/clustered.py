"""A store as one of a cluster, and what other hosts would send to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ctxfs.codec.digest import digest
from ctxfs.core.block import Block
from ctxfs.core.tombstones import Tombstone, Tombstones
from ctxfs.core.versions import SLOT_BITS, VersionClock
from ctxfs.store.arriving import Arriving, ArrivingDirectory
from ctxfs.store.deletions import Deletions
from ctxfs.store.receiving import Receiver
from ctxfs.store.serving import Serving
from ctxfs.store.store import Store
from ctxfs.wire.messages import Attributes, Durability, Offer, Refused
from tests.store.world import World

KEPT_NS = 10**12
ELSEWHERE = 7  # slot of another host
ATTRIBUTES = Attributes(
    mode=0o640, uid=1, gid=2, created_ns=3, mtime_ns=4, user=((b"user.kind", b"kv"),)
)


@dataclass
class Clustered:
    """One host."""

    world: World
    store: Store
    deletions: Deletions
    serving: Serving
    receiver: Receiver

    def version(self, after_s: float = 0.0) -> int:
        """One that another host issues so long after now."""
        return int(self.world.clock.wall_ns / 1000 + after_s * 1e6) << SLOT_BITS | ELSEWHERE

    def delete(self, key: bytes) -> Tombstone:
        """As a program here deletes a key, without its block."""
        until_ns = self.world.clock.wall_ns + KEPT_NS
        return self.deletions.table.bury(key, self.store.catalog.new_version(), until_ns)

    def block(self, key: bytes) -> Block:
        """What the key leads to. Raises BlockNotFound."""
        node = self.store.catalog.names.resolve(key)
        assert isinstance(node, Block)
        return node

    async def offer(self, offer: Offer) -> Arriving | ArrivingDirectory | Refused:
        """Offer it as another host."""
        return await self.receiver.offer(offer, "other")


@asynccontextmanager
async def clustered(
    world: World, slot: int = 1, *, to_medium: bool = False
) -> AsyncIterator[Clustered]:
    """A daemon's life as a member."""
    async with world.store() as store:
        store.catalog.versions = VersionClock(slot)
        deletions = Deletions(
            store.catalog,
            Tombstones(slot),
            KEPT_NS,
            note=lambda tombstone: None,
            keep=nothing,
            tell=nothing,
        )
        serving = Serving(store, deletions.table)
        receiver = Receiver(store, deletions, to_medium=to_medium)
        yield Clustered(world, store, deletions, serving, receiver)


async def nothing(tombstones: Sequence[Tombstone]) -> None:
    """Neither keep nor tell."""


def offer_of(
    key: bytes, content: bytes, version: int, attributes: Attributes = ATTRIBUTES
) -> Offer:
    return Offer(key, version, len(content), digest(content), attributes, 1000)


async def arrive(host: Clustered, offer: Offer, content: bytes) -> Durability | Refused:
    """Send a block, as the transport does."""
    arrival = await host.offer(offer)
    if isinstance(arrival, Refused):
        return arrival
    assert isinstance(arrival, Arriving | ArrivingDirectory)
    arrival.target[:] = content
    return await arrival.stored()
