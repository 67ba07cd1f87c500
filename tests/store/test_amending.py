"""Attributes that change after a block was sealed: who is told, and whose are right."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
import trio.testing

from ctxfs.core.block import Block
from ctxfs.core.meta import PIN_FOREVER, Placement
from ctxfs.core.times import NEVER
from ctxfs.core.tombstones import Tombstone
from ctxfs.core.versions import time_us_of
from ctxfs.errors import BadValue, PeerUnreachable
from ctxfs.store.amending import Amending
from ctxfs.store.elsewhere import attributes_of
from ctxfs.wire.messages import FOREVER_NS, Attributes, Offer, Reason, Refused
from tests.store.clustered import ATTRIBUTES, Clustered, arrive, clustered, offer_of
from tests.store.world import SECOND_NS, World, get_attribute, put, set_attribute

CONTENT = b"content" * 1000
HAVE = Refused(reason=Reason.HAVE)


@dataclass
class FakeMembers:
    """Hears what it is told, and says what a test has it say."""

    others: tuple[str, ...] = ("one", "two")
    heard: list[tuple[str, Offer]] = field(default_factory=list)
    answer: Callable[[str], Refused] = lambda name: HAVE

    async def amend(self, name: str, offer: Offer) -> Refused:
        await trio.lowlevel.checkpoint()
        answer = self.answer(name)
        self.heard.append((name, offer))
        return answer


@dataclass
class Telling:
    host: Clustered
    members: FakeMembers
    amending: Amending

    async def all_told(self) -> None:
        while self.amending.waiting:
            await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def telling(world: World) -> AsyncIterator[Telling]:
    async with clustered(world) as host, trio.open_nursery() as nursery:
        members = FakeMembers()
        amending = Amending(host.store.catalog, host.deletions, members)
        host.store.catalog.block_amended = amending.amended
        host.receiver.behind = amending.behind
        host.receiver.beats = amending.beats
        await nursery.start(amending.run)
        with trio.fail_after(30):
            yield Telling(host, members, amending)
        nursery.cancel_scope.cancel()


async def test_all_members_are_told_of_attributes_that_change_after_sealing(world: World) -> None:
    async with telling(world) as it:
        block = await put(it.host.store, "k", CONTENT)
        assert block.revision == 0
        await set_attribute(it.host.store, "k", "ttl", "60")
        await it.all_told()
        assert sorted(name for name, _ in it.members.heard) == ["one", "two"]
        offer = it.members.heard[0][1]
        assert (offer.key, offer.version, offer.digest) == (b"k", block.version, block.digest)
        assert (offer.attributes.ttl_ns, offer.attributes.revision) == (
            60 * SECOND_NS,
            block.revision,
        )


async def test_where_a_block_is_to_stay_is_nobody_elses_business(world: World) -> None:
    async with telling(world) as it:
        block = await put(it.host.store, "k", CONTENT)
        await set_attribute(it.host.store, "k", "tier", "cold")
        await it.all_told()
        assert (it.members.heard, block.revision) == ([], 0)


async def test_a_member_that_cannot_be_told_is_told_later_and_no_other_twice(
    world: World,
) -> None:
    async with telling(world) as it:
        away = {"two"}

        def answer(name: str) -> Refused:
            if name in away:
                raise PeerUnreachable("it is away")
            return HAVE

        it.members.answer = answer
        block = await put(it.host.store, "k", CONTENT)
        await set_attribute(it.host.store, "k", "pin", "1")
        while not it.amending.counters.untold:
            await trio.testing.wait_all_tasks_blocked()
        away.clear()
        it.amending.retry()
        await it.all_told()
        assert [name for name, _ in it.members.heard] == ["one", "two"]
        assert it.members.heard[1][1].attributes.revision == block.revision


async def test_a_change_while_others_are_told_is_told_too(world: World) -> None:
    async with telling(world) as it:
        await put(it.host.store, "k", CONTENT)
        for ttl in ("60", "50", "40"):
            await set_attribute(it.host.store, "k", "ttl", ttl)
            await trio.lowlevel.checkpoint()
        await it.all_told()
        last = {name: offer.attributes.ttl_ns for name, offer in it.members.heard}
        assert last == {"one": 40 * SECOND_NS, "two": 40 * SECOND_NS}


async def test_what_was_deleted_elsewhere_is_heard_of_by_telling(world: World) -> None:
    async with telling(world) as it:
        gone = Refused(reason=Reason.GONE, version=it.host.version(after_s=1), until_ns=2**63)
        it.members.answer = lambda name: gone
        block = await put(it.host.store, "k", CONTENT)
        await set_attribute(it.host.store, "k", "ttl", "60")
        await it.all_told()
        assert block.is_gone


@pytest.mark.parametrize("newer_is_first", [True, False])
async def test_all_are_told_which_of_two_versions_won_whose_writers_did_not_know_of_each_other(
    world: World, newer_is_first: bool
) -> None:
    async with telling(world) as it:
        version = it.host.version()
        offers = [offer_of(b"k", CONTENT, version + number * 1024) for number in (0, 1)]
        for offer in reversed(offers) if newer_is_first else offers:
            await arrive(it.host, offer, CONTENT)
        await it.all_told()
        assert sorted((name, offer.version) for name, offer in it.members.heard) == [
            ("one", offers[1].version), ("two", offers[1].version),
        ]  # fmt: skip


async def test_nobody_is_told_again_of_what_was_overwritten_in_knowledge_of_it(
    world: World,
) -> None:
    async with telling(world) as it:
        await arrive(it.host, offer_of(b"k", CONTENT, it.host.version()), CONTENT)
        await arrive(it.host, offer_of(b"k", CONTENT, it.host.version(after_s=2)), CONTENT)
        deleted = Tombstone(b"k", it.host.version(after_s=1), 2**63)
        await it.host.deletions.hear([deleted])
        await it.all_told()
        assert it.members.heard == []


# -- the other side


def revised(offer: Offer, attributes: Attributes, revision: int) -> Offer:
    """The same block with other attributes, and no bytes."""
    return replace(offer, attributes=replace(attributes, revision=revision), held_only=1)


async def arrived(host: Clustered) -> tuple[Offer, Block]:
    offer = offer_of(b"k", CONTENT, host.version(), replace(ATTRIBUTES, ttl_ns=90 * SECOND_NS))
    await arrive(host, offer, CONTENT)
    return offer, host.block(b"k")


@pytest.mark.parametrize("held_only", [0, 1])
async def test_newer_attributes_of_a_block_that_is_here_are_taken_over_and_outlive_the_daemon(
    world: World, held_only: int
) -> None:
    newer = replace(
        ATTRIBUTES, mode=0o600, uid=7, ttl_ns=FOREVER_NS, pin_ns=FOREVER_NS, user=(), replicas=3
    )
    async with clustered(world) as host:
        offer, block = await arrived(host)
        block.more().placement = Placement.HOT
        revision = host.version(after_s=1)
        told = replace(revised(offer, newer, revision), held_only=held_only)
        answer = await host.offer(told)
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.HAVE
        assert host.receiver.counters.amended == 1
    async with world.store() as store:
        found = store.catalog.names.resolve(b"k")
        assert isinstance(found, Block)
        assert (found.mode, found.uid, found.revision, found.replicas) == (0o600, 7, revision, 3)
        assert (found.expires_ns, found.placement) == (NEVER, Placement.HOT)
        assert found.extras is not None
        assert (found.extras.pin_until_ns, found.extras.attributes) == (PIN_FOREVER, {})


async def test_older_attributes_are_passed_over_and_who_has_them_is_told(world: World) -> None:
    async with telling(world) as it:
        offer, block = await arrived(it.host)
        await set_attribute(it.host.store, "k", "ttl", "60")
        await it.all_told()
        it.members.heard.clear()
        assert await it.host.offer(offer) is not None
        assert block.expires_ns == world.clock.boot_ns + 60 * SECOND_NS
        it.members.others = ("other",)
        await it.all_told()
        assert [name for name, _ in it.members.heard] == ["other"]
        assert it.members.heard[0][1].attributes == attributes_of(block, world.clock())


async def test_attributes_alone_make_no_block(world: World) -> None:
    async with clustered(world) as host:
        offer = offer_of(b"k", CONTENT, host.version())
        answer = await host.offer(revised(offer, ATTRIBUTES, host.version(after_s=1)))
        assert isinstance(answer, Refused)
        assert (answer.reason, len(host.store.catalog.names.root.entries)) == (Reason.MISS, 0)


async def test_a_copy_of_which_somebody_has_a_newer_version_is_dropped(world: World) -> None:
    async with clustered(world) as host:
        offer, block = await arrived(host)
        newer = replace(offer, version=host.version(after_s=1), held_only=1)
        assert await host.offer(newer) == Refused(reason=Reason.MISS)
        assert block.is_gone


async def test_attributes_of_a_block_that_is_on_its_way_are_to_come_again(world: World) -> None:
    async with clustered(world) as host:
        offer = offer_of(b"k", CONTENT, host.version())
        arrival = await host.offer(offer)
        assert not isinstance(arrival, Refused)
        answer = await host.offer(revised(offer, ATTRIBUTES, host.version(after_s=1)))
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.BUSY
        arrival.abandon()


async def test_a_new_version_begins_with_the_attributes_it_has(world: World) -> None:
    async with telling(world) as it:
        block = await put(it.host.store, "k", CONTENT)
        await set_attribute(it.host.store, "k", "dtype", "bf16")
        assert block.revision
        it.host.store.rename(block, it.host.store.catalog.names.root, b"other")
        assert (block.revision, block.dtype) == (0, b"bf16")


# -- lifetimes that were changed


async def test_an_early_end_is_a_deletion_to_who_was_away_and_not_to_what_is_newer(
    world: World,
) -> None:
    async with telling(world) as it:
        block = await put(it.host.store, "k", CONTENT)
        version = block.version
        await set_attribute(it.host.store, "k", "ttl", "5")
        newer = it.host.version(after_s=1)
        world.clock.pass_s(6)
        it.host.store.upkeep.expire_due()
        assert block.is_gone
        table = it.host.deletions.table
        assert table.beats(b"k", version)
        assert not table.beats(b"k", newer), "it was written after the change, before the end"
        dead = table.get(b"k")
        assert dead is not None
        fresh = await put(it.host.store, "k2", CONTENT)
        assert time_us_of(fresh.version) > time_us_of(dead.version)


async def test_an_end_that_all_know_of_needs_no_tombstone(world: World) -> None:
    async with telling(world) as it:
        it.host.store.catalog.default_ttl_ns = 5 * SECOND_NS
        block = await put(it.host.store, "k", CONTENT)
        world.clock.pass_s(6)
        it.host.store.upkeep.expire_due()
        assert (block.is_gone, len(it.host.deletions.table)) == (True, 0)


# -- how many are to hold a block


async def test_how_many_hosts_hold_a_block_is_said_of_it_or_of_its_directory(
    world: World,
) -> None:
    async with clustered(world) as host:
        root = host.store.catalog.names.root
        root.default_replicas = 3
        block = await put(host.store, "k", CONTENT)
        assert (block.replicas, get_attribute(host.store, "k", "replicas")) == (3, "1/3")
        for written, replicas in (("2", 2), ("1/4", 4), ("auto", None)):
            await set_attribute(host.store, "k", "replicas", written)
            assert block.replicas == replicas
        for wrong in ("0", "17", "-1", "two", "", "1/"):
            with pytest.raises(BadValue, match=r"user\.ctx\.replicas takes 1 to 16, or auto"):
                await set_attribute(host.store, "k", "replicas", wrong)
    async with world.store() as store:
        root = store.catalog.names.root
        root.default_replicas = 2
        store.catalog.record_directory(root)
    async with world.store() as store:
        assert store.catalog.names.root.default_replicas == 2
        assert (await put(store, "k", CONTENT)).replicas == 2, "a new generation starts over"
