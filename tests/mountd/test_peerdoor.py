"""Two stores that talk over real sockets: what one asks, the other answers from its blocks."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

from ctxfs.device.lanes import Source
from ctxfs.device.peer import Peer
from ctxfs.device.peerserver import serve
from ctxfs.device.tcp import Listener
from ctxfs.errors import BlockGone, BlockNotFound, PeerBusy, PeerRefused
from ctxfs.store.replicating import Replicator
from ctxfs.wire.greeting import Identity
from ctxfs.wire.messages import Durability, GoneKey, Have, Miss, Offer, Reason, Refused, Stored
from mountd.peerdoor import PeerDoor
from tests.device.peering import INSECURE, ME, PATIENCE_S, SMALL, YOU
from tests.fakes import MemoryEngine
from tests.store.clustered import Clustered, clustered, offer_of
from tests.store.world import MIB, World, get, put

CONTENT = os.urandom(1_000_003)


@dataclass
class OneHome:
    """The only other member is home to everything."""

    peer: Peer

    def wanted(self, replicas: int | None = None) -> int:
        return replicas or 1

    def homes(self, key: bytes, replicas: int | None = None) -> tuple[str, ...]:
        return ("one", "two")

    async def push(self, name: str, offer: Offer, source: Source) -> Stored | Refused:
        assert name == "two"
        return await self.peer.push(offer, source, PATIENCE_S)


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def world(path: Path) -> World:
    return World(path, MemoryEngine(64 * MIB))


@asynccontextmanager
async def asked(host: Clustered, **limits: int) -> AsyncIterator[tuple[PeerDoor, Peer]]:
    """A member that answers, and one that asks it."""
    door = PeerDoor(host.store, host.serving, host.receiver, host.deletions, **limits)
    listener = Listener(("127.0.0.1", 0))
    async with trio.open_nursery() as nursery:
        await nursery.start(door.run)
        await nursery.start(_serve, listener, door)
        peer = await dial(nursery, listener)
        yield door, peer
        nursery.cancel_scope.cancel()


async def _serve(
    listener: Listener, door: PeerDoor, *, task_status: trio.TaskStatus[object]
) -> None:
    await serve(listener, door, YOU, INSECURE, limits=SMALL, task_status=task_status)


async def dial(nursery: trio.Nursery, listener: Listener, me: Identity = ME) -> Peer:
    peer = Peer(me, b"two", listener.address, INSECURE, lanes=2, limits=SMALL)
    await nursery.start(peer.run)
    return peer


async def test_a_block_is_looked_up_and_read_wherever_it_lies(world: World) -> None:
    async with clustered(world, 2) as host, asked(host) as (door, peer):
        block = await put(host.store, "k", CONTENT)
        for is_hot in (True, False):
            if not is_hot:
                await host.store.mover.demoter.demote(block)
            have, miss = await peer.lookup([b"k", b"none"], PATIENCE_S)
            assert isinstance(have, Have)
            assert (have.version, have.size, have.digest) == (
                block.version,
                len(CONTENT),
                block.digest,
            )
            assert miss == Miss()
            target = bytearray(have.size)
            await peer.read(b"k", have.version, memoryview(target), PATIENCE_S)
            assert target == CONTENT
        assert (door.reading, block.opens) == (0, 0)
        with pytest.raises(BlockNotFound):
            await peer.read(b"k", block.version - 1, memoryview(target), PATIENCE_S)
        with pytest.raises(PeerRefused):
            await peer.read(b"k", block.version, memoryview(target), PATIENCE_S, offset=1)


async def test_a_block_with_holes_is_read_without_filling_them(world: World) -> None:
    async with clustered(world, 2) as host, asked(host) as (_, peer):
        block = await put(host.store, "k", b"")
        handle = await host.store.open_for_write(block, 4711, os.O_WRONLY)
        await host.store.content.truncate(block, MIB, handle)
        host.store.release(handle)
        await host.store.sealing.wait_sealed(block)
        target = bytearray(b"x" * MIB)
        await peer.read(b"k", block.version, memoryview(target), PATIENCE_S)
        assert target == bytes(MIB)
        assert block.hot_bytes == 0


async def test_a_pushed_block_is_there_and_not_taken_twice(world: World) -> None:
    async with clustered(world, 2) as host, asked(host) as (_, peer):
        offer = offer_of(b"a/k", CONTENT, host.version())
        source = memoryview(CONTENT)
        assert await peer.push(offer, source, PATIENCE_S) == Stored(Durability.MEMORY)
        have = Refused(reason=Reason.HAVE, version=offer.version)
        assert await peer.push(offer, source, PATIENCE_S) == have
        assert host.block(b"a/k").version == offer.version


async def test_a_push_that_is_given_up_leaves_nothing_behind(world: World) -> None:
    async with clustered(world, 2) as host, asked(host) as (_, peer):
        used = host.store.catalog.hot.used_bytes
        offer = offer_of(b"k", CONTENT, host.version())
        arrival = await host.offer(offer)
        assert not isinstance(arrival, Refused)
        busy = await peer.push(offer, memoryview(CONTENT), PATIENCE_S)
        assert isinstance(busy, Refused)
        assert (busy.reason, busy.retry_ms > 0) == (Reason.BUSY, True)
        arrival.abandon()
        assert host.store.catalog.hot.used_bytes == used


async def test_a_deletion_is_told_and_asked_for(world: World) -> None:
    async with clustered(world, 2) as host, asked(host) as (_, peer):
        await put(host.store, "k", CONTENT)
        dead = GoneKey(b"k", host.version(after_s=1), world.clock.wall_ns + 10**12)
        await peer.forget([dead], PATIENCE_S)
        with pytest.raises(BlockGone):
            await peer.read(b"k", dead.version, memoryview(bytearray(1)), PATIENCE_S)
        page = await peer.tombstones({}, PATIENCE_S)
        assert (page.entries, page.cursor) == ((dead,), 0)
        refused = await peer.push(offer_of(b"k", b"x", host.version()), memoryview(b"x"), 5)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.version) == (Reason.GONE, dead.version)


async def test_what_is_written_on_one_host_is_read_on_the_other_and_deleted_on_both(
    world: World, path: Path
) -> None:
    (path / "other").mkdir()
    writer = World(path / "other", MemoryEngine(64 * MIB), clock=world.clock)
    async with (
        clustered(world, 2) as there,
        asked(there) as (_, peer),
        clustered(writer, 1) as here,
        trio.open_nursery() as nursery,
    ):
        replicator = Replicator(here.store, here.deletions, OneHome(peer), "one")
        here.store.catalog.block_sealed = replicator.sealed
        await nursery.start(replicator.run)
        blocks = [await put(here.store, f"k{n}", CONTENT[n:]) for n in range(10)]
        for number, block in enumerate(blocks):
            assert await replicator.wait(block)
            assert await get(there.store, f"k{number}") == CONTENT[number:]
            assert there.block(b"k%d" % number).version == block.version
        newer = await put(here.store, "k0", b"newer")
        assert await replicator.wait(newer)
        assert await get(there.store, "k0") == b"newer"
        here.store.unlink(here.store.catalog.names.root, b"k0", 4711)
        dead = here.deletions.table.get(b"k0")
        assert dead is not None
        await peer.forget([GoneKey(*dead)], PATIENCE_S)
        with pytest.raises(BlockNotFound):
            there.block(b"k0")
        assert there.store.catalog.block_count == len(blocks) - 1
        nursery.cancel_scope.cancel()


async def test_many_deletions_come_in_pages(world: World) -> None:
    async with clustered(world, 2) as host, asked(host) as (_, peer):
        dead = {host.delete(b"k%d" % number).version for number in range(2500)}
        page = await peer.tombstones({}, PATIENCE_S)
        assert [each.version for each in page.entries] == sorted(dead)
        assert dict(page.known) == host.deletions.table.known
        rest = await peer.tombstones({host.deletions.table.slot: sorted(dead)[9]}, PATIENCE_S)
        assert [each.version for each in rest.entries] == sorted(dead)[10:]


async def test_more_readers_than_may_read_are_sent_to_another_holder(world: World) -> None:
    async with clustered(world, 2) as host, asked(host, reads_max=1) as (door, peer):
        block = await put(host.store, "k", CONTENT)
        door.reading = 1
        assert door.stats().load == 255
        with pytest.raises(PeerBusy):
            await peer.read(b"k", block.version, memoryview(bytearray(1)), PATIENCE_S)
        door.reading = 0
        await peer.read(b"k", block.version, memoryview(bytearray(1)), PATIENCE_S)


async def test_a_leased_block_stays_until_the_lease_is_given_back_or_ends(world: World) -> None:
    async with clustered(world, 2) as host, asked(host) as (door, peer):
        block = await put(host.store, "k", CONTENT)
        leased = await peer.lease(b"k", block.version, 60.0, PATIENCE_S)
        assert (leased.size, block.opens) == (len(CONTENT), 1)
        await peer.release(leased.lease, PATIENCE_S)
        await peer.release(leased.lease, PATIENCE_S)
        assert (door.leases, block.opens) == (0, 0)
        await peer.lease(b"k", block.version, 0.01, PATIENCE_S)
        with trio.fail_after(PATIENCE_S):
            while door.leases:
                await trio.lowlevel.checkpoint()
        assert block.opens == 0


async def test_a_lease_ends_with_the_connection_and_those_of_others_stay(world: World) -> None:
    async with clustered(world, 2) as host:
        block = await put(host.store, "k", CONTENT)
        door = PeerDoor(host.store, host.serving, host.receiver, host.deletions)
        listener = Listener(("127.0.0.1", 0))
        other = Identity(cluster=b"lab", name=b"three", slot=3)
        async with trio.open_nursery() as nursery:
            await nursery.start(door.run)
            await nursery.start(_serve, listener, door)
            staying = await dial(nursery, listener, other)
            kept = await staying.lease(b"k", block.version, 60.0, PATIENCE_S)
            async with trio.open_nursery() as leaving:
                peer = await dial(leaving, listener)
                lease = await peer.lease(b"k", block.version, 60.0, PATIENCE_S)
                await staying.release(lease.lease, PATIENCE_S)
                assert door.leases == 2, "only its own"
                leaving.cancel_scope.cancel()
            with trio.fail_after(PATIENCE_S):
                while door.leases > 1:
                    await trio.lowlevel.checkpoint()
            await staying.release(kept.lease, PATIENCE_S)
            assert (door.leases, block.opens) == (0, 0)
            assert await get(host.store, "k") == CONTENT
            nursery.cancel_scope.cancel()
