"""A cold tier on recording devices from one start to the next power cut, and what it promised."""

import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Final, TypeVar
from unittest import mock

import trio
import trio.testing
import xxhash

from ctxfs.core.meta import BlockMeta, DirectoryMeta, MakeDirectory, Put, RemoveDirectory
from ctxfs.errors import BlockNotFound, DeviceError, TierFull
from ctxfs.ondisk.layout import SEGMENTS_OFFSET, padded
from ctxfs.tiers.cold import ColdDevice, ColdTier, Recovered
from ctxfs.tiers.cold_buffers import Scratch
from tests.tiers.cold_rig import OFTEN, SEGMENT
from tests.tiers.promises import Histories
from tests.tiers.recording import Cut, RecordingEngine, Trace, images_after
from tests.tiers.sharing import share

T = TypeVar("T")

_POOL: Final = random.Random(0).randbytes(4 << 20)
_READ: Final = Scratch(4 * SEGMENT)  # no block is longer
_STEP: Final = 7919  # from one content's place in the pool to the next one's


def run_seeded(seed: int, call: Callable[[], Awaitable[T]]) -> T:
    """Run it in a loop whose tasks take turns as the seed says; waiting takes no time.

    What would go to a thread is done at once: the clock jumps on while all tasks wait, and how far
    it gets while a thread works is a matter of how fast that is.
    """
    scheduler = trio._core._run

    async def main() -> T:
        return await call()

    with (
        mock.patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        mock.patch.object(trio.to_thread, "run_sync", _run_here),
    ):
        scheduler._r.seed(seed)
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def _run_here(function: Callable[..., T], *args: object) -> T:
    await trio.lowlevel.checkpoint()
    return function(*args)


def blank(segments: int) -> bytearray:
    """A device that nobody has written to."""
    return bytearray(SEGMENTS_OFFSET + segments * SEGMENT)


def content(meta: BlockMeta) -> bytes:
    """Its birth says what is in a block: no two blocks with one number have the same bytes."""
    start = meta.created_ns * _STEP % (len(_POOL) - 8 * SEGMENT)
    return _POOL[start : start + meta.size]


class Life:
    """`births`: how many blocks were made in this and all lives before it."""

    def __init__(self, images: list[bytearray], dice: random.Random, *, births: int = 0) -> None:
        self.dice = dice
        self.trace = Trace(images)
        self.engines = [RecordingEngine(at, self.trace, dice) for at in range(len(images))]
        self.births = births
        self.blocks: Histories[BlockMeta] = Histories()
        self.directories: Histories[DirectoryMeta] = Histories()
        self.live: dict[int, BlockMeta] = {}
        self.live_directories: dict[int, DirectoryMeta] = {}
        self.number = self.stamp = 0
        self.tier: ColdTier
        self.recovered: Recovered
        self.recovered_at = 0  # moment

    async def begin(self) -> Recovered:
        """Open and recover; what is found is what there is."""
        devices = [
            ColdDevice(f"device{at}", engine, segment_bytes=SEGMENT)
            for at, engine in enumerate(self.engines)
        ]
        self.tier = await ColdTier.open(
            devices,
            describe=self.live.get,
            describe_directory=self.live_directories.get,
            tables=OFTEN if self.dice.random() < 0.8 else None,
        )
        recovered = self.recovered = await self.tier.recover()
        self.recovered_at = self.trace.now
        self.live.update(recovered.blocks)
        self.live_directories.update({each.inode: each for each in recovered.directories})
        self.blocks = Histories(self.live.items())
        self.directories = Histories(self.live_directories.items())
        # As a store would: what left no trace may be numbered so again.
        self.number, self.stamp = recovered.highest_number, recovered.highest_stamp
        return recovered

    def after(self, cut: Cut, dice: random.Random) -> "Life":
        """The next life, when the power comes back."""
        return Life(images_after(self.trace, cut), dice, births=self.births)

    # -- what a store does

    def new_block(
        self, size: int, key: bytes | None = None, *, like: BlockMeta | None = None
    ) -> BlockMeta:
        """`like`: a block whose content it has."""
        self.number += 1
        self.births += 1
        meta = BlockMeta(
            generation=self.number,
            stamp=0,
            key=b"block/%d" % self.births if key is None else key,
            size=size if like is None else like.size,
            digest=b"",
            mode=0o644,
            uid=1,
            gid=2,
            created_ns=self.births if like is None else like.created_ns,
            mtime_ns=2,
            atime_ns=3,
        )
        return replace(meta, digest=xxhash.xxh3_128_digest(content(meta)))

    async def put(self, meta: BlockMeta) -> None:
        """Raises TierFull, DeviceError."""
        meta = replace(meta, stamp=self.next_stamp())
        generation = meta.generation
        memory = Scratch(max(4096, padded(meta.size)))
        memory.view[: meta.size] = content(meta)
        self.blocks.say(generation, meta, self.trace.now)
        self.blocks.of(generation).busy += 1
        self.live[generation] = meta
        try:
            if not await share(self.tier, meta, memory.view[: padded(meta.size)]):
                await self.tier.put(meta, memory.span(0, padded(meta.size)))
        except (TierFull, DeviceError, BlockNotFound):
            self.live.pop(generation, None)
            self.blocks.say(generation, None, self.trace.now)
            raise
        finally:
            self.blocks.of(generation).busy -= 1

    def next_stamp(self) -> int:
        self.stamp += 1
        return self.stamp

    def drop(self, generation: int) -> None:
        del self.live[generation]
        self.tier.drop(generation, self.next_stamp())
        self.blocks.say(generation, None, self.trace.now)

    def change(self, meta: BlockMeta) -> None:
        """New attributes, or another name, of what is there."""
        was = self.live[meta.generation]
        if was.key != meta.key:
            self.tier.leaves_name(meta.generation, was.key)
        changed = replace(meta, stamp=self.next_stamp())
        self.live[meta.generation] = changed
        self.blocks.say(meta.generation, changed, self.trace.now)
        self.tier.note(Put(changed))

    def make_directory(self) -> None:
        self.number += 1
        made = DirectoryMeta(
            inode=self.number,
            stamp=0,
            key=b"directory/%d" % self.number,
            mode=0o755,
            uid=1,
            gid=2,
            mtime_ns=1,
        )
        self.change_directory(made)

    def change_directory(self, meta: DirectoryMeta) -> None:
        changed = replace(meta, stamp=self.next_stamp(), mtime_ns=meta.mtime_ns + 1)
        self.live_directories[meta.inode] = changed
        self.directories.say(meta.inode, changed, self.trace.now)
        self.tier.note(MakeDirectory(changed))

    def remove_directory(self, inode: int) -> None:
        del self.live_directories[inode]
        self.directories.say(inode, None, self.trace.now)
        self.tier.note(RemoveDirectory(inode, self.next_stamp()))

    async def sync(self, generation: int | None = None) -> None:
        """Raises DeviceError, TierFull."""
        blocks = self.blocks.to_be_kept(generation)
        directories = self.directories.to_be_kept()
        await self.tier.sync(generation)
        self.blocks.keep(blocks, self.trace.now)
        if generation is None:
            self.directories.keep(directories, self.trace.now)

    async def read(self, meta: BlockMeta) -> bytes:
        """As the tier gives it; one at a time. Raises DeviceError."""
        length = padded(meta.size)
        _READ.view[:length] = b"\xff" * length
        await self.tier.get(meta.generation, _READ.span(0, length), meta.size)
        return bytes(_READ.view[: meta.size])

    @contextlib.contextmanager
    def failing(self, **shares: float) -> Iterator[None]:
        """Requests fail in these shares ("read", "write", "sync")."""
        for engine in self.engines:
            engine.fail = shares
        try:
            yield
        finally:
            for engine in self.engines:
                engine.fail = {}
