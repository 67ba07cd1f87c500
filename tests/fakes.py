"""A device in memory, of the same shape as the real engines, that fails and crashes as told."""

import ctypes
import random
from collections.abc import Callable, Sequence

import trio

from ctxfs.device.engine import EngineStatistics, Span
from ctxfs.errors import DeviceError, DeviceLost

SECTOR = 4096


class MemoryEngine:
    """What is written is volatile until `sync`; `crash` keeps any part of it, cut at sectors.

    `seed` decides how tasks interleave and what a crash keeps. `fail_read`, `fail_write` and
    `fail_sync` are asked with the offset (0 for a sync) whether this request fails; a write that
    fails may leave some of its sectors.
    """

    name = "memory"
    alignment = SECTOR

    def __init__(self, size_bytes: int, *, seed: int = 0, medium: bytearray | None = None) -> None:
        self.size_bytes = size_bytes
        self.medium = bytearray(size_bytes) if medium is None else medium
        self.random = random.Random(seed)
        self.fail_read: Callable[[int], bool] = lambda offset: False
        self.fail_write: Callable[[int], bool] = lambda offset: False
        self.fail_sync: Callable[[int], bool] = lambda offset: False
        self.requests_left: int | None = None  # writes and syncs; then the power fails
        self.gate: trio.Event | None = None  # requests wait for it
        self.lost = False
        self.max_inflight = 0
        self._before: dict[int, bytes] = {}  # sectors as they are for sure, of those written since
        self._reads = self._writes = self._syncs = self._errors = self._inflight = 0
        self._read_bytes = self._written_bytes = 0

    async def read(self, offset: int, target: Span) -> None:
        self._check(offset, [target])
        await self._start()
        self._reads += 1
        try:
            self._raise_if(self.fail_read(offset), "read", offset)
            data = (ctypes.c_char * target.length).from_buffer(self.medium, offset)
            ctypes.memmove(target.address, data, target.length)
            self._read_bytes += target.length
        finally:
            self._inflight -= 1

    async def write(self, offset: int, sources: Sequence[Span]) -> None:
        self._check(offset, sources)
        await self._start()
        self._writes += 1
        try:
            fails = self.fail_write(offset)
            self._use_power()
            self._store(offset, sources, partly=fails)
            self._raise_if(fails, "write", offset)
        finally:
            self._inflight -= 1

    async def sync(self) -> None:
        # What is written while the flush runs is not promised by it.
        promised = set(self._before)
        await self._start()
        self._syncs += 1
        try:
            self._use_power()
            self._raise_if(self.fail_sync(0), "sync", 0)
            for sector in promised:
                self._before.pop(sector, None)
        finally:
            self._inflight -= 1

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            reads=self._reads,
            writes=self._writes,
            syncs=self._syncs,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            errors=self._errors,
            inflight=self._inflight,
        )

    def grow(self, size_bytes: int) -> None:
        self.medium.extend(bytes(size_bytes - len(self.medium)))
        self.size_bytes = size_bytes

    def close(self) -> None:
        return

    def crash(self) -> "MemoryEngine":
        """The device after the power came back: of unsynced sectors, any have arrived."""
        lost_share = self.random.choice((0.1, 0.5, 0.9, 1.0))
        for sector, before in self._before.items():
            if self.random.random() < lost_share:
                self.medium[sector * SECTOR : (sector + 1) * SECTOR] = before
        seed = self.random.randrange(2**32)
        return MemoryEngine(self.size_bytes, seed=seed, medium=self.medium)

    def reopen(self) -> "MemoryEngine":
        """The same device, after a daemon that ended while the power stayed on."""
        seed = self.random.randrange(2**32)
        return MemoryEngine(self.size_bytes, seed=seed, medium=self.medium)

    def copy(self) -> "MemoryEngine":
        """Another device with the same bytes, that does not fail."""
        return MemoryEngine(self.size_bytes, seed=1, medium=bytearray(self.medium))

    async def _start(self) -> None:
        self._inflight += 1
        self.max_inflight = max(self.max_inflight, self._inflight)
        try:
            for _ in range(self.random.randrange(1, 4)):
                await trio.lowlevel.cancel_shielded_checkpoint()
            if self.gate is not None:
                with trio.CancelScope(shield=True):
                    await self.gate.wait()
        except BaseException:
            self._inflight -= 1
            raise

    def _use_power(self) -> None:
        if self.requests_left is not None:
            self.requests_left -= 1
            self.lost = self.lost or self.requests_left < 0
        if self.lost:
            raise DeviceLost("the power is off")

    def _store(self, offset: int, sources: Sequence[Span], *, partly: bool) -> None:
        data = b"".join(ctypes.string_at(span.address, span.length) for span in sources)
        kept_share = self.random.choice((0.0, 0.5, 1.0)) if partly else 1.0
        for start in range(0, len(data), SECTOR):
            if self.random.random() >= kept_share:
                continue
            at = offset + start
            self._before.setdefault(at // SECTOR, bytes(self.medium[at : at + SECTOR]))
            self.medium[at : at + SECTOR] = data[start : start + SECTOR]
        self._written_bytes += len(data)

    def _check(self, offset: int, spans: Sequence[Span]) -> None:
        length = sum(span.length for span in spans)
        assert offset >= 0
        assert offset + length <= self.size_bytes
        for number in (offset, *(n for span in spans for n in (span.address, span.length))):
            assert number % SECTOR == 0, "not aligned"

    def _raise_if(self, fails: bool, what: str, offset: int) -> None:
        if self.lost:
            raise DeviceLost("the device is gone")
        if fails:
            self._errors += 1
            raise DeviceError(f"{what} at {offset} failed as told")
