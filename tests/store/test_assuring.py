"""What fsync waits for in a cluster: that other members have a block as it is."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from ctxfs.codec.digest import digest
from ctxfs.errors import PeerUnreachable, ReplicasMissing
from ctxfs.store.assuring import Assuring, Unassured
from ctxfs.store.handle import Handle
from ctxfs.store.store import NewOwner
from ctxfs.wire.messages import Reason, Refused, Stored
from tests.store.test_replicating import CONTENT, Sending, sending
from tests.store.world import OWNER, World, put

OTHER = os.urandom(len(CONTENT))


@dataclass
class Syncing:
    it: Sending
    assuring: Assuring

    async def written(self, name: bytes, content: bytes = CONTENT) -> Handle:
        """A block that is open for writing, and synced."""
        store = self.it.host.store
        root = store.catalog.names.root
        handle = await store.create(root, name, NewOwner(0, 0, 0o644), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, content)
        await store.sealing.sync(handle.block)
        return handle

    async def close(self, handle: Handle) -> None:
        """As a program does: its close waits, and then the block is sealed."""
        store = self.it.host.store
        store.publish_on_close(handle)
        await store.sealing.keep_promise(handle.block)
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)


@asynccontextmanager
async def syncing(world: World, deadline_s: float = 10.0) -> AsyncIterator[Syncing]:
    async with sending(world) as it:
        assuring = Assuring(it.host.store, it.replicator)
        assuring.is_wanted, assuring.deadline_s = True, deadline_s
        it.host.store.sealing.assurance = assuring
        yield Syncing(it, assuring)


async def test_a_sync_of_a_sealed_block_returns_when_its_homes_say_that_they_have_it(
    world: World,
) -> None:
    async with syncing(world) as here:
        block = await put(here.it.host.store, "k", CONTENT)
        await here.it.host.store.sealing.sync(block)
        assert set(here.it.homes.keys()) == {("one", b"k"), ("two", b"k")}
        asked = here.it.homes.asked
        here.it.homes.answer = lambda name: Refused(reason=Reason.HAVE)
        await here.it.host.store.sealing.sync(block)
        assert here.it.homes.asked == asked + 2, "they may have lost it since"


@pytest.mark.parametrize("missing", ["away", "too few"])
async def test_a_sync_fails_where_replicas_are_missing_for_too_long(
    world: World, missing: str
) -> None:
    async with syncing(world, deadline_s=0.05) as here:
        if missing == "away":

            def answer(name: str) -> Stored:
                raise PeerUnreachable("it is away")

            here.it.homes.answer = answer
        else:
            here.it.homes.replicas = 4
        block = await put(here.it.host.store, "k", CONTENT)
        expected = "one, two" if missing == "away" else "others, which are too few,"
        with pytest.raises(ReplicasMissing, match=f"k is not on {expected} after 0.05 s"):
            await here.it.host.store.sealing.sync(block)
        assert (here.assuring.counters.waited, here.assuring.counters.missing) == (1, 1)


async def test_a_host_that_shares_nothing_yet_cannot_promise_replicas(world: World) -> None:
    async with world.store() as store:
        block = await put(store, "k", CONTENT)
        store.sealing.assurance = Unassured(is_wanted=False)
        await store.sealing.sync(block)
        store.sealing.assurance = Unassured(is_wanted=True)
        with pytest.raises(ReplicasMissing, match="before it has a slot"):
            await store.sealing.sync(block)


async def test_what_is_synced_before_it_is_closed_is_sent_by_its_close_and_once(
    world: World,
) -> None:
    async with syncing(world) as here:
        handle = await here.written(b"k")
        assert here.it.homes.got == [], "others are not shown what is not published"
        await here.close(handle)
        assert here.it.homes.keys() == [("one", b"k"), ("two", b"k")]
        assert await here.it.replicator.wait(handle.block)
        assert here.it.homes.asked == 2
        _, offer, content = here.it.homes.got[0]
        assert (offer.version, offer.digest) == (handle.block.version, handle.block.digest)
        assert content == CONTENT


async def test_content_that_changes_after_it_was_sent_is_another_version(world: World) -> None:
    async with syncing(world) as here:
        store = here.it.host.store
        handle = await here.written(b"k")
        store.publish_on_close(handle)
        await store.sealing.keep_promise(handle.block)
        sent = handle.block.version
        await store.content.write(handle, 0, OTHER)  # through a descriptor that was inherited
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)
        assert handle.block.version > sent
        assert here.it.host.deletions.table.beats(b"k", sent)
        assert await here.it.replicator.wait(handle.block)
        last = {name: offer.digest for name, offer, _ in here.it.homes.got}
        assert last == {"one": digest(OTHER), "two": digest(OTHER)}


async def test_a_temporary_name_is_not_waited_for_and_the_rename_of_it_is(world: World) -> None:
    async with syncing(world) as here:
        store = here.it.host.store
        handle = await here.written(b"k.tmp")
        await here.close(handle)
        assert here.it.homes.got == []
        store.rename(handle.block, store.catalog.names.root, b"k")
        await store.sealing.keep_promise(handle.block)
        assert here.it.homes.keys() == [("one", b"k"), ("two", b"k")]


async def test_who_syncs_what_was_deleted_waits_for_nobody(world: World) -> None:
    async with syncing(world) as here:
        store = here.it.host.store
        here.it.homes.answer = lambda name: Refused(reason=Reason.BUSY, retry_ms=60_000)
        block = await put(store, "k", CONTENT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.assuring.assure, block)
            await here.it.homes.came.wait()
            store.unlink(store.catalog.names.root, b"k", OWNER)


async def test_an_empty_block_is_assured_as_any(world: World) -> None:
    async with syncing(world) as here:
        handle = await here.written(b"k", b"")
        handle.wrote = True
        await here.close(handle)
        assert here.it.homes.keys() == [("one", b"k"), ("two", b"k")]
