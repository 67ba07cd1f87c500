"""Copies that members lack are found and sent, and nobody is told meanwhile that all is well."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
import trio.testing

import mountd.repairing
from ctxfs.core.members import Member, Membership
from ctxfs.core.placement import Placement
from ctxfs.store.replicating import Replicator
from ctxfs.wire.messages import Reason, Refused
from mountd.repairing import Repairer
from tests.store.clustered import clustered
from tests.store.test_replicating import FakeHomes, Sending
from tests.store.world import World, put

ME, ONE, TWO = (
    Member(name=name, slot=slot, address="127.0.0.1:1", zone="", weight=1, incarnation=1)
    for slot, name in enumerate(("me", "one", "two"), start=1)
)
KEYS = [f"k{number}" for number in range(6)]
PACE = 1 << 40  # bytes a second: nobody waits


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountd.repairing, "PAUSE_S", 0.001)


@dataclass
class PlacedHomes(FakeHomes):
    """Homes by the members of now."""

    placement: Placement = field(default_factory=lambda: Placement(()))

    def homes(self, key: bytes, replicas: int | None = None) -> tuple[str, ...]:
        return self.placement.homes(key, replicas or 2)


@dataclass
class Repairing(Sending):
    repairer: Repairer
    members: Membership
    pushed: PlacedHomes

    def become(self, members: Iterable[Member]) -> None:
        before, self.members = self.members, Membership(self.members.epoch + 1, members)
        self.pushed.placement = Placement(self.members)
        self.repairer.changed(before, self.members)

    async def is_through(self) -> None:
        while self.replicator.unsure_to or self.replicator.waiting:
            await trio.testing.wait_all_tasks_blocked(0.01)


@asynccontextmanager
async def repairing(world: World, **options: float) -> AsyncIterator[Repairing]:
    """Blocks, two homes each, of three members."""
    async with clustered(world) as host, trio.open_nursery() as nursery:
        members = Membership(1, (ME, ONE, TWO))
        homes = PlacedHomes(placement=Placement(members))
        replicator = Replicator(host.store, host.deletions, homes, "me", **options)  # type: ignore[arg-type]
        host.store.catalog.block_sealed = replicator.sealed
        repairer = Repairer(host.store.catalog, replicator, "me", 2, PACE, waiting_max=0)
        await nursery.start(replicator.run)
        await nursery.start(repairer.run)
        with trio.fail_after(30):
            yield Repairing(host, homes, replicator, repairer, members, homes)
        nursery.cancel_scope.cancel()


async def test_a_member_that_is_started_anew_is_offered_what_it_had(world: World) -> None:
    async with repairing(world) as it:
        for key in KEYS:
            await it.replicator.wait(await put(it.host.store, key, b"x"))
        it.repairer.doubt(it.members)
        await it.is_through()
        had = {offer.key for name, offer, _ in it.homes.got if name == "one"}
        it.homes.got.clear()
        it.become((ME, replace(ONE, incarnation=2), TWO))
        await it.is_through()
        again = {(name, offer.key) for name, offer, _ in it.homes.got}
        mine = {key for key in had if "me" in it.homes.homes(key)}
        assert mine
        assert {("one", key) for key in mine} <= again
        assert {name for name, _ in again} == {"one"}


async def test_blocks_from_before_a_change_are_not_said_to_be_complete_until_it_was_looked(
    world: World,
) -> None:
    async with repairing(world) as it:
        blocks = [await put(it.host.store, key, b"x") for key in KEYS]
        it.repairer.doubt(it.members)
        await it.is_through()
        assert all(it.replicator.reached(block) in {(1, 1), (2, 2)} for block in blocks)
        it.homes.gate = trio.Event()
        it.become((ME, replace(ONE, incarnation=2), TWO))
        assert all(it.replicator.reached(block)[1] == 0 for block in blocks)
        it.homes.gate.set()
        assert await it.replicator.wait(blocks[0])
        await it.is_through()
        assert all(it.replicator.reached(block) in {(1, 1), (2, 2)} for block in blocks)


async def test_what_is_there_already_is_told_for_it_costs_the_pace_of_repair_nothing(
    world: World,
) -> None:
    async with repairing(world) as it:
        block = await put(it.host.store, "k1", b"content")
        assert await it.replicator.wait(block)
        there: list[int] = []
        it.replicator.was_there = there.append
        it.homes.answer = lambda name: Refused(reason=Reason.HAVE)
        it.repairer.doubt(it.members)
        await it.is_through()
        assert there == [block.size] * len(it.homes.homes(b"k1")[1:])


async def test_what_did_not_fit_the_queue_is_repaired(world: World) -> None:
    async with repairing(world, pending_max=2) as it:
        await put(it.host.store, "first", b"x")
        it.repairer.doubt(it.members)
        await it.is_through()
        it.homes.gate = trio.Event()
        for key in KEYS:
            await put(it.host.store, key, b"x")
        assert it.replicator.counters.left_to_repair
        assert it.replicator.unsure_to
        it.homes.gate.set()
        while len({offer.key for _, offer, _ in it.homes.got}) <= len(KEYS):
            await trio.testing.wait_all_tasks_blocked(0.01)
