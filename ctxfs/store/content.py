"""The bytes of blocks that are open: reading, writing, and what the kernel writes by itself."""

from __future__ import annotations

import os

from ctxfs.core.block import Block
from ctxfs.errors import NotPermitted, TierFull
from ctxfs.store.catalog import Catalog
from ctxfs.store.handle import Handle
from ctxfs.store.lending import Lending
from ctxfs.store.mover import Mover
from ctxfs.store.sealing import Sealing
from ctxfs.tiers.hot import HotFile

SPARE_BYTES = 4 << 20


class Content:
    """Reads and changes hot files. Errors as those of `Store`."""

    def __init__(
        self,
        catalog: Catalog,
        mover: Mover,
        lending: Lending,
        sealing: Sealing,
        *,
        block_bytes_max: int,
    ) -> None:
        self._catalog = catalog
        self._mover = mover
        self._lending = lending
        self._sealing = sealing
        self._hot = catalog.hot
        self.block_bytes_max = block_bytes_max

    def refresh(self, block: Block) -> None:
        """Bring size, time and physical bytes up to date, where the kernel writes by itself.

        A block that grew too large that way is not published nor sealed, unless it is shortened.
        """
        if block.writing is None or not self._lending.look(block):
            return
        if block.size > self.block_bytes_max and block.writing.refused_at is None:
            block.writing.refused_at = self.block_bytes_max

    def read(self, handle: Handle, offset: int, length: int) -> bytes | memoryview:
        """Return up to `length` bytes; a view of the hot file where it cannot change."""
        self._catalog.counters.read_bytes += length
        if handle.block.writing is not None or handle.file.has_holes():
            return os.pread(handle.file.fd, length, offset)
        end = min(offset + length, handle.file.size)
        if offset >= end:
            return b""
        return handle.file.mapping().view[offset:end]

    async def write(self, handle: Handle, offset: int, data: bytes | memoryview) -> int:
        """Write all of `data`. Raises TierFull, NotPermitted.

        A block that lacks bytes which were refused is not published nor sealed: not every program
        looks at what it is told.
        """
        try:
            done = await self._write_in_room(handle, offset, data)
        except TierFull:
            writing = handle.block.writing
            if writing is not None and (writing.refused_at is None or offset < writing.refused_at):
                writing.refused_at = offset
                self._catalog.record_transient(handle.block)
            raise
        writing = handle.block.writing
        refused_at = writing.refused_at if writing is not None else None
        if writing and refused_at is not None and offset <= refused_at < offset + done:
            writing.refused_at = None  # tried again, with success
            self._catalog.record_transient(handle.block)
        return done

    async def _write_in_room(self, handle: Handle, offset: int, data: bytes | memoryview) -> int:
        block, file = handle.block, handle.file
        self.refresh(block)
        if offset + len(data) > self.block_bytes_max:
            raise TierFull(f"a block has at most {self.block_bytes_max} bytes")
        need = self._hot.growth_ceiling(file, offset, len(data))
        await self._mover.reserve(need, file)
        try:
            try:
                done = await self._write(block, file, offset, data)
            except TierFull:
                # Large pages took more than was reserved; the kernel's limit spoke first.
                await self._mover.reserve(SPARE_BYTES, file)
                self._hot.unreserve(SPARE_BYTES)
                done = await self._write(block, file, offset, data)
        finally:
            self._hot.unreserve(need)
            self._grown(block, file)
        handle.wrote = True
        self._catalog.counters.written_bytes += done
        return done

    async def _write(
        self, block: Block, file: HotFile, offset: int, data: bytes | memoryview
    ) -> int:
        await self._sealing.thawed(block)  # fsync reads from a mapping, which writing takes away
        writing = block.writing
        if writing is None:
            raise NotPermitted("the block is sealed")
        done = self._hot.write(file, offset, data)
        writing.epoch += 1
        writing.changed = True
        return done

    def _grown(self, block: Block, file: HotFile) -> None:
        block.size = file.size
        if block.is_hot:
            block.hot_bytes = file.physical_bytes
        self._lending.changed_by_us(block)
        now = self._catalog.clock()
        block.mtime_ns = block.ctime_ns = now.wall_ns
        if block.writing is not None:
            block.writing.time_given = False

    async def truncate(self, block: Block, size: int, handle: Handle | None = None) -> None:
        """Set the size of a generation that is being written. Raises NotPermitted, TierFull."""
        if size > self.block_bytes_max:
            raise TierFull(f"a block has at most {self.block_bytes_max} bytes")
        await self._sealing.thawed(block)
        writing = block.writing
        if writing is None:
            raise NotPermitted("the block is sealed")
        file = handle.file if handle is not None else self._hot.acquire(block.generation)
        try:
            self.refresh(block)
            if size != file.size:
                self._hot.truncate(file, size)
                self._mover.moves.lease_ended()
                writing.epoch += 1
                writing.changed = True
            if writing.refused_at is not None and size <= writing.refused_at:
                writing.refused_at = None
                self._catalog.record_transient(block)
            self._grown(block, file)
        finally:
            if handle is None:
                self._mover.moves.release_file(file)
        if handle is not None:
            handle.wrote = True
