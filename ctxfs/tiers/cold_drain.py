"""Emptying a cold device while it is used: every block goes to the others, as it is stored.

A block is read with its record headers, held against its checksums, written elsewhere, read again
there, flushed, and only then dropped here. So a crash finds it in one place or in both, and where
it is in both, recovery keeps one (docs/ondisk.md, "What counts").
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import trio

from ctxfs.core.meta import BlockMeta, Put
from ctxfs.errors import BlockNotFound, CopyCorrupt, DeviceError, DeviceLost, TierFull
from ctxfs.ondisk import record
from ctxfs.ondisk.layout import ALIGN_BYTES
from ctxfs.ondisk.record import Place
from ctxfs.tiers.cold import ColdTier
from ctxfs.tiers.cold_buffers import Scratch, checksum, is_whole
from ctxfs.tiers.cold_leaving import Leaving, LeavingState
from ctxfs.tiers.cold_log import ColdLog
from ctxfs.tiers.cold_parts import (
    part_header_bytes,
    part_method,
    part_position,
    part_record_bytes,
)

BATCH_BYTES: Final = 32 << 20  # on their way at once, unless one block is longer
BATCH_BLOCKS: Final = 64
PUT_TRIES: Final = 4  # a device that failed thrice in a row is left alone, and another chosen

_logger = logging.getLogger(__name__)

# Evict blocks that take so many bytes from the cold tier, whichever device they are on; False
# where none may go.
MakeRoom = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A block as its device holds it, without the headers of its records."""

    meta: BlockMeta  # as it was written down with it
    memory: Scratch
    length_bytes: int
    method: int
    data_checksum: int


class Drain:
    """One device on its way out. How far it is stands in the log's `leaving`."""

    def __init__(self, tier: ColdTier, source: ColdLog, make_room: MakeRoom) -> None:
        assert source.leaving is not None
        self._tier = tier
        self._source = source
        self._make_room = make_room
        self.leaving: Leaving = source.leaving
        self._aliases: dict[int, list[int]] = {}  # by content, when this round began

    async def run(self) -> None:
        """Until the device is empty and let go, or it cannot go on; `leaving` says which."""
        leaving, source = self.leaving, self._source
        try:
            await self._tier.wait_put()
            while self._todo():
                self._aliases = source.index.sharing.by_content()
                for segment in range(len(source.space.segments)):
                    await self._empty(segment)
            if leaving.unreadable:
                why = f"{len(leaving.unreadable)} of its blocks cannot be read"
                leaving.stop(LeavingState.UNREADABLE, why)
            else:
                await self._tier.retire(source)
        except DeviceError as error:
            leaving.stop(LeavingState.FAILED, str(error))
        except TierFull as error:
            leaving.stop(LeavingState.NEEDS_ROOM, str(error))
        if leaving.state is LeavingState.DRAINED:
            _logger.info("%s is drained, and not used any more", source.path)
        else:
            _logger.error("%s is not drained: %d blocks are left: %s",
                          source.path, len(source.index), leaving.why)  # fmt: skip

    def _todo(self) -> int:
        """How many blocks are still to be moved."""
        leaving = self.leaving
        leaving.unreadable = {each for each in leaving.unreadable if each in self._source.index}
        return len(self._source.index) - len(leaving.unreadable)

    async def _empty(self, segment: int) -> None:
        """Move the blocks that lie, or begin, in one segment."""
        live = self._source.index.live_parts(self._source.space.segments[segment])
        generations = dict.fromkeys(generation for generation, _ in live)
        for batch in self._batches(list(generations)):
            await self._move(batch)

    def _blocks(self, content: int) -> list[int]:
        """The blocks that are read from the records of one, itself first, if it is one still."""
        index = self._source.index
        found = [
            each for each in self._aliases.get(content, ()) if index.is_alias_of(each, content)
        ]
        is_named = content in index and not index.is_alias_of(content, content)
        return [content, *found] if is_named else found

    def _batches(self, contents: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        length = 0
        for generation in contents:
            if self.leaving.unreadable.issuperset(self._blocks(generation)):
                continue
            more = sum(map(part_record_bytes, self._source.index.own_parts(generation)))
            if batch and (length + more > BATCH_BYTES or len(batch) == BATCH_BLOCKS):
                yield batch
                batch, length = [], 0
            batch.append(generation)
            length += more
        if batch:
            yield batch

    async def _move(self, batch: list[int]) -> None:
        """Copy a batch, flush the copies, and drop what is here."""
        copied: dict[int, ColdLog] = {}  # by block
        errors: list[DeviceError | TierFull] = []

        async def copy(content: int) -> None:
            try:
                await self._copy(content, copied)
            except (DeviceError, TierFull) as error:
                errors.append(error)

        try:
            async with trio.open_nursery() as nursery:
                for content in batch:
                    nursery.start_soon(copy, content)
            for target in set(copied.values()):
                await target.sync()
        except BaseException:
            for generation, target in copied.items():
                target.drop(generation, 0)  # the one here stays
            raise
        for generation, target in copied.items():
            if generation in target.index and generation in self._source.index:
                self.leaving.moved_blocks += 1
                self.leaving.moved_bytes += self._source.index.physical_bytes(generation)
                self._source.drop(generation, 0)
        if errors:
            raise errors[0]

    async def _copy(self, content: int, copied: dict[int, ColdLog]) -> None:
        """Have a content, and all blocks that are read from it, on another device as well: those
        are added to `copied`."""
        try:
            stored = await self._read(content)
        except DeviceLost:
            raise
        except DeviceError as error:
            lost = self._blocks(content)
            self.leaving.unreadable.update(lost)
            for generation in lost:
                _logger.error("%s: %s cannot be read, and stays: %s",
                              self._source.path, self._name(generation), error)  # fmt: skip
            return
        except BlockNotFound:
            return
        put = await self._put(stored)
        if put is None or not put[0].index.claim(content):
            return
        target, is_written = put
        try:
            if is_written:
                await self._compare(stored, target)
            blocks = self._blocks(content)
            if content in blocks:
                copied[content] = target
            for generation in blocks:
                if generation != content or content not in copied:
                    await self._copy_alias(generation, content, target, copied)
        finally:
            target.index.disclaim(content)

    async def _copy_alias(
        self, generation: int, content: int, target: ColdLog, copied: dict[int, ColdLog]
    ) -> None:
        """Have an alias where its content is now. Raises DeviceError, TierFull."""
        meta = self._tier.describe(generation)
        if meta is None:
            if self._source.index.is_alias_of(generation, content):
                self.leaving.unreadable.add(generation)
                _logger.error("%s: nobody knows the attributes of generation %d, which stays",
                              self._source.path, generation)  # fmt: skip
            return
        if await self._tier.copy_alias_away(self._source, meta, content, target):
            copied[generation] = target

    def _name(self, generation: int) -> str:
        meta = self._tier.describe(generation)
        return repr(meta.key) if meta is not None else f"generation {generation}"

    async def _put(self, stored: _Stored) -> tuple[ColdLog, bool] | None:
        """As `copy_away`. Raises TierFull where nothing may go for it, DeviceError where no device
        takes it."""
        data = stored.memory.span(0, stored.length_bytes)
        failures = 0
        while True:
            try:
                return await self._tier.copy_away(self._source, stored.meta, data, stored.method)
            except TierFull as error:
                need_bytes = stored.length_bytes + 2 * ALIGN_BYTES
                if not self._tier.could_take(need_bytes):
                    raise TierFull(
                        f"no other cold device can ever take a block of {stored.meta.size} bytes"
                    ) from error
                if not self._make_room(need_bytes):
                    raise TierFull(
                        "the other cold devices are full, and what is there may not go"
                    ) from error
            except DeviceError:
                failures += 1
                if failures == PUT_TRIES:
                    raise

    async def _compare(self, stored: _Stored, target: ColdLog) -> None:
        """Read the copy, which is claimed. Raises DeviceError."""
        generation = stored.meta.generation
        back = Scratch(stored.memory.length_bytes)
        span = back.span(0, stored.length_bytes)
        try:
            await target.reader.read_content(generation, span)
            if await checksum(span) != stored.data_checksum:
                raise CopyCorrupt(f"{target.path}: a block is not what was written")
        except BaseException:
            target.drop(generation, 0)  # the one here stays
            raise

    async def _read(self, generation: int) -> _Stored:
        """Raises BlockNotFound, DeviceError: CopyCorrupt where a checksum does not match."""
        source = self._source
        parts = source.index.own_parts(generation)
        if not parts:
            raise BlockNotFound(f"generation {generation} is not here")
        method = part_method(parts[0])
        memory = Scratch(sum(part_record_bytes(part) for part in parts))
        end = 0
        meta: BlockMeta | None = None
        with source.reader.held(parts) as segments:
            for part, segment in zip(parts, segments, strict=True):
                length = part_record_bytes(part)
                await source.reader.read_record(part, memory.span(end, length))
                place = Place(source.salt, segment.sequence, part_position(part))
                found = record.decode(memory.view[end : end + length], place)
                if found is None:
                    raise CopyCorrupt("a record's header has changed")
                header, entries = found
                start = part_header_bytes(part)
                data = memory.span(end + start, length - start)
                if not await is_whole(data, header):
                    raise CopyCorrupt("a record does not match its checksum")
                for entry in entries:
                    if isinstance(entry, Put) and (meta is None or meta.stamp < entry.meta.stamp):
                        meta = entry.meta
                # The data closes up to that of the part before.
                memory.view[end : end + length - start] = memory.view[end + start : end + length]
                end += length - start
        if meta is None:
            raise CopyCorrupt("its records do not say what they are")
        whole = await checksum(memory.span(0, end))
        return _Stored(meta, memory, end, method, whole)
