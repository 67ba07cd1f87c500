"""One cold device: a log of records in segments, from opening to closing."""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from ctxfs.core.meta import Alias, BlockMeta, Entry, MakeDirectory, Put
from ctxfs.device.engine import Span
from ctxfs.errors import DeviceError, TierFull
from ctxfs.ondisk import ledger, record
from ctxfs.ondisk.facts import Facts
from ctxfs.ondisk.layout import ALIGN_BYTES, padded
from ctxfs.ondisk.record import header_bytes_for
from ctxfs.tiers.cold_aliasing import AliasWriter
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_health import Health
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_leaving import Leaving
from ctxfs.tiers.cold_names import tangle_requests
from ctxfs.tiers.cold_reader import ColdReader
from ctxfs.tiers.cold_reclaim import Describe, Reclaimer
from ctxfs.tiers.cold_recovery import read_device
from ctxfs.tiers.cold_replay import Contents, settle
from ctxfs.tiers.cold_requests import NoteRequest, block_request, check_frame, note_request
from ctxfs.tiers.cold_scan import VERIFY_NONE, ScanCounts
from ctxfs.tiers.cold_space import FLOOR_WRITE, Space
from ctxfs.tiers.cold_tables import TablePolicy, Tables
from ctxfs.tiers.cold_volume import ColdDevice, Volume
from ctxfs.tiers.cold_writer import ColdWriter

# A sequence is the superblock's when the log was opened, then how many segments were begun since:
# no number comes twice, even where a segment that had the highest was erased.
_EPOCH_SHIFT: Final = 32
# In the background, segments are made free ahead of need while little has to be carried for it.
_AHEAD_SHARE: Final = 50  # one in so many
_AHEAD_LIVE_SHARE: Final = 4  # a victim is at most three of so many parts live


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStatistics:
    """One device, in bytes on the medium; counters since start."""

    path: str
    engine: str
    state: str  # "ok", "failing" or "lost"; or a LeavingState
    why: str | None  # a drain stopped
    capacity_bytes: int  # what blocks and notes may fill
    live_bytes: int
    free_bytes: int
    segments: int
    free_segments: int
    blocks: int
    aliases: int  # blocks that are read from records written for another
    saved_bytes: int  # what these would take besides
    put_bytes: int  # content of the blocks that were written
    written_bytes: int
    read_bytes: int
    errors: int
    reclaimed_segments: int
    left_blocks: int | None  # on a device that is being drained; else None
    left_bytes: int | None
    unreadable_blocks: int


class ColdLog:
    """All of one device but for the choice of which block goes where.

    `recover` comes first. Raises DeviceLost for everything once the device is gone.
    """

    def __init__(
        self, device: ColdDevice, volume: Volume, describe: Describe, tables: TablePolicy
    ) -> None:
        self.path = device.path
        self.salt = record.make_salt(volume.current.uuid)
        self.health = Health(device.path)
        self._engine = device.engine
        self._volume = volume
        self._describe = describe
        found = volume.current
        self.space = Space(found.geometry)
        self.index = ColdIndex(self.space)
        self._writer = ColdWriter(self._engine, self.health, self.space, self.index, found.uuid)
        self._reclaimer = Reclaimer(
            self._engine,
            self.health,
            self.space,
            self.index,
            self._writer,
            self._flush,
            describe,
            self.salt,
        )
        self._tables = Tables(
            self._engine, self.health, self.space, self._writer.placer, found.uuid, tables
        )
        self.reader = ColdReader(
            self._engine, self.health, self.space, self.index, self._reclaimer.readers_left
        )
        # Taken in this order.
        self._tending = trio.Lock()
        self._committing = trio.Lock()
        self._reclaiming = trio.Lock()
        self._flushing = trio.Lock()
        self._aliases = AliasWriter(
            self.space, self.index, self._writer, partial(self._make_ready, blocks=True)
        )
        self._put_bytes = 0
        self.leaving: Leaving | None = None
        self.retired = False  # what was here is elsewhere, and nothing is done here any more
        self.pressed = trio.Event()  # few segments are free: `tend` should not wait
        self._flushed_batches = 0
        # Every segment of a lower sequence is on the medium.
        self._good_sequence = 0

    # -- recovery

    async def recover(self) -> tuple[Contents, Facts, ScanCounts]:
        """Learn what is there, and make the device ready to be written.

        Raises DeviceError, and the device counts as lost then: what cannot be marked as open must
        not be written, or the next recovery would trust what it should verify.
        """
        try:
            return await self._recover()
        except DeviceError as error:
            self.health.note_trouble(error)
            self.health.lost = True
            raise

    async def _recover(self) -> tuple[Contents, Facts, ScanCounts]:
        found = self._volume.current
        verify_from = VERIFY_NONE if found.clean else found.good_sequence
        reading = await read_device(self._engine, self.space, found.uuid, verify_from)
        # What was read may still be in a volatile cache: from here on it counts as kept.
        await self._engine.sync()
        # Nobody else has the index yet.
        contents = await trio.to_thread.run_sync(settle, reading.facts, self.index)
        self.see_stamp(reading.facts.highest_stamp)
        epoch = max(found.sequence, reading.counts.highest_sequence >> _EPOCH_SHIFT) + 1
        self._good_sequence = epoch << _EPOCH_SHIFT
        self._writer.start_with(self._good_sequence)
        self._tables.adopt(reading.tables, reading.scanned)
        await self._volume.mark_open(self._good_sequence)
        return contents, reading.facts, reading.counts

    def see_stamp(self, stamp: int) -> None:
        """Entries up to `stamp` are out there, be it elsewhere."""
        self._writer.placer.stamp = max(self._writer.placer.stamp, stamp)

    # -- blocks

    async def put(
        self, meta: BlockMeta, source: Span, *, method: int = 0, unnamed: bool = False
    ) -> None:
        """Write a block that is not here, or what a codec made of it.

        `unnamed`: the block is gone, and what is written is for aliases; the caller holds a claim
        from the next moment on. Raises TierFull, DeviceError, BadValue.

        Whatever happens, `source` is not touched any more once this has returned.
        """
        self.health.check_writable()
        self.see_stamp(meta.stamp)
        frame = check_frame(ledger.encode(Put(meta)), self.space.geometry)
        cost = self.space.cost_bytes(header_bytes_for(len(frame)), source.length)
        if cost > self.space.room_bytes:
            raise TierFull(f"{self.path}: no room for {meta.size} bytes")
        self.space.claimed_bytes += cost
        try:
            await self._make_ready(blocks=True)
            request = await block_request(meta, source, frame, method=method, unnamed=unnamed)
            await self._writer.submit([request])
        finally:
            self.space.claimed_bytes -= cost
        if self._is_pressed():
            self.pressed.set()
        if request.error is not None:
            raise request.error
        self._put_bytes += meta.size

    async def put_alias(self, meta: BlockMeta, content: int) -> None:
        """Write down that a block that is not here has this content, which the caller has claimed.

        Raises TierFull, DeviceError, BadValue, BlockNotFound where it was dropped meanwhile.
        """
        self.health.check_writable()
        self.see_stamp(meta.stamp)
        await self._aliases.put(meta, content)
        self._put_bytes += meta.size

    def drop(self, generation: int, stamp: int) -> None:
        """The block's room is free at once; that it is gone is on the medium after a sync."""
        # Higher than that of any record of it so far, whatever the caller counts.
        stamp = max(stamp, self._writer.placer.stamp + 1)
        if self.index.bury(generation, stamp):
            self.see_stamp(stamp)

    # -- notes

    def note(self, entry: Entry) -> None:
        """Write this with the next commit. Raises BadValue where it is too long."""
        check_frame(ledger.encode(entry), self.space.geometry)
        match entry:
            case Put(meta) | MakeDirectory(meta) | Alias(meta):
                self.see_stamp(meta.stamp)
            case _:
                self.see_stamp(entry.stamp)
        self.index.queue(entry)

    async def bring(self, metas: Sequence[BlockMeta]) -> None:
        """Have these attributes on this medium, wherever the blocks are. Raises DeviceError,
        TierFull."""
        if metas:
            for meta in metas:
                if self.index.add_errand(meta):
                    self._describe.names.bear(meta.generation, self.index)
                self.note(Put(meta))
            await self.sync()

    async def sync(self) -> None:
        """Everything put, noted and dropped before is on the medium. Raises DeviceError, TierFull.

        DeviceLost where something waits that other devices have not taken over.
        """
        leavers = self._describe.names.leavers_in(self.index)
        await self._commit()
        await self._flush()
        self._describe.names.settle(leavers)

    async def sync_recovered(self) -> None:
        """What recovery has dropped is gone for good. Raises DeviceError, TierFull.

        Nothing is reclaimed for it: the store cannot be asked yet what it knows.
        """
        await self._commit(reclaim=False)
        await self._flush()

    async def _commit(self, *, reclaim: bool = True) -> None:
        """Write the notes that wait."""
        async with self._committing:
            entries = self.index.take_pending()
            if not entries or self.retired:
                return
            left = self._requests(entries)
            cost = sum(_note_cost(request) for request, _ in left)
            self.space.claimed_bytes += cost
            try:
                self.health.check_present()
                if reclaim:
                    await self._make_ready(blocks=False)
                elif self.space.ready_bytes(FLOOR_WRITE) < 0:
                    raise TierFull(f"{self.path}: no room for notes without reclaiming")
                await self._write_notes(left)
            finally:
                self.space.claimed_bytes -= cost
                self.index.put_back(entry for request, _ in left for entry in request.entries)

    def _requests(self, entries: Sequence[Entry]) -> deque[tuple[NoteRequest, bool]]:
        """What to write of these, and whether a flush must come before what follows."""
        names = self._describe.names
        groups = names.tangles(entry.meta for entry in entries if isinstance(entry, Put))
        tangled = {meta.generation for group in groups for meta in group}
        plain = [each for each in entries if not _is_put_of(each, tangled)]
        requests = deque([(note_request(plain), False)] if plain else [])
        requests.extend(tangle_requests(names, groups, self.index))
        return requests

    async def _write_notes(self, left: deque[tuple[NoteRequest, bool]]) -> None:
        """Write these, and take them away where they are written. Raises DeviceError, TierFull."""
        while left:
            request, flush = left[0]
            await self._writer.submit([request])
            if request.error is not None:
                raise request.error
            left.popleft()
            if flush:
                await self._flush()

    async def _flush(self) -> None:
        """What is written is on the medium; whoever comes meanwhile shares the next flush."""
        wanted = self._writer.batches
        async with self._flushing:
            if self._flushed_batches >= wanted or self.retired:
                return
            self.health.check_present()
            covered = self._writer.batches
            settled = self._writer.settled_sequence
            try:
                await self._engine.sync()
            except DeviceError as error:
                self.health.note_failure(error)
                raise
            self._flushed_batches = covered
            self._good_sequence = settled

    # -- room

    async def _make_ready(self, *, blocks: bool) -> None:
        """Reclaim until all that is claimed can be written. Raises TierFull, DeviceError."""

        def is_ready() -> bool:
            floor = self.space.block_floor if blocks else FLOOR_WRITE
            return self.space.ready_bytes(floor) >= 0

        # Each round gains something; a bound, since what is gained may be taken by longer headers.
        for _ in range(2 * len(self.space.segments)):
            if is_ready():
                return
            async with self._reclaiming:
                if is_ready():
                    return
                victims = self._reclaimer.choose()
                if victims:
                    await self._reclaimer.round(victims)
                elif self._writer.writing:
                    await self._writer.batch_ended.park()
                else:
                    break
        raise TierFull(f"{self.path}: nothing can be reclaimed")

    def _is_pressed(self) -> bool:
        ahead = len(self.space.segments) // _AHEAD_SHARE + 1
        return len(self.space.free) < self.space.block_floor + ahead

    async def tend(self) -> None:
        """What is done in the background, from time to time. Raises DeviceError, TierFull."""
        async with self._tending:
            if not self.retired:
                await self._tend()

    async def _tend(self) -> None:
        self.pressed = trio.Event()
        self.health.check_writable()
        await self.sync()
        # The fewer segments have to be verified after a crash the better, and tables speak only of
        # those that no start will verify.
        if self._good_sequence > self._volume.current.good_sequence:
            good = self._good_sequence
            await self._cut_broken(good)
            await self._volume.write(good_sequence=good, clean=False)
        await self._tables.tend(self._volume.current.good_sequence)
        live_bytes_max = self.space.geometry.content_bytes * 3 // _AHEAD_LIVE_SHARE
        while self._is_pressed():
            async with self._reclaiming:
                victims = self._reclaimer.choose(ahead=True)
                if not victims or victims[0].live_bytes > live_bytes_max:
                    return
                await self._reclaimer.round(victims)

    @property
    def written_bytes(self) -> int:
        """All that was written to the device since start."""
        return self._engine.statistics().written_bytes

    def statistics(self) -> ColdStatistics:
        engine = self._engine.statistics()
        lost, leaving = self.health.lost, self.leaving
        live_bytes = 0 if lost or self.retired else self.space.live_bytes
        # What takes no new blocks has no more room than what is on it.
        capacity_bytes = live_bytes
        if leaving is None:
            # Tables that came after blocks take of what was room for them: what is there, is there.
            capacity_bytes = max(self.space.capacity_bytes, live_bytes)
        left_bytes = self.space.live_bytes if len(self.index) else 0
        return ColdStatistics(
            path=self.path,
            engine=self._engine.name,
            state=self.health.state if lost or leaving is None else leaving.state,
            why=leaving.why if leaving is not None else None,
            capacity_bytes=0 if lost else capacity_bytes,
            live_bytes=live_bytes,
            free_bytes=0 if lost or leaving is not None else self.space.room_bytes,
            segments=len(self.space.segments),
            free_segments=len(self.space.free),
            blocks=len(self.index),
            aliases=len(self.index.sharing),
            saved_bytes=0 if lost or self.retired else self.index.saved_bytes,
            put_bytes=self._put_bytes,
            written_bytes=engine.written_bytes,
            read_bytes=engine.read_bytes,
            errors=self.health.errors,
            reclaimed_segments=self._reclaimer.reclaimed,
            left_blocks=len(self.index) if leaving is not None else None,
            left_bytes=left_bytes if leaving is not None else None,
            unreadable_blocks=len(leaving.unreadable) if leaving is not None else 0,
        )

    # -- growing, and going

    async def grow(self, size_bytes: int) -> bool:
        """Use more of the device, whose engine reaches that far; False where not one more segment
        fits. Raises DeviceError, and nothing has changed then.
        """
        larger = self.space.geometry.grown(size_bytes)
        if larger is None:
            return False
        self.health.check_present()
        try:
            await self._volume.resize(larger)
        except DeviceError as error:
            self.health.note_failure(error)
            raise
        self.space.grow(larger)
        return True

    async def retire(self, new_uuid: bytes) -> None:
        """Forget all that is here, for good, and end. No block is here, and none may come.

        Raises DeviceError; the log goes on then.
        """
        async with self._tending, self._committing, self._reclaiming, self._flushing:
            while self._writer.writing:
                await self._writer.batch_ended.park()
            while any(segment.readers for segment in self.space.segments):
                await self._reclaimer.readers_left.park()
            self.health.check_present()
            with trio.CancelScope(shield=True):
                try:
                    await self._volume.renew(new_uuid)
                except DeviceError as error:
                    self.health.note_failure(error)
                    raise
            self.retired = True
            self.pressed.set()

    async def close(self) -> None:
        """Final commit, and the superblock says so. Raises DeviceError."""
        await self.sync()
        if not self._writer.writing:
            self.space.close_open()  # so that it is summarised, too
        await self._cut_broken(self._writer.placer.next_sequence)
        await self._volume.write(good_sequence=self._writer.placer.next_sequence, clean=False)
        await self._tables.tend(self._volume.current.good_sequence)
        await self._volume.write(good_sequence=self._writer.placer.next_sequence, clean=True)

    async def _cut_broken(self, good_sequence: int) -> None:
        """Where a write failed, whatever of it arrived must not be found. Raises DeviceError.

        A segment that counts as good is believed: a record with a good header, and not its data,
        would be taken for the newest copy of what was being carried over.
        """
        broken = self._writer.broken
        cut = [sequence for sequence in broken if sequence < good_sequence]
        if not cut:
            return
        zeros = Scratch(ALIGN_BYTES)
        async with self._reclaiming:  # so that it is not erased and used again meanwhile
            try:
                for sequence in cut:
                    segment, position = broken[sequence]
                    if self.space.segments[segment.index] is segment:
                        offset = self.space.geometry.segment_offset(segment.index) + position
                        await self._engine.write(offset, [zeros.span(0, ALIGN_BYTES)])
                await self._engine.sync()
            except DeviceError as error:
                self.health.note_failure(error)
                raise
        for sequence in cut:
            del broken[sequence]


def _note_cost(request: NoteRequest) -> int:
    """The most that its records can take, with the ends of segments that they leave unused."""
    length = padded(sum(map(len, request.frames)))
    return (3 if request.whole else 2) * length + 4 * ALIGN_BYTES


def _is_put_of(entry: Entry, generations: Container[int]) -> bool:
    return isinstance(entry, Put) and entry.meta.generation in generations
