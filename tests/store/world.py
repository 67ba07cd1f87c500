"""A store on a real tmpfs directory and a cold tier in memory, with a clock that tests set."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from ctxfs.core.block import Block
from ctxfs.core.times import Now
from ctxfs.store.attributes import Attributes
from ctxfs.store.catalog import Catalog
from ctxfs.store.coding import Coding, CodingSettings
from ctxfs.store.counters import Counters
from ctxfs.store.events import Events
from ctxfs.store.mover import Mover, MoverLimits
from ctxfs.store.recovery import recover
from ctxfs.store.store import NewOwner, Store
from ctxfs.tiers.cold import ColdDevice, ColdTier
from ctxfs.tiers.hot import HotTier
from ctxfs.tiers.warm import WarmTier
from tests.fakes import MemoryEngine

MIB = 1 << 20
SECOND_NS = 1_000_000_000
OWNER = 4711
LIMITS = MoverLimits(
    high_ratio=0.95,
    low_ratio=0.9,
    room_wait_s=0.5,
    read_deadline_s=2.0,
    temporary_wait_ns=30 * SECOND_NS,
)


@dataclass
class FakeClock:
    """Two clocks that move only when told to."""

    boot_ns: int = 1_000 * SECOND_NS
    wall_ns: int = 1_700_000_000 * SECOND_NS

    def __call__(self) -> Now:
        return Now(self.boot_ns, self.wall_ns)

    def pass_s(self, seconds: float) -> None:
        self.boot_ns += int(seconds * SECOND_NS)
        self.wall_ns += int(seconds * SECOND_NS)

    def step_wall_s(self, seconds: float) -> None:
        self.wall_ns += int(seconds * SECOND_NS)


@dataclass
class World:
    """What outlives a daemon: the tmpfs, the device, the clock."""

    path: Path
    engine: MemoryEngine | None
    clock: FakeClock = field(default_factory=FakeClock)
    hot_bytes: int = 16 * MIB
    limits: MoverLimits = LIMITS
    still_open: set[int] | None = None  # in a mount that outlives the daemon
    warm_bytes: int = 0
    coding: CodingSettings = field(default_factory=CodingSettings)
    is_alone: bool = False  # pass for a tmpfs with nothing else, so that files can be lent

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        """A daemon's life. Leaving is a crash: nothing is saved on the way out."""
        hot = HotTier(self.path, self.hot_bytes, huge=False)
        hot.is_alone = self.is_alone
        catalog: list[Catalog] = []
        async with trio.open_nursery() as nursery:
            cold = found = None
            if self.engine is not None:
                cold = await ColdTier.open(
                    [ColdDevice("memory", self.engine)],
                    describe=lambda g: catalog[0].describe(g),
                    describe_directory=lambda i: catalog[0].describe_directory(i),
                )
                found = await cold.recover()
            warm = self._warm()
            catalog.append(Catalog(self.clock, hot, cold, Events(100), Counters(), warm))
            coding = Coding(self.coding)
            mover = Mover(catalog[0], self.limits, coding)
            store = Store(catalog[0], mover, block_bytes_max=1 << 30)
            catalog[0].keeps_transients = self.still_open is not None
            recover(catalog[0], found, self.still_open)
            if cold is not None:

                async def tend(
                    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
                ) -> None:
                    await cold.run(task_status=task_status)

                await nursery.start(tend)
            await nursery.start(store.mover.run)
            await nursery.start(store.run)
            yield store
            nursery.cancel_scope.cancel()
        hot.close()
        coding.close()
        if warm is not None:
            warm.close()
        if self.engine is not None:
            self.engine = self.engine.reopen()

    def _warm(self) -> WarmTier | None:
        if not self.warm_bytes:
            return None
        place = self.path / "warm"
        place.mkdir(exist_ok=True)
        return WarmTier(place, self.warm_bytes)

    def reboot(self, away_s: float = 0.0) -> None:
        """Memory is lost, and so is what the device had not been told to keep."""
        for file in (*(self.path / "blocks").iterdir(), self.path / "journal"):
            file.unlink()
        if self.engine is not None:
            self.engine = self.engine.crash()
        self.clock.pass_s(away_s)
        self.clock.boot_ns = 5 * SECOND_NS


async def put(store: Store, name: str, content: bytes) -> Block:
    """Create, write, close, and wait until it is sealed."""
    root = store.catalog.names.root
    who = NewOwner(0, 0, 0o644)
    handle = await store.create(root, name.encode(), who, OWNER, os.O_WRONLY | os.O_TRUNC)
    for start in range(0, len(content), MIB):
        await store.content.write(handle, start, content[start : start + MIB])
    handle.wrote = True
    store.publish_on_close(handle)
    store.release(handle)
    await store.sealing.wait_sealed(handle.block)
    return handle.block


async def get(store: Store, name: str) -> bytes:
    """Open, read whole, close."""
    block = store.find(store.catalog.names.root, name.encode(), None)
    assert isinstance(block, Block)
    handle = await store.open_for_read(block, owner=1)
    try:
        return bytes(store.content.read(handle, 0, block.size))
    finally:
        store.release(handle)


async def set_attribute(store: Store, name: str, attribute: str, value: str) -> None:
    """Like setfattr -n user.ctx.ATTRIBUTE."""
    block = store.catalog.names.resolve(name.encode())
    await Attributes(store, bytes_max=1 << 16).set(
        block, f"user.ctx.{attribute}".encode(), value.encode()
    )


def get_attribute(store: Store, name: str, attribute: str) -> str:
    """Like getfattr -n user.ctx.ATTRIBUTE."""
    block = store.catalog.names.resolve(name.encode())
    return (
        Attributes(store, bytes_max=1 << 16).get(block, f"user.ctx.{attribute}".encode()).decode()
    )
