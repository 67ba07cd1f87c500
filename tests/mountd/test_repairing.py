"""Repair goes by how many homes each block is to have."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from ctxfs.core.members import Member, Membership
from ctxfs.core.placement import Placement
from ctxfs.device.lanes import Source
from ctxfs.store.replicating import Replicator
from ctxfs.wire.messages import Durability, Offer, Refused, Stored
from mountd.repairing import Repairer
from tests.fakes import MemoryEngine
from tests.store.clustered import clustered
from tests.store.world import MIB, World, put

NAMES = ("a", "b", "c", "d")
MEMBERS = Membership(
    1,
    [Member(name=name, slot=n, address="h:1", zone="z", weight=1) for n, name in enumerate(NAMES)],
)


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield World(Path(name), MemoryEngine(64 * MIB))


@dataclass
class Homes:
    """Placement among all members; takes what it is sent."""

    placement: Placement = field(default_factory=lambda: Placement(MEMBERS))
    replicas: int = 2
    got: set[tuple[bytes, str]] = field(default_factory=set)

    def wanted(self, replicas: int | None = None) -> int:
        return replicas or self.replicas

    def homes(self, key: bytes, replicas: int | None = None) -> tuple[str, ...]:
        return self.placement.homes(key, self.wanted(replicas))

    async def push(self, name: str, offer: Offer, source: Source) -> Stored | Refused:
        self.got.add((offer.key, name))
        return Stored(Durability.MEMORY)


async def all_sent(replicator: Replicator) -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)
    while replicator.waiting:
        await trio.testing.wait_all_tasks_blocked()


async def test_each_block_goes_to_as_many_homes_as_it_is_to_have(world: World) -> None:
    async with clustered(world) as host, trio.open_nursery() as nursery:
        homes = Homes()
        replicator = Replicator(host.store, host.deletions, homes, "a")
        root = host.store.catalog.names.root
        wanted = {}
        for number in range(24):
            root.default_replicas = number % 4
            block = await put(host.store, f"k{number}", b"content")
            wanted[b"k%d" % number] = block.replicas or 2
        repairer = Repairer(host.store.catalog, replicator, "a", 2, 1 << 30)
        await nursery.start(replicator.run)
        await nursery.start(repairer.run)
        repairer.doubt(MEMBERS)
        await all_sent(replicator)
        expected = {
            (key, name)
            for key, replicas in wanted.items()
            for name in homes.homes(key, replicas)
            if name != "a"
        }
        assert homes.got == expected
        homes.replicas = 3
        repairer.apply(3, 1 << 30, MEMBERS)
        await all_sent(replicator)
        more = {(b"k0", name) for name in homes.homes(b"k0")} - {(b"k0", "a")}
        assert more - homes.got == set()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("replicas", [1, 4])
def test_homes_of_fewer_replicas_are_the_first_of_those_of_more(replicas: int) -> None:
    placement = Placement(MEMBERS)
    for number in range(100):
        key = b"k%d" % number
        assert placement.homes(key, 4)[:replicas] == placement.homes(key, replicas)
