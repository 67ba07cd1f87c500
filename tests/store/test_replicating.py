"""Blocks that are sealed go to their homes, once each, whatever gets in the way for a while."""

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from ctxfs.codec.digest import digest
from ctxfs.core.block import Block, Directory
from ctxfs.core.times import NEVER
from ctxfs.device.lanes import Source
from ctxfs.device.links import FileSpan
from ctxfs.errors import BlockNotFound, PeerUnreachable
from ctxfs.store.elsewhere import PREFIXES
from ctxfs.store.inflight import InFlight
from ctxfs.store.replicating import Replicator
from ctxfs.store.store import NewOwner
from ctxfs.wire.messages import Durability, Offer, Reason, Refused, Stored
from tests.store.clustered import Clustered, arrive, clustered, offer_of
from tests.store.world import OWNER, World, put

ME = "me"
CONTENT = os.urandom(200_000)
STORED = Stored(Durability.MEMORY)


@dataclass
class FakeHomes:
    """Takes what is pushed, or says what a test has it say."""

    names: tuple[str, ...] = (ME, "one", "two")
    got: list[tuple[str, Offer, bytes]] = field(default_factory=list)
    answer: Callable[[str], Stored | Refused] = lambda name: STORED
    asked: int = 0
    replicas: int = 3
    gate: trio.Event | None = None
    came: trio.Event = field(default_factory=trio.Event)

    def homes(self, key: bytes, replicas: int | None = None) -> tuple[str, ...]:
        return self.names[: self.wanted(replicas)]

    def wanted(self, replicas: int | None = None) -> int:
        return replicas or self.replicas

    async def push(self, name: str, offer: Offer, source: Source) -> Stored | Refused:
        self.asked += 1
        self.came.set()
        self.came = trio.Event()
        if self.gate is not None:
            await self.gate.wait()
        answer = self.answer(name)
        if isinstance(answer, Stored):
            assert not isinstance(source, FileSpan)
            self.got.append((name, offer, bytes(source)))
        return answer

    def keys(self) -> list[tuple[str, bytes]]:
        return sorted((name, offer.key) for name, offer, _ in self.got)


@dataclass
class Sending:
    host: Clustered
    homes: FakeHomes
    replicator: Replicator


@asynccontextmanager
async def sending(world: World, **options: float) -> AsyncIterator[Sending]:
    async with clustered(world) as host, trio.open_nursery() as nursery:
        homes = FakeHomes()
        replicator = Replicator(host.store, host.deletions, homes, ME, **options)  # type: ignore[arg-type]
        host.store.catalog.block_sealed = replicator.sealed
        host.store.catalog.directory_made = replicator.directory_made
        host.deletions.was_offered = replicator.was_offered
        await nursery.start(replicator.run)
        with trio.fail_after(30):
            yield Sending(host, homes, replicator)
        nursery.cancel_scope.cancel()


def rename(host: Clustered, old: bytes, new: bytes) -> None:
    host.store.rename(host.block(old), host.store.catalog.names.root, new)


async def test_a_sealed_block_is_pushed_to_its_other_homes(world: World) -> None:
    async with sending(world) as it:
        block = await put(it.host.store, "k", CONTENT)
        assert it.replicator.reached(block) == (2, 0)
        assert await it.replicator.wait(block)
        assert it.replicator.reached(block) == (2, 2)
        assert it.homes.keys() == [("one", b"k"), ("two", b"k")]
        _, offer, content = it.homes.got[0]
        assert (content, offer.version, offer.digest) == (CONTENT, block.version, digest(CONTENT))
        assert offer.attributes.mode == block.mode
        assert (block.opens, it.replicator.waiting) == (0, 0)


async def test_a_cold_block_is_promoted_to_be_pushed(world: World) -> None:
    async with sending(world) as it:
        it.homes.names = ()
        block = await put(it.host.store, "k", CONTENT)
        await it.host.store.mover.demoter.demote(block)
        it.homes.names = ("one",)
        it.replicator.replicate(block)
        assert await it.replicator.wait(block)
        assert it.homes.got[0][2] == CONTENT


async def test_what_came_from_elsewhere_is_not_pushed_on_by_itself(world: World) -> None:
    async with sending(world) as it:
        await arrive(it.host, offer_of(b"k", CONTENT, it.host.version()), CONTENT)
        assert it.replicator.waiting == 0
        it.replicator.replicate(it.host.block(b"k"))
        assert await it.replicator.wait(it.host.block(b"k"))
        assert len(it.homes.got) == 2


async def test_a_directory_may_want_another_number_of_replicas(world: World) -> None:
    async with sending(world) as it:
        it.host.store.catalog.names.root.default_replicas = 2
        block = await put(it.host.store, "k", CONTENT)
        it.host.store.catalog.names.root.default_replicas = 1
        assert block.replicas == 2, "as its directory said when it was made"
        assert await it.replicator.wait(block)
        assert (it.homes.keys(), it.replicator.reached(block)) == ([("one", b"k")], (1, 1))


async def test_the_log_tells_once_of_a_home_that_takes_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def fail(name: str) -> Stored | Refused:
        if name == "two":
            raise PeerUnreachable(name)
        return Refused(reason=Reason.NO_ROOM)

    def told() -> list[str]:
        return sorted(each.message for each in caplog.records if "wait for" in each.message)

    async with sending(world) as it:
        it.homes.answer = fail
        for number in range(20):
            await put(it.host.store, f"k{number}", b"%d" % number)
        while it.homes.asked < 60:
            await it.homes.came.wait()
        lines = ["blocks wait for one: it has no room", "blocks wait for two: two"]
        assert told() == lines
        it.homes.answer = lambda name: STORED
        it.replicator.retry()
        assert await it.replicator.wait(it.host.block(b"k7"))
        it.homes.answer = fail
        asked = it.homes.asked
        await put(it.host.store, "another", CONTENT)
        while it.homes.asked < asked + 2:
            await it.homes.came.wait()
        assert told() == sorted(lines * 2), "again after it took some"


async def test_a_lock_file_is_not_pushed(world: World) -> None:
    async with sending(world) as it:
        await put(it.host.store, "k.lock", b"")
        assert it.replicator.waiting == 0


async def test_a_home_that_has_it_is_not_sent_it_again(world: World) -> None:
    async with sending(world) as it:
        it.homes.answer = lambda name: Refused(reason=Reason.HAVE) if name == "one" else STORED
        block = await put(it.host.store, "k", CONTENT)
        assert await it.replicator.wait(block)
        assert (it.homes.keys(), it.replicator.counters.had) == ([("two", b"k")], 1)


@pytest.mark.parametrize("reason", [Reason.BUSY, Reason.NO_ROOM])
async def test_a_home_without_room_is_tried_again_and_no_other_twice(
    world: World, reason: Reason
) -> None:
    async with sending(world) as it:
        refusals = iter([Refused(reason=reason, retry_ms=1)])
        it.homes.answer = lambda name: next(refusals, STORED) if name == "one" else STORED
        block = await put(it.host.store, "k", CONTENT)
        assert await it.replicator.wait(block)
        assert it.homes.keys() == [("one", b"k"), ("two", b"k")]
        assert (it.homes.asked, it.replicator.counters.refused) == (3, 1)


async def test_a_home_that_cannot_be_reached_is_tried_again_when_members_change(
    world: World,
) -> None:
    async with sending(world) as it:
        away = {"two"}

        def answer(name: str) -> Stored:
            if name in away:
                raise PeerUnreachable("it is away")
            return STORED

        it.homes.answer = answer
        block = await put(it.host.store, "k", CONTENT)
        while it.replicator.reached(block) != (2, 1) or it.replicator.counters.failed < 2:
            await it.homes.came.wait()
            await trio.testing.wait_all_tasks_blocked()
        away.clear()
        it.replicator.retry()
        assert await it.replicator.wait(block)
        assert it.homes.keys() == [("one", b"k"), ("two", b"k")]


async def test_a_home_that_knows_it_was_deleted_has_it_dropped_here(world: World) -> None:
    async with sending(world) as it:
        gone = Refused(reason=Reason.GONE, version=it.host.version(after_s=1), until_ns=2**63)
        it.homes.answer = lambda name: gone
        block = await put(it.host.store, "k", CONTENT)
        with pytest.raises(BlockNotFound):
            await it.replicator.wait(block)
        assert it.host.deletions.table.beats(b"k", block.version)
        assert it.replicator.waiting == 0


async def test_a_block_that_went_is_not_pushed(world: World) -> None:
    async with sending(world) as it:
        it.homes.gate = trio.Event()
        block = await put(it.host.store, "k", CONTENT)
        while not it.homes.asked:
            await it.homes.came.wait()
        it.host.store.unlink(it.host.store.catalog.names.root, b"k", OWNER)
        it.homes.answer = lambda name: Refused(reason=Reason.BUSY)
        it.homes.gate.set()
        while it.replicator.waiting:
            await trio.testing.wait_all_tasks_blocked()
        assert (it.homes.got, block.opens) == ([], 0)


async def test_a_temporary_name_is_not_told_and_the_last_name_is(world: World) -> None:
    async with sending(world, temporary_grace_s=1000.0) as it:
        it.host.serving.was_offered = it.replicator.was_offered
        block = await put(it.host.store, "k.tmp", CONTENT)
        assert not it.replicator.was_offered(block)
        assert [type(each).__name__ for each in it.host.serving.lookup([b"k.tmp"], 0)] == ["Miss"]
        rename(it.host, b"k.tmp", b"k")
        assert await it.replicator.wait(block)
        assert it.homes.keys() == [("one", b"k"), ("two", b"k")]
        assert len(it.host.deletions.table) == 0, "nobody has to be told that the first name went"
        rename(it.host, b"k", b"other")
        assert await it.replicator.wait(block)
        assert it.homes.keys()[1] == ("one", b"other")
        assert it.host.deletions.table.get(b"k") is not None


async def test_who_waits_for_a_temporary_name_has_it_pushed_at_once(world: World) -> None:
    async with sending(world, temporary_grace_s=1000.0) as it:
        block = await put(it.host.store, "k.tmp", CONTENT)
        assert await it.replicator.wait(block)
        assert len(it.homes.got) == 2


async def test_what_is_still_written_cannot_be_waited_for(world: World) -> None:
    async with sending(world) as it:
        root = it.host.store.catalog.names.root
        handle = await it.host.store.create(root, b"k", NewOwner(0, 0, 0o644), OWNER, os.O_WRONLY)
        assert not await it.replicator.wait(handle.block)
        it.host.store.release(handle)


async def test_an_overwritten_block_leaves_the_newer_one_to_be_pushed(world: World) -> None:
    async with sending(world) as it:
        it.homes.gate = trio.Event()
        await put(it.host.store, "k", b"old")
        while it.homes.asked < 2:
            await it.homes.came.wait()
        newer = await put(it.host.store, "k", b"newer")
        it.homes.gate.set()
        assert await it.replicator.wait(newer)
        assert {
            content for _, offer, content in it.homes.got if offer.version == newer.version
        } == {b"newer"}


async def test_what_does_not_fit_the_queue_is_left_to_repair(world: World) -> None:
    async with sending(world, pending_max=2) as it:
        it.homes.gate = trio.Event()
        blocks = [await put(it.host.store, f"k{number}", b"x") for number in range(3)]
        assert it.replicator.waiting == 2
        assert it.replicator.counters.left_to_repair == 1
        assert it.replicator.was_offered(blocks[0])
        it.homes.gate.set()
        assert await it.replicator.wait(blocks[-1])


async def test_who_waits_for_a_block_that_is_left_to_repair_is_told_so(world: World) -> None:
    async with sending(world, pending_max=1) as it:
        it.homes.gate = trio.Event()
        first = await put(it.host.store, "first", b"x")
        told: list[bool] = []

        async def wait() -> None:
            told.append(await it.replicator.wait(first))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await put(it.host.store, "second", b"x")
        assert told == [False]
        it.homes.gate.set()


async def test_who_waits_for_a_block_that_is_deleted_is_told_so(world: World) -> None:
    async with sending(world) as it:
        it.homes.answer = lambda name: Refused(reason=Reason.BUSY, retry_ms=60_000)
        block = await put(it.host.store, "k", b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_wait_in_vain, it.replicator, block)
            await it.homes.came.wait()
            it.host.store.unlink(it.host.store.catalog.names.root, b"k", OWNER)


async def _wait_in_vain(replicator: Replicator, block: Block) -> None:
    with pytest.raises(BlockNotFound):
        await replicator.wait(block)


async def test_a_block_with_a_lifetime_takes_what_is_left_of_it_along(world: World) -> None:
    async with sending(world) as it:
        it.host.store.catalog.default_ttl_ns = 60 * 10**9
        block = await put(it.host.store, "k", CONTENT)
        assert block.expires_ns != NEVER
        assert await it.replicator.wait(block)
        assert it.homes.got[0][1].attributes.ttl_ns == 60 * 10**9


async def test_the_sign_of_a_directory_goes_to_its_homes_and_its_removal_is_told(
    world: World,
) -> None:
    async with sending(world) as it:
        root = it.host.store.catalog.names.root
        it.host.store.make_directory(root, b"d", NewOwner(5, 6, 0o750))
        while it.replicator.waiting:
            await trio.testing.wait_all_tasks_blocked()
        assert it.homes.keys() == [("one", PREFIXES + b"d"), ("two", PREFIXES + b"d")]
        offer = it.homes.got[0][1]
        assert (offer.attributes.mode, offer.attributes.uid) == (0o750, 5)
        assert isinstance(root.entries.get(b"d"), Directory)
        it.host.store.remove_directory(root, b"d")
        assert it.host.deletions.table.beats(PREFIXES + b"d", offer.version)


async def test_bytes_in_flight_are_bounded_and_a_large_one_goes_alone() -> None:
    flight = InFlight(10)
    most: list[int] = []

    async def fly(length: int) -> None:
        async with flight.of(length):
            most.append(flight.now_bytes)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for length in (4, 6, 5, 50, 1, 10, 0):
            nursery.start_soon(fly, length)
    assert max(each for each in most if each != 50) <= 10
    assert (50 in most, flight.now_bytes) == (True, 0)
