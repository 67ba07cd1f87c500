"""A cold file full of small blocks, written through the tier itself, without a mount."""

import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
import xxhash

from ctxfs.core.meta import BlockMeta
from ctxfs.device.blockfile import open_engine
from ctxfs.ondisk import segment, superblock
from ctxfs.ondisk.layout import ALIGN_BYTES, SEGMENTS_OFFSET
from ctxfs.tiers.cold import ColdDevice, ColdTier
from ctxfs.tiers.cold_buffers import Scratch

_PAGES: Final = (1, 2, 3, 4)  # lengths of blocks in turn, 4 KiB each
_WRITERS: Final = 64
_CREATED_NS: Final = 1_790_000_000 * 10**9
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the tier alone found, and how long that took."""

    blocks: int
    seconds: float


def image_bytes(blocks: int) -> int:
    """Of a file that they fill to about four fifths."""
    each = ALIGN_BYTES * (1 + sum(_PAGES) / len(_PAGES))
    return max(64 * _MIB, int(1.25 * blocks * each) // _MIB * _MIB)


def make(path: Path, blocks: int) -> None:
    """A cold file of `image_bytes`, cleanly closed."""
    trio.run(_make, path, blocks)


def recover(path: Path) -> Recovery:
    """Open it as the daemon does, and close it again."""
    return trio.run(_recover, path)


async def _make(path: Path, blocks: int) -> None:
    memory = Scratch(max(_PAGES) * ALIGN_BYTES)
    memory.view[:] = os.urandom(memory.length_bytes)
    metas = _metas(blocks, memory.view)
    async with _opened(path, image_bytes(blocks)) as tier, trio.open_nursery() as nursery:
        await tier.recover()
        await nursery.start(tier.run)

        async def write() -> None:
            for meta in metas:
                await tier.put(meta, memory.span(0, meta.size))

        async with trio.open_nursery() as writers:
            for _ in range(_WRITERS):
                writers.start_soon(write)
        nursery.cancel_scope.cancel()


def _metas(blocks: int, content: memoryview) -> Iterator[BlockMeta]:
    sizes = [pages * ALIGN_BYTES for pages in _PAGES]
    digests = [xxhash.xxh3_128_digest(content[:size]) for size in sizes]
    for number in range(1, blocks + 1):
        kind = number % len(sizes)
        made = _CREATED_NS + number * 1000
        yield BlockMeta(
            generation=number,
            stamp=number,
            key=hashlib.sha256(b"%d" % number).hexdigest().encode(),
            size=sizes[kind],
            digest=digests[kind],
            mode=0o644,
            uid=os.getuid(),
            gid=os.getgid(),
            created_ns=made,
            mtime_ns=made,
            atime_ns=made,
        )


async def _recover(path: Path) -> Recovery:
    async with _opened(path, None) as tier:
        began = time.perf_counter()
        found = await tier.recover()
        return Recovery(len(found.columns), time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _opened(path: Path, size: int | None) -> AsyncIterator[ColdTier]:
    """The tier on this file, closed in the end. It is asked for nothing that is live."""
    device = await open_engine(path, size)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(device.run)
            tier = await ColdTier.open(
                [ColdDevice(str(path), device.engine)],
                describe=lambda generation: None,
                describe_directory=lambda inode: None,
            )
            yield tier
            await tier.close()
            nursery.cancel_scope.cancel()
    finally:
        device.close()


def forget_tables(path: Path) -> int:
    """Make the file one that never had a summary or a checkpoint; how many segments held them."""
    forgotten = 0
    with path.open("r+b") as file:
        found = superblock.newest(file.read(SEGMENTS_OFFSET))
        if found is None:
            raise ValueError(f"{path} is no cold file")
        for index in range(found.geometry.segment_count):
            file.seek(found.geometry.segment_offset(index))
            if file.read(len(segment.TABLE_MAGIC)) == segment.TABLE_MAGIC:
                file.seek(found.geometry.segment_offset(index))
                file.write(bytes(ALIGN_BYTES))
                forgotten += 1
        os.fsync(file.fileno())
    return forgotten
