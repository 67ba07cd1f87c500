"""Devices in memory that record every write and flush, and what a power cut may leave of them.

Moments are ticks of the trace that the devices of one tier share: each submission and each
completion takes one. A cut at moment `at` comes before the event of that number.
"""

import ctypes
import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from ctxfs.device.engine import EngineStatistics, Span
from ctxfs.errors import DeviceError, DeviceLost

SECTOR: Final = 4096
TORN_SECTOR: Final = 512  # what a device with small physical sectors may leave of one of ours
_NEVER: Final = 1 << 62


@dataclass(slots=True, eq=False)
class Write:
    """`units`: which of its sectors reach the device; all, unless it failed."""

    device: int
    offset: int
    data: bytes
    submitted: int
    units: Sequence[int]
    completed: int = _NEVER

    def pieces(self, unit_bytes: int) -> Iterator[tuple[int, int]]:
        """Where in `data` each unit of what reaches the device lies, and how long it is."""
        for sector in self.units:
            for start in range(sector * SECTOR, (sector + 1) * SECTOR, unit_bytes):
                yield start, unit_bytes


@dataclass(slots=True, eq=False)
class Flush:
    """One that returned without an error: what had completed before `submitted` is kept."""

    device: int
    submitted: int
    completed: int


@dataclass(slots=True)
class Trace:
    """All that the devices of one tier were asked to write, from the first moment on."""

    bases: list[bytearray]  # what was on the devices before
    writes: list[Write] = field(default_factory=list)
    flushes: list[Flush] = field(default_factory=list)
    now: int = 0

    def tick(self) -> int:
        self.now += 1
        return self.now - 1

    def flushed_before(self, device: int, at: int) -> int:
        """Writes that had completed before this moment are on the medium at `at`."""
        flushes = (each for each in self.flushes if each.device == device and each.completed < at)
        return max((flush.submitted for flush in flushes), default=-1)


class RecordingEngine:
    """One device. `fail` has the shares of requests that fail: "read", "write", "sync".

    A write that fails leaves any of its sectors: none and all of them too. `lost`: the device is
    gone until the power comes back.
    """

    name = "recording"
    alignment = SECTOR

    def __init__(self, device: int, trace: Trace, dice: random.Random) -> None:
        self._device = device
        self._trace = trace
        self._dice = dice
        self.image = bytearray(trace.bases[device])  # as reads see it
        self.size_bytes = len(self.image)
        self.fail: dict[str, float] = {}
        self.lost = False
        self._counts = dict.fromkeys(("read", "write", "sync", "error", "got", "put"), 0)

    async def read(self, offset: int, target: Span) -> None:
        self._check(offset, target.length)
        await self._take_time("read")
        data = (ctypes.c_char * target.length).from_buffer(self.image, offset)
        ctypes.memmove(target.address, data, target.length)
        self._counts["got"] += target.length

    async def write(self, offset: int, sources: Sequence[Span]) -> None:
        data = _content(sources)
        self._check(offset, len(data))
        if self.lost:
            raise DeviceLost("the device is gone")
        fails = self._fails("write")
        sectors = range(len(data) // SECTOR)
        if fails:
            share = self._dice.choice((0.0, 0.5, 1.0))
            landed = [sector for sector in sectors if self._dice.random() < share]
        units = landed if fails else sectors
        write = Write(self._device, offset, data, self._trace.tick(), units)
        self._trace.writes.append(write)
        try:
            await self._take_time("write", fails=fails)
        finally:
            assert _content(sources) == data, "the memory was touched while it was written"
            for start, length in write.pieces(SECTOR):
                self.image[offset + start : offset + start + length] = data[start : start + length]
            write.completed = self._trace.tick()
            self._counts["put"] += len(data)

    async def sync(self) -> None:
        submitted = self._trace.tick()
        await self._take_time("sync")
        self._trace.flushes.append(Flush(self._device, submitted, self._trace.tick()))

    def statistics(self) -> EngineStatistics:
        counts = self._counts
        return EngineStatistics(
            reads=counts["read"],
            writes=counts["write"],
            syncs=counts["sync"],
            read_bytes=counts["got"],
            written_bytes=counts["put"],
            errors=counts["error"],
            inflight=0,
        )

    def grow(self, size_bytes: int) -> None:
        more = bytes(size_bytes - self.size_bytes)
        self.image += more
        self._trace.bases[self._device] += more
        self.size_bytes = size_bytes

    def close(self) -> None:
        return

    def _fails(self, what: str) -> bool:
        return self._dice.random() < self.fail.get(what, 0.0)

    async def _take_time(self, what: str, *, fails: bool | None = None) -> None:
        """Others go on meanwhile. Raises DeviceError where it fails, DeviceLost."""
        self._counts[what] += 1
        for _ in range(1 if what == "read" else self._dice.randrange(1, 4)):
            await trio.lowlevel.cancel_shielded_checkpoint()
        if self.lost:
            raise DeviceLost("the device is gone")
        if self._fails(what) if fails is None else fails:
            self._counts["error"] += 1
            raise DeviceError(f"this {what} fails as told")

    def _check(self, offset: int, length: int) -> None:
        assert 0 <= offset <= offset + length <= self.size_bytes
        assert (offset | length) % SECTOR == 0, "not aligned"


def _content(sources: Sequence[Span]) -> bytes:
    for span in sources:
        assert (span.address | span.length) % SECTOR == 0, "not aligned"
    return b"".join(ctypes.string_at(span.address, span.length) for span in sources)


class Way(enum.Enum):
    """What became of the writes that were not flushed, those in flight among them."""

    COMPLETED = "those that had returned arrived, and no other"
    SUBMITTED = "all arrived"
    FLUSHED = "none arrived"
    WHOLE = "any arrived, each whole"
    TORN = "any of their sectors arrived"
    ALL_BUT_ONE = "all but one arrived"
    ALL_BUT_SOME_OF_ONE = "all arrived, of one some sectors"


@dataclass(frozen=True, slots=True)
class Cut:
    """The power fails before event `at`. `seed` chooses what arrived, where there is a choice."""

    at: int
    way: Way
    unit_bytes: int = SECTOR
    seed: int = 0


def random_cut(dice: random.Random, last: int, first: int = 0) -> Cut:
    """A cut at any moment from `first` to `last`, of any kind."""
    return Cut(
        at=dice.randint(first, last),
        way=dice.choice(list(Way)),
        unit_bytes=dice.choice((SECTOR, SECTOR, TORN_SECTOR)),
        seed=dice.randrange(2**32),
    )


def images_after(trace: Trace, cut: Cut) -> list[bytearray]:
    """What is on each device when the power comes back."""
    images = [bytearray(base) for base in trace.bases]
    kept_until = [trace.flushed_before(device, cut.at) for device in range(len(images))]
    begun = [write for write in trace.writes if write.submitted < cut.at]
    kept = [write for write in begun if write.completed < kept_until[write.device]]
    pending = [write for write in begun if write.completed >= kept_until[write.device]]
    for write in sorted(kept, key=lambda write: write.completed):
        _apply(images, write, write.pieces(SECTOR))
    dice = random.Random(cut.seed)
    # Of two writes to one place that were in flight at once, either may be the later one.
    order = {
        write: dice.uniform(write.submitted, min(write.completed, cut.at)) for write in pending
    }
    pending.sort(key=order.__getitem__)
    for write, pieces in _what_arrives(pending, cut, dice):
        _apply(images, write, pieces)
    return images


def _apply(images: list[bytearray], write: Write, pieces: Iterator[tuple[int, int]]) -> None:
    image = images[write.device]
    for start, length in pieces:
        at = write.offset + start
        image[at : at + length] = write.data[start : start + length]


def _what_arrives(
    pending: Sequence[Write], cut: Cut, dice: random.Random
) -> Iterator[tuple[Write, Iterator[tuple[int, int]]]]:
    """Of each write that is not flushed, the pieces that reached the medium all the same."""
    share = dice.choice((0.1, 0.5, 0.9))
    one = dice.choice(pending) if pending else None
    for write in pending:
        whole = write.pieces(SECTOR)
        torn = (piece for piece in write.pieces(cut.unit_bytes) if dice.random() < share)
        match cut.way:
            case Way.COMPLETED if write.completed < cut.at:
                yield write, whole
            case Way.SUBMITTED:
                yield write, whole
            case Way.WHOLE if dice.random() < share:
                yield write, whole
            case Way.TORN:
                yield write, torn
            case Way.ALL_BUT_ONE if write is not one:
                yield write, whole
            case Way.ALL_BUT_SOME_OF_ONE:
                yield write, torn if write is one else whole
            case _:
                continue
