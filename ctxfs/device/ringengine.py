"""The engine on io_uring: many requests of many tasks through one ring.

Tasks leave their requests in a queue; one task of the engine moves them into the ring, as many as
it holds, and submits all of one turn of the loop together; another is woken by the kernel's
eventfd and hands out results. Both are started by `run`. What a request looks like, and what its
result means, is the dialect's: files and block devices speak one, NVMe drives another.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import trio

from ctxfs.device.dialects import Dialect, Plain, TryAgain
from ctxfs.device.engine import EngineStatistics, Span
from ctxfs.device.requests import Counters, Target, check_request
from ctxfs.device.transfers import Part, Transfer, Verb, cut
from ctxfs.device.uring import Ring
from ctxfs.errors import DeviceError

FLYING_BYTES = 4 << 20  # from which on more in flight at once makes no device faster
TURN_BYTES = 4 << 20  # of one transfer, before others get their turn
SHORT_BYTES = 64 << 10  # a transfer of so much is not to wait for longer ones
RESUBMIT_SECONDS = 0.01  # until the next try when the kernel had no memory for a submission


class UringEngine:
    """Direct I/O on one open descriptor. Satisfies `Engine`.

    Requests are answered while `run` is running. It belongs into a nursery that outlives every
    user of the engine: once it is cancelled, what is not yet in the ring fails. The descriptor
    stays its owner's.
    """

    def __init__(self, target: Target, ring: Ring, dialect: Dialect | None = None) -> None:
        """Takes over `ring`. Without a dialect: that of files and block devices."""
        self.dialect: Dialect = dialect or Plain(target)
        self.name = self.dialect.name
        self.size_bytes = target.size_bytes
        self.alignment = target.alignment
        self.strays = 0  # completions that belong to no request in flight
        self._target = target
        self._ring = ring
        self._counters = Counters()
        self._waiting: deque[Transfer] = deque()  # those with unsent parts; one part a turn
        # By number, in the order in which they went into the ring. Numbers are never used twice.
        self._inflight: dict[int, Part] = {}
        self._resting: set[Part] = set()  # those that are sent again after a while
        self._flying_bytes = 0  # of the parts in flight
        self._numbers = 0
        self._asked = trio.Event()
        self._refusal: str | None = "its run() has not started"

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry requests until cancelled; returns when the kernel holds nobody's memory."""
        self._refusal = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
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
        await self._perform("read", offset, [target])
        self._counters.reads += 1
        self._counters.read_bytes += total

    async def write(self, offset: int, sources: Sequence[Span]) -> None:
        total = check_request(self._target, offset, sources)
        await self._perform("write", offset, sources)
        self._counters.writes += 1
        self._counters.written_bytes += total

    async def sync(self) -> None:
        await self._perform("flush", 0, [])
        self._counters.syncs += 1

    def statistics(self) -> EngineStatistics:
        return self._counters.frozen(len(self._inflight))

    def grow(self, size_bytes: int) -> None:
        """The device is larger than it was: requests may go up to there from now on."""
        self._target = replace(self._target, size_bytes=size_bytes)
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Give the ring back; only after `run` has ended. Safe to call twice."""
        if self._inflight:
            raise RuntimeError("the kernel still holds memory of requests in flight")
        self._refuse("it is closed")
        self._ring.close()

    async def _perform(self, verb: Verb, offset: int, spans: Sequence[Span]) -> None:
        if self._refusal:
            raise self._refused()
        transfer = Transfer()
        if verb == "flush":
            transfer.unsent.append(Part(transfer, verb))
        else:
            cut(transfer, verb, offset, spans, self.dialect.part_bytes)
        if transfer.unsent and transfer.unsent[0].length <= SHORT_BYTES:
            self._waiting.appendleft(transfer)
        else:
            self._waiting.append(transfer)
        at_once = len(transfer.unsent) > 1  # it is long: what may yet come along gains nothing
        if at_once:
            self._fill()
        if not at_once or self._submit() or self._waiting:
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
            if self._waiting:  # the device has room now, and is not to wait for a turn of the loop
                self._fill()
                if self._submit():
                    self._asked.set()

    def _fill(self) -> None:
        """Move waiting parts into the ring: some of each transfer in turn, so that none starves.

        What is sent at once ends at once, and the device would wait for all who then do something
        about it. So no more is sent than keeps it busy, and one transfer ends before the next.
        """
        while self._waiting and self._has_room():
            transfer = self._waiting.popleft()
            turn_bytes = 0
            while transfer.unsent and turn_bytes < TURN_BYTES and self._has_room():
                turn_bytes += self._put(transfer)
            if transfer.unsent and turn_bytes < TURN_BYTES:
                self._waiting.appendleft(transfer)
            elif transfer.unsent:
                self._waiting.append(transfer)

    def _has_room(self) -> bool:
        return self._flying_bytes < FLYING_BYTES and len(self._inflight) < self._ring.entries

    def _put(self, transfer: Transfer) -> int:
        """Put the next part of a transfer into the ring; returns its length."""
        part = transfer.unsent.popleft()
        self._numbers += 1
        self._inflight[self._numbers] = part
        transfer.inflight += 1
        part.sent_bytes = part.length
        self._flying_bytes += part.length
        self.dialect.put(self._ring, self._numbers, part)
        return part.length

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
            self._flying_bytes -= part.sent_bytes
            part.transfer.inflight -= 1
            part.transfer.end(self._refused())
        while self._waiting:
            self._waiting.popleft().end(self._refused())
        while self._resting:
            self._resting.pop().transfer.end(self._refused())

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
            self._flying_bytes -= part.sent_bytes
            self._take(part, result)
            part.transfer.settle()

    def _take(self, part: Part, result: int) -> None:
        """Account for one completed part: it is whole, or goes on, or ends its transfer."""
        transfer = part.transfer
        pause_seconds = 0.0
        try:
            part.skip(self.dialect.judge(part, result))
            if not part.length:
                return
        except TryAgain as again:
            part.retries += 1
            pause_seconds = again.seconds
        except DeviceError as error:
            transfer.end(error)
        if self._refusal:
            transfer.end(self._refused())
        elif transfer.ended:
            return
        elif pause_seconds:
            transfer.resting += 1
            self._resting.add(part)
            self._nursery.start_soon(self._rest, part, pause_seconds)
        else:
            self._send(part)

    def _send(self, part: Part) -> None:
        transfer = part.transfer
        if not transfer.unsent:
            self._waiting.append(transfer)
        transfer.unsent.append(part)

    async def _rest(self, part: Part, seconds: float) -> None:
        await trio.sleep(seconds)
        self._resting.discard(part)
        if not part.transfer.ended:
            part.transfer.resting -= 1
            self._send(part)
            self._asked.set()
