"""A random load on a cold tier: what a store asks of it, in any order, and with failures."""

import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import trio

from ctxfs.core.meta import BlockMeta
from ctxfs.errors import DeviceError, TierFull
from tests.tiers.cold_rig import SEGMENT
from tests.tiers.power_life import Life

_TROUBLE: Final = (DeviceError, TierFull)
_LONG: Final = b"x" * 6000  # an attribute with which a record's header is longer than one sector
_LIVE_MAX: Final = 30  # blocks; more take longer to check, and show no more


class Load:
    """Works on a life that has begun. `failures`: how often requests fail, beside other moves."""

    def __init__(self, life: Life, dice: random.Random, *, failures: int = 2) -> None:
        self._life = life
        self._dice = dice
        self._moves: dict[Callable[[], Awaitable[None]], int] = {
            self.put: 10,
            self.put_again: 2,
            self.put_copy: 5,
            self.put_several: 4,
            self.replace: 3,
            self.change: 5,
            self.pass_names_on: 3,
            self.change_many: 1,
            self.drop: 5,
            self.drop_many: 1,
            self.directories: 3,
            self.sync: 6,
            self.sync_one: 2,
            self.sync_beside_puts: 2,
            self.let_time_pass: 3,
            self.fill: 1,
            self.read: 2,
            self.fail: failures,
        }

    async def run(self, steps: int) -> None:
        """So many moves, with the tier's own work in the background."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._life.tier.run)
            for _ in range(steps):
                await self.move()
            nursery.cancel_scope.cancel()

    async def move(self) -> None:
        (move,) = self._dice.choices(list(self._moves), list(self._moves.values()))
        with contextlib.suppress(*_TROUBLE):
            await move()

    def _size(self) -> int:
        return self._dice.choice(
            (
                self._dice.randrange(5000),
                self._dice.randrange(30_000),
                self._dice.randrange(SEGMENT),
                4096 * self._dice.randrange(6),
                self._dice.choice((0, 1, SEGMENT, 2 * SEGMENT - 4097)),
            )
        )

    def _any(self) -> BlockMeta | None:
        """A block that is there, and not on its way."""
        life = self._life
        there = [meta for number, meta in life.live.items() if not life.blocks.of(number).busy]
        return self._dice.choice(there) if there else None

    async def put(self) -> None:
        if len(self._life.live) > _LIVE_MAX:
            await self.drop_many()
        await self._put(self._life.new_block(self._size()))

    async def _put(self, meta: BlockMeta) -> None:
        """Into a full tier, as the store does: others make room."""
        try:
            await self._life.put(meta)
        except TierFull:
            await self.drop_many()

    async def put_again(self) -> None:
        """What was dropped, or could not be written."""
        gone = self._life.blocks.gone()
        if gone:
            versions = self._life.blocks.ever(self._dice.choice(gone))
            block = next(version for version in reversed(versions) if version is not None)
            if all(other.key != block.key for other in self._life.live.values()):
                await self._put(replace(block, expires_ns=self._dice.randrange(1000)))

    async def put_copy(self) -> None:
        """The content of a block that is there, or was, once more or a few times."""
        like = self._any()
        gone = self._life.blocks.gone()
        if gone and (like is None or self._dice.random() < 0.2):
            versions = self._life.blocks.ever(self._dice.choice(gone))
            like = next(version for version in reversed(versions) if version is not None)
        if like is None:
            return
        for _ in range(self._dice.choice((1, 1, 1, 4))):
            await self._put(self._life.new_block(0, like=like))
        if self._dice.random() < 0.5 and like.generation in self._life.live:
            self._life.drop(like.generation)

    async def put_several(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self._dice.randrange(2, 8)):
                nursery.start_soon(self._put_or_fail)

    async def _put_or_fail(self) -> None:
        with contextlib.suppress(*_TROUBLE):
            await self.put()

    async def replace(self) -> None:
        """The name leads to another block from now on."""
        old = self._any()
        if old is not None:
            self._life.drop(old.generation)
            await self._put(self._life.new_block(self._size(), old.key))

    async def change(self) -> None:
        block = self._any()
        if block is None:
            return
        match self._dice.randrange(4):
            case 0:
                self._life.births += 1
                block = replace(block, key=b"renamed/%d" % self._life.births)
            case 1:
                length = self._dice.choice((1, 100, len(_LONG)))
                block = replace(block, attributes=((b"user.long", _LONG[:length]),))
            case _:
                block = replace(block, expires_ns=self._dice.randrange(1000))
        self._life.change(block)

    async def change_many(self) -> None:
        for _ in range(30):
            await self.change()

    async def pass_names_on(self) -> None:
        """Each of some blocks takes the name of the next, the last that of the first or a new one,
        or a new block takes it."""
        life = self._life
        there = [meta for number, meta in life.live.items() if not life.blocks.of(number).busy]
        chosen = self._dice.sample(there, min(len(there), self._dice.randrange(1, 5)))
        if not chosen:
            return
        names = [block.key for block in chosen]
        goes_round = self._dice.random() < 0.3
        if not goes_round:
            life.births += 1
            names.append(b"renamed/%d" % life.births)
            chosen.reverse()  # a name is free before it is taken
            names.reverse()
            for block, name in zip(chosen, names, strict=False):
                life.change(replace(block, key=name))
            if self._dice.random() < 0.5:
                await self._put(life.new_block(self._size(), names[-1]))
            return
        for block, name in zip(chosen, (*names[1:], names[0]), strict=True):
            life.change(replace(block, key=name))

    async def drop(self) -> None:
        block = self._any()
        if block is not None:
            self._life.drop(block.generation)

    async def drop_many(self) -> None:
        share = self._dice.choice((0.2, 0.5, 0.9))
        for generation in list(self._life.live):
            if self._dice.random() < share and not self._life.blocks.of(generation).busy:
                self._life.drop(generation)

    async def directories(self) -> None:
        there = list(self._life.live_directories.values())
        if len(there) < 3 or self._dice.random() < 0.3:
            self._life.make_directory()
        elif self._dice.random() < 0.5:
            self._life.change_directory(self._dice.choice(there))
        else:
            self._life.remove_directory(self._dice.choice(there).inode)

    async def sync(self) -> None:
        await self._life.sync()

    async def sync_one(self) -> None:
        block = self._any()
        if block is not None:
            await self._life.sync(block.generation)

    async def sync_beside_puts(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(self._put_or_fail)
                nursery.start_soon(self._sync_or_fail)
                await self.change()

    async def _sync_or_fail(self) -> None:
        with contextlib.suppress(*_TROUBLE):
            await self._life.sync()

    async def let_time_pass(self) -> None:
        """The tier tends to itself; a device that failed is tried again."""
        await trio.sleep(self._dice.choice((0.5, 2, 60)))

    async def fill(self) -> None:
        """Until nothing more goes in, and then some: segments are reclaimed for it."""
        for _ in range(100):
            try:
                await self._life.put(self._life.new_block(self._dice.randrange(60_000)))
            except TierFull:
                break
        for _ in range(self._dice.randrange(4)):
            await self.drop_many()
            await self.put_several()

    async def read(self) -> None:
        block = self._any()
        if block is not None:
            await self._life.read(block)

    async def fail(self) -> None:
        what = self._dice.choice(("read", "write", "sync"))
        share = self._dice.choice((0.05, 0.3, 1.0))
        with self._life.failing(**{what: share}):
            for _ in range(self._dice.randrange(1, 6)):
                await self.move()
