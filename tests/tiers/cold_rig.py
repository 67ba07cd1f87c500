"""A cold tier on memory, and a model of what it should hold."""

import random
from dataclasses import replace

import xxhash

from ctxfs.core.meta import BlockMeta, DirectoryMeta, MakeDirectory, Put, RemoveDirectory
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.layout import SEGMENTS_OFFSET, padded
from ctxfs.tiers.cold import ColdDevice, ColdTier, Recovered, TablePolicy
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_log import ColdLog
from ctxfs.tiers.cold_parts import part_data_bytes
from ctxfs.tiers.cold_space import SegmentState
from tests.fakes import MemoryEngine
from tests.tiers.sharing import share

SEGMENT = 128 << 10
# A checkpoint of many pieces after every other segment, on the smallest device.
OFTEN = TablePolicy(segments_min=1, summaries_max=2, segments_share=1, piece_bytes=6 << 10)


def engine(segments: int = 16, *, segment_bytes: int = SEGMENT, seed: int = 0) -> MemoryEngine:
    return MemoryEngine(SEGMENTS_OFFSET + segments * segment_bytes, seed=seed)


_COPY_SHIFT = 40


def content(generation: int, size: int) -> bytes:
    return random.Random(_original(generation)).randbytes(size)


def _original(generation: int) -> int:
    """Copies of a block have its content, though not its number."""
    return generation & (1 << _COPY_SHIFT) - 1


def is_encoded(generation: int) -> bool:
    """Some blocks are stored as a codec would make them: other bytes, of another length."""
    return _original(generation) % 3 == 0


def flipped(data: memoryview) -> bytes:
    """A codec that keeps the length."""
    return bytes(data).translate(_FLIP)


_FLIP = bytes(255 - value for value in range(256))


def meta(generation: int, stamp: int, size: int, key: bytes | None = None) -> BlockMeta:
    return BlockMeta(
        generation=generation,
        stamp=stamp,
        key=b"block/%d" % generation if key is None else key,
        size=size,
        digest=xxhash.xxh3_128_digest(content(generation, size)),
        mode=0o644,
        uid=1000,
        gid=100,
        created_ns=1,
        mtime_ns=2,
        atime_ns=3,
    )


def directory(inode: int, stamp: int) -> DirectoryMeta:
    return DirectoryMeta(
        inode=inode, stamp=stamp, key=b"prefix/%d" % inode, mode=0o755, uid=0, gid=0, mtime_ns=0
    )


class Rig:
    """A tier and what its store would know of it."""

    def __init__(
        self,
        *engines: MemoryEngine,
        segment_bytes: int | None = SEGMENT,
        tables: TablePolicy | None = None,
    ) -> None:
        self.engines = list(engines)
        self.segment_bytes = segment_bytes
        self.tables = tables
        self.blocks: dict[int, BlockMeta] = {}
        self.directories: dict[int, DirectoryMeta] = {}
        self.stamp = 0
        self.number = 0
        self.copies = 0
        self.sizes: dict[int, int] = {}
        self.tier: ColdTier
        self.recovered: Recovered

    async def open(self, *, format: bool = False) -> Recovered:
        devices = [
            ColdDevice(f"memory{at}", engine, format=format, segment_bytes=self.segment_bytes)
            for at, engine in enumerate(self.engines)
        ]
        without_tables = Rig(*self._copies(), segment_bytes=self.segment_bytes)
        self.tier = await ColdTier.open(
            devices,
            describe=self.blocks.get,
            describe_directory=self.directories.get,
            tables=self.tables,
        )
        self.recovered = await self.tier.recover()
        if self.tables is not None:
            await self._compare(without_tables)
        self.blocks.clear()
        self.blocks.update(self.recovered.blocks)
        self.directories.clear()
        self.directories.update({found.inode: found for found in self.recovered.directories})
        self.stamp = max(self.stamp, self.recovered.highest_stamp)
        self.number = max(self.number, self.recovered.highest_number)
        return self.recovered

    def _copies(self) -> list[MemoryEngine]:
        """The devices as they would be, had nobody ever written a summary or a checkpoint."""
        if self.tables is None:
            return []
        copies = [device.copy() for device in self.engines]
        for device in copies:
            for start in range(SEGMENTS_OFFSET, device.size_bytes, SEGMENT):
                magic = device.medium[start : start + len(segment_header.TABLE_MAGIC)]
                if magic == segment_header.TABLE_MAGIC:
                    device.medium[start : start + 4096] = bytes(4096)
        return copies

    async def _compare(self, without_tables: "Rig") -> None:
        """What tables tell is what the records tell."""
        if any(log.health.lost for log in self.tier._logs):
            return
        expected = await without_tables.open()
        assert self.recovered.blocks == expected.blocks
        assert sorted(self.recovered.directories, key=lambda each: each.inode) == sorted(
            expected.directories, key=lambda each: each.inode
        )
        pairs = zip(self.tier._logs, without_tables.tier._logs, strict=True)
        for log, other in pairs:
            assert log.index._blocks.keys() == other.index._blocks.keys()
            assert set(log.index.graves) >= set(other.index.graves)

    async def tend(self) -> None:
        """What is done in the background, once."""
        for log in self.tier._logs:
            await log.tend()

    async def crash(self) -> Recovered:
        self.engines = [engine.crash() for engine in self.engines]
        return await self.open()

    async def restart(self) -> Recovered:
        await self.tier.close()
        self.engines = [engine.reopen() for engine in self.engines]
        return await self.open()

    def next_stamp(self) -> int:
        self.stamp += 1
        return self.stamp

    def next_number(self) -> int:
        self.number += 1
        return self.number

    async def put(self, size: int, key: bytes | None = None) -> int:
        generation = self.next_number()
        await self.put_again(meta(generation, self.next_stamp(), size, key))
        return generation

    async def put_copy(self, generation: int) -> int:
        """Put a block with the content of another one, which is or was there."""
        self.copies += 1
        copy = generation + (self.copies << _COPY_SHIFT)
        size = self.sizes[generation]
        self.sizes[copy] = size
        await self.put_again(meta(copy, self.next_stamp(), size))
        return copy

    async def put_again(self, block: BlockMeta) -> None:
        memory = Scratch(max(4096, padded(block.size)))
        memory.view[: block.size] = content(block.generation, block.size)
        encoded = is_encoded(block.generation)
        if encoded:
            memory.view[:] = flipped(memory.view)
        length = padded(max(block.size, 1) if encoded else block.size)
        self.blocks[block.generation] = block
        self.sizes[block.generation] = block.size
        try:
            if await share(self.tier, block, memory.view[:length]):
                return
            await self.tier.put(block, memory.span(0, length), method=3 if encoded else 0)
        except BaseException:
            self.blocks.pop(block.generation, None)  # it may have been dropped meanwhile
            raise

    async def get(self, generation: int, size: int) -> bytes:
        memory = Scratch(max(4096, padded(size)))
        memory.view[:] = b"\xff" * memory.length_bytes
        length = self.tier.encoded_bytes(generation)
        assert bool(length) == is_encoded(generation) == bool(self.tier.method(generation))
        await self.tier.get(generation, memory.span(0, length or padded(size)), length or size)
        if length:
            memory.view[:length] = flipped(memory.view[:length])
        assert not any(memory.view[size : padded(size)])
        return bytes(memory.view[:size])

    async def check(self, generation: int) -> None:
        size = self.blocks[generation].size
        assert await self.get(generation, size) == content(generation, size)

    def drop(self, generation: int) -> None:
        self.blocks.pop(generation, None)
        self.tier.drop(generation, self.next_stamp())

    def change(self, generation: int, **changes: object) -> BlockMeta:
        changed = replace(self.blocks[generation], stamp=self.next_stamp(), **changes)  # type: ignore[arg-type]
        self.blocks[generation] = changed
        self.tier.note(Put(changed))
        return changed

    def make_directory(self) -> int:
        inode = self.next_number()
        self.directories[inode] = directory(inode, self.next_stamp())
        self.tier.note(MakeDirectory(self.directories[inode]))
        return inode

    def remove_directory(self, inode: int) -> None:
        del self.directories[inode]
        self.tier.note(RemoveDirectory(inode, self.next_stamp()))

    def _check_sharing(self, log: ColdLog) -> None:
        """What sharing saves is what blocks would take besides; nothing is kept for none."""
        index = log.index
        contents = index.contents().tolist()
        data = {each: sum(map(part_data_bytes, index.own_parts(each))) for each in contents}
        users = [index.content(each) for each in self.blocks if each in index]
        assert set(users) == set(contents)
        assert index.saved_bytes == sum(data[each] for each in users) - sum(data.values())
        assert len(index) == len(users)

    def check_accounts(self) -> None:
        """What is counted is what is there."""
        for log in self.tier._logs:
            space = log.space
            assert space.live_bytes == sum(segment.live_bytes for segment in space.segments)
            self._check_sharing(log)
            assert all(segment.live_bytes >= 0 for segment in space.segments)
            assert space.claimed_bytes == 0
            assert all(segment.readers == 0 for segment in space.segments)
            records = sum(log.index.physical_bytes(generation) for generation in self.blocks)
            # Notes are never refused, and what is carried over may be split: a little more than
            # what blocks may fill, out of the reserve. And tables may have grown since.
            slack = (1 + space.table_count + space.table_wanted) * space.geometry.content_bytes
            assert records <= space.live_bytes <= space.capacity_bytes + slack
            assert len(set(space.free)) == len(space.free)
            states = [segment.state for segment in space.segments]
            assert space.table_count == states.count(SegmentState.TABLE)
