"""The cold tier: blocks on one or more devices, each a log of its own."""

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import trio

from ctxfs.core.columns import U64, BlockColumns
from ctxfs.core.contentindex import ContentIndex
from ctxfs.core.meta import (
    BlockMeta,
    DirectoryMeta,
    Drop,
    Entry,
    MakeDirectory,
    Put,
    RemoveDirectory,
)
from ctxfs.device.engine import Span
from ctxfs.device.mapping import zero
from ctxfs.errors import (
    BlockNotFound,
    CtxfsError,
    DeviceError,
    DeviceLost,
    HoldsBlocks,
    NoSuchDevice,
    TierFull,
)
from ctxfs.ondisk.facts import block_columns
from ctxfs.ondisk.layout import padded
from ctxfs.tiers.cold_buffers import slice_span
from ctxfs.tiers.cold_doubles import drop_doubles, drop_superseded
from ctxfs.tiers.cold_elsewhere import Elsewhere
from ctxfs.tiers.cold_errands import gone_meta
from ctxfs.tiers.cold_leaving import Leaving, LeavingState
from ctxfs.tiers.cold_log import ColdLog, ColdStatistics
from ctxfs.tiers.cold_names import LeftNames
from ctxfs.tiers.cold_reclaim import Describe
from ctxfs.tiers.cold_replay import Contents
from ctxfs.tiers.cold_tables import TablePolicy
from ctxfs.tiers.cold_twins import Twin, load_contents
from ctxfs.tiers.cold_volume import ColdDevice, open_volume

__all__ = ["ColdDevice", "ColdStatistics", "ColdTier", "Recovered", "TablePolicy"]

COMMIT_SECONDS: Final = 1.0
# More numbers and stamps than a device may have that the others have never heard of.
_SKIPPED: Final = 1 << 32

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What recovery found on all devices together."""

    columns: BlockColumns  # with the newest attributes
    directories: list[DirectoryMeta]
    dropped: list[int]  # generations of which only pieces were left, or whose key has a newer one
    highest_number: int  # of any generation or inode seen, dead ones too
    highest_stamp: int
    records: int
    torn: int  # records cut off: they were being written when the device was left
    corrupt: int  # records, or segments, that should be good and are not

    @cached_property
    def blocks(self) -> dict[int, BlockMeta]:
        """The same as objects, by generation."""
        metas = map(self.columns.meta, range(len(self.columns)))
        return {meta.generation: meta for meta in metas}


@dataclass(slots=True)
class _Putting:
    """A put on its way, and what was said about its block meanwhile."""

    done: trio.Event
    newest: BlockMeta
    dropped_stamp: int | None = None


class ColdTier:
    """Blocks by generation. A block lies on one device; directories are noted on all.

    Open, then `recover`, then anything; `run` in the background.
    """

    def __init__(self, logs: Sequence[ColdLog], describe: Describe, tables: TablePolicy) -> None:
        self._logs = list(logs)
        self._tables = tables
        self._describe = describe
        self._names = describe.names
        self._missing = False  # a device is not here since the start
        self._owed: dict[int, int] = {}  # see `_hand_over`
        self._putting: dict[int, _Putting] = {}
        self._drained: dict[str, ColdStatistics] = {}  # by path: devices that went, as they were
        self._drained_written_bytes = 0
        self._tending: trio.Nursery | None = None
        self._contents = ContentIndex(os.urandom, self._are_gone)

    def _are_gone(self, contents: U64) -> npt.NDArray[np.bool]:
        return ~np.isin(contents, np.concatenate([log.index.contents() for log in self._logs]))

    @classmethod
    async def open(
        cls,
        devices: Sequence[ColdDevice],
        *,
        describe: Callable[[int], BlockMeta | None],
        describe_directory: Callable[[int], DirectoryMeta | None],
        tables: TablePolicy | None = None,
    ) -> Self:
        """Take the devices, formatting those that are blank. `describe`: what the store knows of a
        live generation, or inode, now; asked when records are carried over.

        Raises ConfigError, ForeignSignature among them, and DeviceError.
        """
        asked = Describe(describe, describe_directory, LeftNames(describe))
        policy = tables or TablePolicy()
        logs = [ColdLog(each, await open_volume(each), asked, policy) for each in devices]
        return cls(logs, asked, policy)

    async def recover(self, *, missing: bool = False) -> Recovered:
        """Find what is on the devices. One that cannot be recovered is left out, as lost.

        `missing`: others are not even configured, and may be back.
        """
        found: list[tuple[ColdLog, Contents]] = []
        directories: dict[int, DirectoryMeta] = {}
        dropped: list[int] = []
        number = stamp = records = torn = corrupt = 0
        elsewhere = Elsewhere()
        for log in self._logs:
            try:
                contents, facts, counts = await log.recover()
            except DeviceError as error:
                _logger.error("%s is left out: %s", log.path, error)
                missing = True
                continue
            number = max(number, facts.highest_number)
            stamp = max(stamp, facts.highest_stamp)
            records += counts.records
            torn += counts.torn
            corrupt += counts.corrupt + counts.unreadable
            dropped += contents.incomplete
            found.append((log, contents))
            elsewhere.add(log.index, facts, contents.metas)
            for directory in contents.directories.values():
                known = directories.get(directory.inode)
                if known is None or known.stamp < directory.stamp:
                    directories[directory.inode] = directory
        metas = drop_doubles([(contents.metas, log.drop) for log, contents in found])
        metas = elsewhere.settle(metas, directories, self.note, self.drop, hold=missing)
        winners, losers = drop_superseded(metas, self.drop)
        columns = await trio.to_thread.run_sync(block_columns, winners)
        await trio.to_thread.run_sync(
            load_contents, self._contents, [(log.index, contents.metas) for log, contents in found]
        )
        live = set(columns.generation[np.isin(columns.generation, dropped)].tolist())
        self._missing = missing
        if missing:  # when it is back, none of its blocks may be taken for one made meanwhile
            number += _SKIPPED
            stamp += _SKIPPED
        for log in self._logs:
            log.see_stamp(stamp)
            # What was found holds from now on: at its successor's end a loser must not come back.
            with contextlib.suppress(DeviceError, TierFull):
                await log.sync_recovered()
        return Recovered(
            columns=columns,
            directories=list(directories.values()),
            dropped=[generation for generation in dropped if generation not in live] + losers,
            highest_number=number,
            highest_stamp=stamp,
            records=records,
            torn=torn,
            corrupt=corrupt,
        )

    # -- blocks

    async def put(
        self, meta: BlockMeta, data: Span, *, method: int = 0, to_share: bool = True
    ) -> None:
        """Write a block; it is kept for sure after the next `sync`.

        `data` is `meta.size` rounded up to 4096, mapped, with zeros behind the end; with a
        `method` it is what a codec made of the block (ctxfs.codec), padded to a multiple of 4096,
        and says itself how long it is. Without `to_share` no `twin` finds it: one that does is
        there already.

        Cancelled before the write began: nothing was put. Begun: it is finished first, and the
        memory is free when this has returned. Failed: a crash before the next `sync` may leave it
        there, for what failed may have arrived. Raises TierFull at once where there is no room,
        DeviceError, and BadValue where key and attributes are longer than a record takes.
        """
        if data.length != padded(data.length if method else meta.size):
            raise ValueError(f"{data.length} bytes of memory for a block of {meta.size}")
        generation = meta.generation
        while generation in self._putting:
            await self._putting[generation].done.wait()
        if self.holds(generation):
            self.note(Put(meta))
            return
        await self._put(meta, data, method, to_share=to_share)

    async def _put(
        self, meta: BlockMeta, data: Span, method: int, *, to_share: bool = True
    ) -> ColdLog:
        """Write a block that nobody else is putting; what is said of it meanwhile comes after."""
        with self._being_put(meta) as landed:
            log = self._choose(meta)
            await log.bring(self._names.needed_before(meta))
            await log.put(meta, data, method=method)
            if to_share:
                self._contents.put(meta.digest, meta.size, meta.generation)
            landed(log)
        return log

    @contextlib.contextmanager
    def _being_put(self, meta: BlockMeta) -> Iterator[Callable[[ColdLog], None]]:
        """Gives what is to be called when the block is on a device."""
        generation = meta.generation
        putting = self._putting[generation] = _Putting(trio.Event(), meta)

        def landed(log: ColdLog) -> None:
            if putting.dropped_stamp is not None:
                log.drop(generation, putting.dropped_stamp)
            elif putting.newest is not meta:
                log.note(Put(putting.newest))
                self._names.say(generation)

        try:
            yield landed
        finally:
            del self._putting[generation]
            putting.done.set()

    def twin(self, meta: BlockMeta) -> Twin | None:
        """What is stored of a content with this digest and size, on a device that takes blocks.

        A digest is no proof: whoever wants to `put_alias` compares the content first. None where
        there is none, or the block itself is here or on its way.
        """
        generation = meta.generation
        if generation in self._putting or self.holds(generation):
            return None
        content = self._contents.find(meta.digest, meta.size)
        if content is None:
            return None
        for log in self._logs:
            if log.leaving is None and log.health.is_writable and log.index.own_parts(content):
                return Twin(content, log)
        return None

    async def put_alias(self, meta: BlockMeta, twin: Twin) -> None:
        """Put a block that has the content of another one, while that is held: a note is all that
        is written. It is kept for sure after the next `sync`. Raises as `put`.
        """
        while meta.generation in self._putting:
            await self._putting[meta.generation].done.wait()
        if self.holds(meta.generation):
            self.note(Put(meta))
            return
        with self._being_put(meta) as landed:
            await twin.log.bring(self._names.needed_before(meta))
            await twin.log.put_alias(meta, twin.content)
            landed(twin.log)

    def _choose(self, meta: BlockMeta) -> ColdLog:
        """The device with the most room. Raises DeviceError, TierFull."""
        usable: list[ColdLog] = []
        trouble: DeviceError | None = None
        for log in self._logs:
            if log.leaving is not None:
                continue
            try:
                log.health.check_writable()
            except DeviceError as error:
                trouble = error
            else:
                usable.append(log)
        if usable:
            return max(usable, key=lambda log: log.space.room_bytes)
        raise trouble or TierFull(f"no cold device for {meta.size} bytes")

    def written_as(self, generation: int) -> int:
        """The generation that what is stored of a block was made for: another one, if shared."""
        log = self._home(generation)
        return log.index.content(generation) if log is not None else generation

    def encoded_bytes(self, generation: int) -> int:
        """How long what a codec made of the block is, padded; 0 where its content is stored."""
        log = self._home(generation)
        return log.index.encoded_bytes(generation) if log is not None else 0

    def method(self, generation: int) -> int:
        """How a codec made what is stored; 0: the content itself, or the block is not here."""
        log = self._home(generation)
        return log.index.method(generation) if log is not None else 0

    async def get(self, generation: int, target: Span, length: int) -> None:
        """Read the content, or what a codec made of it (`encoded_bytes`), straight into `target`.

        `length` is its own; `target` is mapped up to the next 4096, and gets zeros behind the end.
        The caller verifies `meta.digest`. Raises BlockNotFound, DeviceError, DeviceLost.
        """
        log = self._home(generation)
        if log is None:
            raise BlockNotFound(f"generation {generation} is not in the cold tier")
        await log.reader.read(generation, target)
        # No checksum tells of those on the medium, and whoever maps the file would see them.
        zero(slice_span(target, length, target.length - length))

    def _home(self, generation: int) -> ColdLog | None:
        for log in self._logs:
            if generation in log.index:
                return log
        return None

    def _homes(self, generation: int) -> list[ColdLog]:
        """All that hold it: two, for as long as it moves from one to the other."""
        return [log for log in self._logs if generation in log.index]

    def holds(self, generation: int) -> bool:
        """Whether it was put, and not dropped; its device may be failing or lost."""
        return self._home(generation) is not None

    def physical_bytes(self, generation: int) -> int:
        """What it takes on the medium; 0 where it is not here."""
        for log in self._logs:
            if found := log.index.physical_bytes(generation):
                return found
        return 0

    def drop(self, generation: int, stamp: int) -> None:
        """Its room is free at once; nothing happens where it is not here."""
        putting = self._putting.get(generation)
        if putting is not None:
            putting.dropped_stamp = stamp
        self._names.forget(generation)
        for log in self._homes(generation):
            log.drop(generation, stamp)

    def leaves_name(self, generation: int, name: bytes) -> None:
        """A block has, or is about to have, another name than this; said before that is noted.

        So that a power cut never finds this name taken by another block, and this block gone.
        """
        if generation in self._putting or self.holds(generation):
            self._names.leave(generation, name)

    def note(self, entry: Entry) -> None:
        """Keep a change: new attributes of a block that is here, a directory, its removal.

        Written with the next commit. Raises BadValue where it is longer than a record takes.
        """
        match entry:
            case Drop(generation, stamp):
                self.drop(generation, stamp)
            case Put(meta):
                putting = self._putting.get(meta.generation)
                if putting is not None:
                    putting.newest = meta
                for log in self._homes(meta.generation):
                    log.note(entry)
            case _:
                for log in self._logs:
                    if isinstance(entry, RemoveDirectory) and self._may_return:
                        log.index.hold_removal(entry.inode)
                    log.note(entry)

    async def sync(self, generation: int | None = None) -> None:
        """All that was put, noted and dropped before is on the medium; callers share a flush.

        With a generation only its device counts. What is said of blocks on a device that is lost is
        kept on the others. Raises DeviceError, TierFull; DeviceLost where no other can keep it, or
        where something that a lost device had taken was never flushed.
        """
        self._hand_over()
        if generation is not None:
            for log in list(self._logs):
                if generation in log.index or generation in log.index.errands:
                    await log.sync()
            return
        errors = await self._sync(self._logs)
        if errors:
            raise errors[0]

    @property
    def _may_return(self) -> bool:
        """Whether there are devices that are to learn later what is said now."""
        return self._missing or any(log.health.lost for log in self._logs)

    def _hand_over(self) -> None:
        """What waits to be noted on a lost device is noted on all others, until it is back."""
        others = [log for log in self._logs if not log.health.lost]
        if not others:
            return
        for log in self._logs:
            if log.health.lost and log.index.pending:
                for entry in log.index.take_pending():
                    self._note_elsewhere(entry, others)
        for generation, stamp in list(self._owed.items()):
            if not any(generation in log.index for log in others):
                del self._owed[generation]
                self._note_elsewhere(Put(gone_meta(generation, stamp)), others)

    def _note_elsewhere(self, entry: Entry, others: Sequence[ColdLog]) -> None:
        match entry:
            case Drop(generation, stamp):
                # One that lives on another device is newer there: that waits until it is gone.
                self._owed[generation] = stamp
            case Put(meta):
                for log in others:
                    log.index.add_errand(meta, held=True)
                    log.note(entry)
            case RemoveDirectory(inode):
                for log in others:
                    log.index.hold_removal(inode)
                    log.note(entry)

    async def _sync(self, logs: Sequence[ColdLog]) -> list[CtxfsError]:
        """Flush them all; returns why some could not."""
        errors: list[CtxfsError] = []

        async def sync(log: ColdLog) -> None:
            try:
                await log.sync()
            except (DeviceError, TierFull) as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for log in logs:
                nursery.start_soon(sync, log)
        return errors

    # -- devices come and go

    def log_at(self, path: str) -> ColdLog:
        """The log of a device. Raises NoSuchDevice."""
        found = next((log for log in self._logs if log.path == path), None)
        if found is None:
            raise NoSuchDevice(f"{path} is no device of the cold tier")
        return found

    async def add_device(
        self, device: ColdDevice, directories: Callable[[], Iterable[DirectoryMeta]]
    ) -> None:
        """Take one more device, formatting one that is blank. `directories`: all there are now.

        One on which there are live blocks is refused: only at a start are they laid beside those
        of the others. What else an earlier life left on it is forgotten. Raises ConfigError,
        ForeignSignature and HoldsBlocks among them, and DeviceError.
        """
        log = ColdLog(device, await open_volume(device), self._describe, self._tables)
        await log.recover()
        if len(log.index):
            await log.close()
            raise HoldsBlocks(f"{device.path} holds {len(log.index)} blocks of a cold tier")
        if len(log.space.free) < len(log.space.segments):
            await log.retire(uuid.uuid4().bytes)
            log = ColdLog(device, await open_volume(device), self._describe, self._tables)
            await log.recover()
        self._drained.pop(log.path, None)
        self._logs.append(log)
        for directory in directories():
            log.note(MakeDirectory(directory))
        if self._tending is not None:
            self._tending.start_soon(self._tend, log)
        await log.sync()

    def begin_drain(self, path: str) -> ColdLog:
        """No new blocks go to this device. Raises NoSuchDevice, DeviceLost, TierFull."""
        log = self.log_at(path)
        log.health.check_present()
        if not any(each.leaving is None for each in self._logs if each is not log):
            raise TierFull(f"{path} is the only cold device that takes blocks: add another first")
        log.leaving = Leaving()
        return log

    def end_drain(self, path: str) -> None:
        """Blocks may go to this device again. Raises NoSuchDevice."""
        self.log_at(path).leaving = None

    def could_take(self, length_bytes: int) -> bool:
        """Whether any device that takes blocks is so large, however full it is."""
        logs = [log for log in self._logs if log.health.is_writable and log.leaving is None]
        return any(log.space.capacity_bytes >= length_bytes for log in logs)

    async def wait_put(self) -> None:
        """Return when no put is on its way that was at the time of the call."""
        for putting in list(self._putting.values()):
            await putting.done.wait()

    def describe(self, generation: int) -> BlockMeta | None:
        """What the store knows of a block now."""
        return self._describe.block(generation)

    async def copy_away(
        self, source: ColdLog, stored: BlockMeta, data: Span, method: int
    ) -> tuple[ColdLog, bool] | None:
        """Put what `source` holds of a content on another device too, as it is stored.

        `stored`: the attributes that were found with it. Returns the other device, and whether it
        was written there now; None where the content went meanwhile. Raises TierFull, DeviceError.
        """
        generation = stored.generation
        while generation in self._putting:
            await self._putting[generation].done.wait()
        if not source.index.own_parts(generation):
            return None
        if generation in source.index and not source.index.is_alias_of(generation, generation):
            return await self._put(self.describe(generation) or stored, data, method), True
        for log in self._logs:  # it is here for other blocks only
            if log is not source and log.leaving is None and log.index.own_parts(generation):
                return log, False
        log = self._choose(stored)
        await log.put(stored, data, method=method, unnamed=True)
        return log, True

    async def copy_alias_away(
        self, source: ColdLog, meta: BlockMeta, content: int, target: ColdLog
    ) -> bool:
        """Have an alias on the device that its content, which is claimed, was copied to; False
        where it went meanwhile. Raises TierFull, DeviceError."""
        generation = meta.generation
        while generation in self._putting:
            await self._putting[generation].done.wait()
        if not source.index.is_alias_of(generation, content):
            return False
        with self._being_put(meta) as landed:
            await target.bring(self._names.needed_before(self.describe(generation) or meta))
            try:
                await target.put_alias(self.describe(generation) or meta, content)
            except BlockNotFound:
                return False
            landed(target)
        return True

    async def retire(self, log: ColdLog) -> None:
        """Let go of a device on which no block lives: it is empty to whoever opens it next.

        Its directories are kept on the others first: that they were noted there as well may not
        have outlived a crash. Raises DeviceError, TierFull, and the device stays then.
        """
        others = [each for each in self._logs if each is not log]
        for inode in log.index.directories:
            directory = self._describe.directory(inode)
            if directory is not None:
                for other in others:
                    other.note(MakeDirectory(directory))
        for entry in log.index.held_entries():
            self._note_elsewhere(entry, [each for each in others if not each.health.lost])
        errors = await self._sync(others)
        if len(errors) == len(others):
            raise errors[0]
        await log.retire(uuid.uuid4().bytes)
        assert log.leaving is not None
        log.leaving.state = LeavingState.DRAINED
        self._logs.remove(log)
        self._drained[log.path] = log.statistics()
        self._drained_written_bytes += log.written_bytes

    async def grow_device(self, path: str, size_bytes: int) -> bool:
        """Use more of a device, whose engine reaches that far; False where that is too little for
        one more segment. Raises NoSuchDevice, DeviceError."""
        return await self.log_at(path).grow(size_bytes)

    # -- as a whole

    @property
    def room_bytes(self) -> int:
        """What could still be put now, on all devices that take blocks."""
        logs = [log for log in self._logs if log.health.state == "ok" and log.leaving is None]
        return sum(log.space.room_bytes for log in logs)

    @property
    def takes_blocks(self) -> bool:
        """Whether any device would be written to now."""
        return any(log.health.is_writable and log.leaving is None for log in self._logs)

    @property
    def written_bytes(self) -> int:
        """All that was written to devices since start: blocks, notes, what was carried over."""
        return self._drained_written_bytes + sum(log.written_bytes for log in self._logs)

    @property
    def has_pending_notes(self) -> bool:
        """Whether something noted or dropped still waits for a commit."""
        return any(log.index.pending for log in self._logs if not log.health.lost)

    def statistics(self) -> tuple[ColdStatistics, ...]:
        """Per device; those that were drained come last."""
        return (*(log.statistics() for log in self._logs), *self._drained.values())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit what waits, and reclaim ahead of need, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._tending = nursery
            for log in self._logs:
                nursery.start_soon(self._tend, log)
            task_status.started()
            await trio.sleep_forever()

    async def _tend(self, log: ColdLog) -> None:
        while not log.health.lost and not log.retired:
            with trio.move_on_after(COMMIT_SECONDS):
                await log.pressed.wait()
            # What failed was counted and logged where it happened, and is tried again.
            self._hand_over()
            with contextlib.suppress(DeviceError, TierFull):
                await log.tend()

    async def close(self) -> None:
        """Final commit. A device that fails now is recovered with more care next time."""
        for log in self._logs:
            try:
                await log.close()
            except DeviceLost:
                continue  # was said when it was lost
            except (DeviceError, TierFull) as error:
                _logger.error("%s is not closed cleanly: %s", log.path, error)
