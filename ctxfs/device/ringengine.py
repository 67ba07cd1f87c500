"""The engine on io_uring: many requests of many tasks through one ring.

Tasks leave their requests in a queue; one task of the engine moves them into the ring, as many as
it holds, and submits all of one turn of the loop together; another is woken by the kernel's
eventfd and hands out results. Both are started by `run`.
"""

import errno
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio

from ctxfs.device.engine import EngineStatistics, Span
from ctxfs.device.requests import (
    Counters,
    Target,
    check_present,
    check_request,
    failure,
    nothing_moved,
)
from ctxfs.device.uring import FSYNC_DATASYNC, OP_FSYNC, OP_READ, OP_WRITE, Ring
from ctxfs.errors import DeviceError

PART_BYTES = 1 << 20  # larger requests are cut, so that a device works on the parts side by side
RETRIES_MAX = 64  # of one part, when the kernel says EAGAIN or EINTR
RESUBMIT_SECONDS = 0.01  # until the next try when the kernel had no memory for a submission

_VERBS = {OP_READ: "read", OP_WRITE: "write"}


@dataclass(slots=True, eq=False)
class _Transfer:
    """What one caller waits for: a number of parts."""

    unsent: deque["_Part"] = field(default_factory=deque)
    inflight: int = 0  # parts whose memory the kernel may be using
    error: DeviceError | None = None  # the first one
    ended: bool = False  # failed or given up: what is unsent is dropped, what is short stays so
    settled: trio.Event = field(default_factory=trio.Event)

    # Invariant: settled is set exactly when unsent is empty and inflight is 0.

    def end(self, error: DeviceError | None = None) -> None:
        """Send nothing more. The caller goes on once the kernel has let go of its memory."""
        self.ended = True
        self.error = self.error or error
        self.unsent.clear()
        self.settle()

    def settle(self) -> None:
        if not self.unsent and not self.inflight:
            self.settled.set()


@dataclass(slots=True, eq=False)
class _Part:
    """One request as the kernel sees it; `length` is 0 for a flush."""

    transfer: _Transfer
    opcode: int
    offset: int = 0
    address: int = 0
    length: int = 0
    retries: int = 0

    @property
    def what(self) -> str:
        verb = _VERBS.get(self.opcode)
        return f"{verb} of {self.length} bytes at {self.offset}" if verb else "flush"


def _cut(transfer: _Transfer, opcode: int, offset: int, spans: Iterable[Span]) -> None:
    """Fill `transfer` with parts that cover `spans`, laid end to end from `offset`."""
    for span in spans:
        for start in range(0, span.length, PART_BYTES):
            length = min(PART_BYTES, span.length - start)
            part = _Part(transfer, opcode, offset + start, span.address + start, length)
            transfer.unsent.append(part)
        offset += span.length


class UringEngine:
    """Direct I/O on one open descriptor. Satisfies `Engine`.

    Requests are answered while `run` is running. It belongs into a nursery that outlives every
    user of the engine: once it is cancelled, what is not yet in the ring fails. The descriptor
    stays its owner's.
    """

    name = "io_uring"

    def __init__(self, target: Target, ring: Ring) -> None:
        """Takes over `ring`."""
        self.size_bytes = target.size_bytes
        self.alignment = target.alignment
        self.strays = 0  # completions that belong to no request in flight
        self._target = target
        self._ring = ring
        self._counters = Counters()
        self._waiting: deque[_Transfer] = deque()  # those with unsent parts; one part a turn
        # By number, in the order in which they went into the ring. Numbers are never used twice.
        self._inflight: dict[int, _Part] = {}
        self._numbers = 0
        self._asked = trio.Event()
        self._refusal: str | None = "its run() has not started"

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry requests until cancelled; returns when the kernel holds nobody's memory."""
        self._refusal = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_submission)
                nursery.start_soon(self._run_completion)
                task_status.started()
        finally:
            self._refuse("its run() has ended")
            with trio.CancelScope(shield=True):
                while self._inflight:
                    await self._complete_some()

    async def read(self, offset: int, target: Span) -> None:
        total = check_request(self._target, offset, [target])
        await self._perform(OP_READ, offset, [target])
        self._counters.reads += 1
        self._counters.read_bytes += total

    async def write(self, offset: int, sources: Sequence[Span]) -> None:
        total = check_request(self._target, offset, sources)
        await self._perform(OP_WRITE, offset, sources)
        self._counters.writes += 1
        self._counters.written_bytes += total

    async def sync(self) -> None:
        await self._perform(OP_FSYNC, 0, [])
        self._counters.syncs += 1

    def statistics(self) -> EngineStatistics:
        return self._counters.frozen(len(self._inflight))

    def close(self) -> None:
        """Give the ring back; only after `run` has ended. Safe to call twice."""
        if self._inflight:
            raise RuntimeError("the kernel still holds memory of requests in flight")
        self._refuse("it is closed")
        self._ring.close()

    async def _perform(self, opcode: int, offset: int, spans: Sequence[Span]) -> None:
        if self._refusal:
            raise self._refused()
        transfer = _Transfer()
        if opcode == OP_FSYNC:
            transfer.unsent.append(_Part(transfer, opcode))
        else:
            _cut(transfer, opcode, offset, spans)
        self._waiting.append(transfer)
        self._asked.set()
        transfer.settle()  # at once where there are no bytes to move
        try:
            await transfer.settled.wait()
        except BaseException:
            # The kernel may be writing to the caller's memory: it stays until that is over.
            transfer.end()
            with trio.CancelScope(shield=True):
                await transfer.settled.wait()
            raise
        if transfer.error:
            self._counters.errors += 1
            raise transfer.error

    async def _run_submission(self) -> None:
        while True:
            # Whoever is scheduled in this turn of the loop leaves its request before we come back.
            await self._asked.wait()
            self._asked = trio.Event()
            self._fill()
            left = self._submit()
            while left:
                await trio.sleep(RESUBMIT_SECONDS)
                left = self._submit()

    async def _run_completion(self) -> None:
        while True:
            await self._complete_some()
            if self._waiting:
                self._asked.set()

    def _fill(self) -> None:
        """Move waiting parts into the ring: one of each transfer in turn, so that none starves."""
        while self._waiting and len(self._inflight) < self._ring.entries:
            transfer = self._waiting.popleft()
            if not transfer.unsent:
                continue
            part = transfer.unsent.popleft()
            if transfer.unsent:
                self._waiting.append(transfer)
            self._numbers += 1
            self._inflight[self._numbers] = part
            transfer.inflight += 1
            self._ring.put(
                part.opcode,
                self._numbers,
                fd=self._target.fd,
                offset=part.offset,
                address=part.address,
                length=part.length,
                flags=FSYNC_DATASYNC if part.opcode == OP_FSYNC else 0,
            )

    def _submit(self) -> int:
        """How many entries the kernel has not taken, for want of memory."""
        try:
            return self._ring.submit()
        except OSError as error:
            # Nothing that is tried again would fare better.
            self._refuse(f"io_uring refused them: {error.strerror}")
            return 0

    def _refuse(self, why: str) -> None:
        """Take no more requests, and fail those that the kernel has not got."""
        if self._refusal:
            return
        self._refusal = why
        for _ in range(self._ring.unsubmitted()):
            _, part = self._inflight.popitem()  # the last ones put
            part.transfer.inflight -= 1
            part.transfer.end(self._refused())
        while self._waiting:
            self._waiting.popleft().end(self._refused())

    def _refused(self) -> DeviceError:
        name = self._target.name
        return DeviceError(f"{name}: the engine takes no requests: {self._refusal}")

    async def _complete_some(self) -> None:
        await trio.lowlevel.wait_readable(self._ring.eventfd)
        self._ring.clear_eventfd()
        for number, result in self._ring.reap():
            part = self._inflight.pop(number, None)
            if part is None:
                self.strays += 1
                continue
            part.transfer.inflight -= 1
            self._take(part, result)
            part.transfer.settle()

    def _take(self, part: _Part, result: int) -> None:
        """Account for one completed part: it is whole, or goes on, or ends its transfer."""
        transfer = part.transfer
        if result < 0 and -result in (errno.EAGAIN, errno.EINTR) and part.retries < RETRIES_MAX:
            part.retries += 1
        elif result < 0:
            transfer.end(failure(self._target, part.what, -result))
        elif result > part.length:
            transfer.end(failure(self._target, part.what, errno.EPROTO))
        elif result == part.length:
            self._check_flushed(part)
            return
        else:
            # Only whole units count: the rest has to be aligned as well.
            moved = result - result % self.alignment
            if not moved:
                transfer.end(nothing_moved(self._target, part.what))
            part.offset += moved
            part.address += moved
            part.length -= moved
        if self._refusal:
            transfer.end(self._refused())
        elif not transfer.ended:
            if not transfer.unsent:
                self._waiting.append(transfer)
            transfer.unsent.append(part)

    def _check_flushed(self, part: _Part) -> None:
        if part.opcode == OP_FSYNC:
            try:
                check_present(self._target)
            except DeviceError as error:
                part.transfer.end(error)
