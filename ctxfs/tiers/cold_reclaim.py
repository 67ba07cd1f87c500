"""Making segments free: what is live in a victim is carried over, then the victim is erased."""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import trio

from ctxfs.core.meta import (
    Alias,
    BlockMeta,
    DirectoryMeta,
    Drop,
    Entry,
    MakeDirectory,
    Put,
    RemoveDirectory,
)
from ctxfs.device.engine import Engine
from ctxfs.errors import DeviceError, TierFull
from ctxfs.ondisk import record
from ctxfs.ondisk.layout import ALIGN_BYTES
from ctxfs.ondisk.record import Place
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_health import Health
from ctxfs.tiers.cold_index import ColdIndex, Grave
from ctxfs.tiers.cold_names import LeftNames, tangle_requests
from ctxfs.tiers.cold_parts import part_header_bytes, part_position, part_record_bytes
from ctxfs.tiers.cold_requests import DataRequest, carried_request, note_request
from ctxfs.tiers.cold_space import (
    FLOOR_CARRY,
    Segment,
    SegmentState,
    Space,
    choose_victims,
)
from ctxfs.tiers.cold_writer import ColdWriter

_CARRY_BYTES: Final = 16 << 20  # read and written at a time, unless one record is longer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Describe:
    """What the store knows of what is live, now. None: it does not know of it any more.

    `names`: those that blocks have left, on any device.
    """

    block: Callable[[int], BlockMeta | None]
    directory: Callable[[int], DirectoryMeta | None]
    names: LeftNames


class Reclaimer:
    """One round at a time, on one device.

    Nothing in a victim is erased before the new copy of what is needed of it is on the medium, the
    notes that wait of what is not needed are too, and nobody reads from it any more.
    """

    def __init__(
        self,
        engine: Engine,
        health: Health,
        space: Space,
        index: ColdIndex,
        writer: ColdWriter,
        flush: Callable[[], Awaitable[None]],
        describe: Describe,
        salt: int,
    ) -> None:
        self._engine = engine
        self._health = health
        self._space = space
        self._index = index
        self._writer = writer
        self._flush = flush
        self._describe = describe
        self._salt = salt
        self._memory = Scratch(ALIGN_BYTES)
        self._zeros = Scratch(ALIGN_BYTES)
        self.readers_left = trio.lowlevel.ParkingLot()  # of any segment
        self.reclaimed = 0

    def choose(self, *, ahead: bool = False) -> list[Segment]:
        """Victims from which there is something to gain. `ahead`: nobody waits for it."""
        # Carrying splits records, and may need a longer header here and there.
        live_bytes_max = self._space.geometry.content_bytes * 31 // 32
        found = choose_victims(self._space.segments, live_bytes_max)
        opened = self._space.open
        # Ahead of need the open one is let be: what it gives back is taken by the next open one.
        if found or ahead or opened is None or self._writer.writing:
            return found
        # Only what is being written is left: it may be dead for the most part.
        if opened.live_bytes <= min(live_bytes_max, opened.used_bytes // 2):
            self._space.close_open()
            return [opened]
        return []

    async def round(self, victims: Sequence[Segment]) -> None:
        """Free these segments, or all that can be read of them. Raises DeviceError, TierFull.

        Where there is no room for the notes that must come before, one that can do without them is
        freed in their place.
        """
        retiring = list(victims)
        for victim in retiring:
            victim.state = SegmentState.RETIRING
        try:
            for victim in victims:
                if victim.live_bytes:
                    await self._carry(victim)
            if not await self._write_waiting(victims):
                victims = [self._take_harmless(victims)]
                retiring += victims
            await self._flush()
            done = [victim for victim in victims if not victim.unreadable or not victim.live_bytes]
            for victim in done:
                while victim.readers:
                    await self.readers_left.park()
            with trio.CancelScope(shield=True):
                await self._erase(done)
        finally:
            for victim in retiring:
                if victim.state is SegmentState.RETIRING:
                    victim.state = SegmentState.CLOSED

    async def _erase(self, victims: Sequence[Segment]) -> None:
        self._health.check_present()
        try:
            for victim in victims:
                offset = self._space.geometry.segment_offset(victim.index)
                await self._engine.write(offset, [self._zeros.span(0, ALIGN_BYTES)])
            await self._engine.sync()
        except DeviceError as error:
            self._health.note_failure(error)
            raise
        for victim in victims:
            self._index.forget_segment(victim)
            self._space.release(victim.index)
            self.reclaimed += 1

    async def _carry(self, victim: Segment) -> None:
        parts = self._index.live_parts(victim)
        while parts:
            count = _count_within(parts, _CARRY_BYTES)
            await self._carry_parts(victim, parts[:count])
            parts = parts[count:]
        await self._carry_notes(victim)

    async def _write_tangles(self, generations: Collection[int]) -> None:
        """These are about to be on the medium as they are now, under names that others may have
        left; so these others come first. Nothing is awaited once all of them are there."""
        names = self._describe.names
        written: set[tuple[int, int]] = set()  # generation and stamp
        while True:
            groups = names.tangles(filter(None, map(self._describe.block, generations)))
            left = [group for group in groups if not written.issuperset(map(_version, group))]
            if not left:
                return
            for request, _ in tangle_requests(names, left, self._index, FLOOR_CARRY):
                await self._writer.submit([request])
                if request.error is not None:
                    raise request.error
                await self._flush()
            written.update(_version(meta) for group in left for meta in group)

    async def _carry_parts(self, victim: Segment, parts: Sequence[tuple[int, int]]) -> None:
        length = sum(part_record_bytes(part) for _, part in parts)
        if self._memory.length_bytes < length:
            self._memory = Scratch(max(length, _CARRY_BYTES))
        read: list[tuple[list[tuple[int, int]], int]] = []
        for run, start in _runs(parts):
            size = sum(part_record_bytes(part) for _, part in run)
            position = part_position(run[0][1])
            offset = self._space.geometry.segment_offset(victim.index) + position
            try:
                await self._engine.read(offset, self._memory.span(start, size))
            except DeviceError as error:
                self._health.note_trouble(error)
                if self._health.lost:
                    raise
                self._give_up(victim, str(error))
                continue
            read.append((run, start))
        await self._write_tangles([generation for generation, _ in parts])
        requests: list[DataRequest] = []
        for run, start in read:
            requests += self._requests(victim, run, start)
        if not requests:
            return
        await self._writer.submit(requests)
        for request in requests:
            if request.error is not None:
                raise request.error

    def _requests(
        self, victim: Segment, run: Sequence[tuple[int, int]], start: int
    ) -> list[DataRequest]:
        """What to write of the records that were read to `start` of the memory, one by one."""
        requests: list[DataRequest] = []
        for generation, part in run:
            end = start + part_record_bytes(part)
            place = Place(self._salt, victim.sequence, part_position(part))
            found = record.decode(self._memory.view[start:end], place)
            if found is None:
                self._give_up(victim, "a record's header has changed")
            elif part in self._index.own_parts(generation):
                header, entries = found
                unnamed = generation in self._index.sharing.unnamed
                stored = next((e.meta for e in entries if isinstance(e, Put)), None)
                meta = None if unnamed else self._describe.block(generation)
                meta = meta or stored
                data = start + part_header_bytes(part)
                if meta is not None:
                    source = self._memory.span(data, end - data)
                    requests.append(carried_request(meta, source, header, part, unnamed=unnamed))
            start = end
        return requests

    def _give_up(self, victim: Segment, why: str) -> None:
        if not victim.unreadable:
            _logger.warning("segment %d stays as it is: %s", victim.index, why)
        victim.unreadable = True

    async def _carry_notes(self, victim: Segment) -> None:
        named = (victim.notes.get(kind, ()) for kind in (Put, Alias))
        await self._write_tangles({number for numbers in named for number in numbers})
        entries: list[Entry] = []
        for kind, numbers in self._index.live_notes(victim).items():
            for number in numbers:
                entry = self._current_note(kind, number)
                if entry is not None:
                    entries.append(entry)
                elif kind is Alias:
                    self._give_up(victim, "nobody knows the attributes of a block in it")
        if not entries:
            return
        request = note_request(entries, FLOOR_CARRY)
        await self._writer.submit([request])
        if request.error is not None:
            raise request.error

    async def _write_waiting(self, victims: Sequence[Segment]) -> bool:
        """Write what waits of blocks that are named in the victims, where these must not go before
        it; False where there is no room.

        Without its Drop a power cut would bring back what is left of a block elsewhere: an older
        copy, attributes that were replaced, or what a Drop in a victim had killed.
        """
        named = {number for victim in victims for number in _named_in(victim)}
        await self._write_tangles(named & self._index.loose)
        entries: list[Entry] = [Drop(number, grave.stamp) for number, grave in self._unnoted(named)]
        entries += filter(None, [self._current_note(Put, n) for n in named & self._index.loose])
        if not entries:
            return True
        request = note_request(entries, FLOOR_CARRY)
        await self._writer.submit([request])
        if request.error is not None and not isinstance(request.error, TierFull):
            raise request.error
        return request.error is None

    def _unnoted(self, named: Iterable[int]) -> Iterator[tuple[int, Grave]]:
        """What is dead of these, while the medium has no Drop of it."""
        for generation in named:
            grave = self._index.graves.get(generation)
            if grave is not None and not grave.is_noted:
                yield generation, grave

    def _take_harmless(self, victims: Sequence[Segment]) -> Segment:
        """An empty segment that may be erased though notes wait. Raises TierFull.

        Writes failed until no segment was left; only erasing makes room, for a note too. A segment
        in which nothing was acknowledged has never counted. And where all data of a block in older
        segments is gone, what younger ones hold of it is the newest, or not enough to be a block.
        """
        of_round = {victim.index for victim in victims}
        for segment in sorted(self._space.segments, key=attrgetter("kept", "sequence")):
            closed = segment.state is SegmentState.CLOSED or segment.index in of_round
            if closed and not segment.live_bytes and self._is_harmless(segment):
                segment.state = SegmentState.RETIRING
                return segment
        raise TierFull("no room for notes, and no segment can be erased before them")

    def _is_harmless(self, segment: Segment) -> bool:
        if not segment.kept:
            return True
        named = set(_named_in(segment))
        holders = {holder for _, grave in self._unnoted(named) for holder in grave.holders}
        is_oldest = all(self._space.segments[at].sequence >= segment.sequence for at in holders)
        return is_oldest and not named & self._index.loose

    def _current_note(self, kind: type[Entry], number: int) -> Entry | None:
        if kind is Put:
            block = self._describe.block(number)
            errand = self._index.errands.get(number)
            if errand is not None and (block is None or block.stamp < errand.meta.stamp):
                block = errand.meta
            return Put(block) if block is not None else None
        if kind is Alias:
            block = self._describe.block(number)
            return Alias(block, self._index.content(number)) if block is not None else None
        if kind is MakeDirectory:
            directory = self._describe.directory(number)
            if directory is not None:
                return MakeDirectory(directory)
            # Its removal waits to be written, and an older note of it may be elsewhere.
            return RemoveDirectory(number, self._writer.placer.stamp + 1)
        if kind is Drop:
            return Drop(number, self._index.graves[number].stamp)
        return RemoveDirectory(number, self._index.directory_graves[number].stamp)


def _version(meta: BlockMeta) -> tuple[int, int]:
    return meta.generation, meta.stamp


def _named_in(segment: Segment) -> Iterator[int]:
    """The generations of all that was written to it."""
    yield from segment.generations
    yield from segment.notes.get(Put, ())
    yield from segment.notes.get(Alias, ())
    yield from segment.notes.get(Drop, ())


def _count_within(parts: Sequence[tuple[int, int]], length_bytes: int) -> int:
    """How many of the first parts are at most so long together; one at least."""
    total = 0
    for count, (_, part) in enumerate(parts):
        total += part_record_bytes(part)
        if total > length_bytes and count:
            return count
    return len(parts)


def _runs(parts: Sequence[tuple[int, int]]) -> list[tuple[list[tuple[int, int]], int]]:
    """Neighbouring records, to be read at once, and where in memory each such run goes."""
    runs: list[tuple[list[tuple[int, int]], int]] = []
    at = 0
    following = -1
    for pair in parts:
        position = part_position(pair[1])
        if position != following:
            runs.append(([], at))
        runs[-1][0].append(pair)
        following = position + part_record_bytes(pair[1])
        at += part_record_bytes(pair[1])
    return runs
