"""The io_uring engine against a kernel that does as the test says."""

import contextlib
import errno
import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing

from ctxfs.device.dialects import RETRIES_MAX
from ctxfs.device.engine import Span
from ctxfs.device.requests import Target
from ctxfs.device.ringengine import FLYING_BYTES, UringEngine
from ctxfs.device.uring import FSYNC_DATASYNC, OP_FSYNC, OP_READ, OP_WRITE, Ring
from ctxfs.errors import DeviceError, DeviceLost
from tests.device.fake_liburing import FakeLiburing, Request, carry_out
from tests.device.places import MIB, Memory, pattern

SIZE = 32 * MIB
ENTRIES = 8
AT_ONCE = FLYING_BYTES // MIB  # parts of a large request


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "device"
    path.write_bytes(pattern(9, SIZE))
    number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    yield number
    os.close(number)


def content(offset: int, length: int) -> bytes:
    return pattern(9, SIZE)[offset : offset + length]


@dataclass
class Bench:
    """An engine that runs in `nursery`, on a kernel that a test drives."""

    kernel: FakeLiburing
    engine: UringEngine
    nursery: trio.Nursery

    async def taken(self, count: int) -> list[Request]:
        """The requests that the kernel has, once it has `count` and everybody waits."""
        await trio.testing.wait_all_tasks_blocked()
        assert len(self.kernel.taken) == count
        return list(self.kernel.taken)


@contextlib.asynccontextmanager
async def running(
    fd: int, kernel: FakeLiburing, *, is_block_device: bool = False
) -> AsyncIterator[Bench]:
    target = Target(fd, "the device", SIZE, 4096, is_block_device)
    engine = UringEngine(target, Ring(kernel, entries=ENTRIES))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield Bench(kernel, engine, nursery)
        nursery.cancel_scope.cancel()
    assert engine.statistics().inflight == 0
    engine.close()


def all_at_once(kernel: FakeLiburing, request: Request) -> None:
    kernel.complete(request)


async def test_entries_say_what_was_asked(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        source, target = Memory(8192), Memory(4096)
        bench.nursery.start_soon(bench.engine.write, 4096, [source.span])
        await bench.taken(1)
        bench.nursery.start_soon(bench.engine.read, 8192, target.span)
        await bench.taken(2)
        bench.nursery.start_soon(bench.engine.sync)
        write, read, sync = await bench.taken(3)
        address = source.span.address
        assert write == Request(OP_WRITE, fd, 4096, address, 8192, 0, write.number)
        assert read == Request(OP_READ, fd, 8192, target.span.address, 4096, 0, read.number)
        assert sync == Request(OP_FSYNC, fd, 0, 0, 0, FSYNC_DATASYNC, sync.number)
        assert len({write.number, read.number, sync.number}) == 3
        assert bench.engine.statistics().inflight == 3
        for request in (sync, read, write):
            bench.kernel.complete(request)


async def test_requests_of_one_turn_are_submitted_together(fd: int) -> None:
    async with running(fd, FakeLiburing(automatic=all_at_once)) as bench:
        memories = [Memory(4096) for _ in range(ENTRIES)]
        async with trio.open_nursery() as nursery:
            for number, memory in enumerate(memories):
                nursery.start_soon(bench.engine.read, number * 4096, memory.span)
        assert bench.kernel.submissions == 1
        assert b"".join(memory.view for memory in memories) == content(0, ENTRIES * 4096)


async def test_short_transfers_are_continued(fd: int) -> None:
    def thrifty(kernel: FakeLiburing, request: Request) -> None:
        kernel.complete(request, limit=4096)

    async with running(fd, FakeLiburing(automatic=thrifty)) as bench:
        memory = Memory(20480)
        await bench.engine.read(4096, memory.span)
        assert memory.view == content(4096, 20480)
        memory.view[:] = pattern(1, 20480)
        await bench.engine.write(8192, [memory.span])
        assert os.pread(fd, 20480, 8192) == pattern(1, 20480)
        assert [request.length for request in bench.kernel.seen[:5]] == [
            20480, 16384, 12288, 8192, 4096,
        ]  # fmt: skip


async def test_a_transfer_that_ends_within_a_block_is_continued_at_that_block(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        memory = Memory(12288)
        bench.nursery.start_soon(bench.engine.read, 0, memory.span)
        (request,) = await bench.taken(1)
        bench.kernel.complete(request, limit=5000)
        (rest,) = await bench.taken(1)
        assert (rest.offset, rest.length) == (4096, 8192)
        bench.kernel.complete(rest)
        await trio.testing.wait_all_tasks_blocked()
        assert memory.view == content(0, 12288)


@pytest.mark.parametrize("moved", [0, 100])
async def test_no_whole_block_is_a_lost_device(fd: int, moved: int) -> None:
    def nothing(kernel: FakeLiburing, request: Request) -> None:
        kernel.complete(request, result=moved)

    async with running(fd, FakeLiburing(automatic=nothing)) as bench:
        memory = Memory(4096)
        with pytest.raises(DeviceLost, match="read of 4096 bytes at 8192"):
            await bench.engine.read(8192, memory.span)
        with pytest.raises(DeviceLost, match="write of 4096 bytes at 0"):
            await bench.engine.write(0, [memory.span])
        assert bench.engine.statistics().errors == 2


@pytest.mark.parametrize(
    ("code", "is_block_device", "lost"),
    [
        (errno.EIO, True, False),
        (errno.EREMOTEIO, True, False),
        (errno.ENODEV, True, True),
        (errno.ENXIO, False, True),
        (errno.ESHUTDOWN, True, True),
        (errno.ENOSPC, True, True),
        (errno.ENOSPC, False, False),
    ],
)
async def test_what_the_kernel_says_decides_between_failed_and_lost(
    fd: int, code: int, is_block_device: bool, lost: bool
) -> None:
    def fail(kernel: FakeLiburing, request: Request) -> None:
        kernel.complete(request, result=-code)

    kernel = FakeLiburing(automatic=fail)
    async with running(fd, kernel, is_block_device=is_block_device) as bench:
        memory = Memory(4096)
        with pytest.raises(DeviceError, match=os.strerror(code)) as caught:
            await bench.engine.write(0, [memory.span])
        assert isinstance(caught.value, DeviceLost) is lost
        with pytest.raises(DeviceError, match="flush"):
            await bench.engine.sync()


async def test_more_bytes_than_asked_for_are_an_error(fd: int) -> None:
    def too_much(kernel: FakeLiburing, request: Request) -> None:
        kernel.complete(request, result=request.length + 4096)

    async with running(fd, FakeLiburing(automatic=too_much)) as bench:
        memory = Memory(4096)
        with pytest.raises(DeviceError):
            await bench.engine.read(0, memory.span)


async def test_stray_completions_are_counted_and_belong_to_nobody(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        first, second = Memory(4096), Memory(4096)
        bench.nursery.start_soon(bench.engine.read, 0, first.span)
        (request,) = await bench.taken(1)
        bench.kernel.post(request.number + 1000, 4096)
        bench.kernel.post(0, -errno.EIO)
        bench.kernel.complete(request)
        bench.kernel.post(request.number, -errno.EIO)
        await trio.testing.wait_all_tasks_blocked()
        bench.kernel.post(request.number, 4096)
        bench.nursery.start_soon(bench.engine.read, 4096, second.span)
        (request,) = await bench.taken(1)
        assert second.view == bytes(4096)
        bench.kernel.complete(request)
        await trio.testing.wait_all_tasks_blocked()
        assert first.view[:] == content(0, 4096)
        assert second.view[:] == content(4096, 4096)
        assert bench.engine.strays == 4


async def test_completions_in_any_order_reach_their_callers(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        memories = [Memory(4096) for _ in range(ENTRIES)]
        order: list[int] = []

        async def read(number: int) -> None:
            await bench.engine.read(number * 4096, memories[number].span)
            assert memories[number].view == content(number * 4096, 4096)
            order.append(number)

        for number in range(ENTRIES):
            bench.nursery.start_soon(read, number)
        requests = await bench.taken(ENTRIES)
        random.Random(1).shuffle(requests)
        for request in requests:
            bench.kernel.complete(request)
            await trio.testing.wait_all_tasks_blocked()
        assert order == [request.offset // 4096 for request in requests]


async def test_a_small_request_does_not_wait_for_all_of_a_large_one(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        large, small = Memory(SIZE), Memory(4096)
        bench.nursery.start_soon(bench.engine.read, 0, large.span)
        requests = await bench.taken(AT_ONCE)
        assert {request.length for request in requests} == {MIB}
        bench.nursery.start_soon(bench.engine.read, 0, small.span)
        await bench.taken(AT_ONCE)
        bench.kernel.complete(requests[0])
        bench.kernel.complete(requests[1])
        await trio.testing.wait_all_tasks_blocked()
        assert small.span.address in {request.address for request in bench.kernel.taken}
        bench.kernel.automatic = all_at_once
        for request in list(bench.kernel.taken):
            bench.kernel.complete(request)
        await trio.testing.wait_all_tasks_blocked()
        assert bench.engine.statistics().reads == 2
        assert bench.kernel.inflight_max <= AT_ONCE + 1  # the small one
        assert large.view == pattern(9, SIZE)


async def test_one_failed_part_fails_the_request_after_the_others_are_done(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        memory = Memory(20 * MIB)
        failed = trio.Event()

        async def read() -> None:
            with pytest.raises(DeviceError, match=os.strerror(errno.EIO)):
                await bench.engine.read(0, memory.span)
            failed.set()

        bench.nursery.start_soon(read)
        requests = await bench.taken(AT_ONCE)
        bench.kernel.complete(requests[3], result=-errno.EIO)
        rest = await bench.taken(AT_ONCE - 1)  # and no further part is sent
        assert not failed.is_set()
        for request in rest:
            bench.kernel.complete(request, limit=4096)  # nor is what is short continued
        await failed.wait()
        assert len(bench.kernel.seen) == AT_ONCE


async def test_a_cancelled_caller_waits_until_the_kernel_lets_go(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        memory = Memory(20 * MIB)
        scope, left = trio.CancelScope(), trio.Event()

        async def read() -> None:
            with scope:
                await bench.engine.read(0, memory.span)
            assert scope.cancelled_caught
            left.set()

        bench.nursery.start_soon(read)
        await bench.taken(AT_ONCE)
        scope.cancel()
        first, *rest = await bench.taken(AT_ONCE)
        assert not left.is_set()
        bench.kernel.complete(first, limit=4096)
        for request in await bench.taken(AT_ONCE - 1):
            assert not left.is_set()
            bench.kernel.complete(request)
        await left.wait()
        assert bench.kernel.seen == [first, *rest]


async def test_a_request_cancelled_in_the_queue_never_reaches_the_kernel(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        large, small = Memory(AT_ONCE * MIB), Memory(4096)
        bench.nursery.start_soon(bench.engine.read, 0, large.span)
        requests = await bench.taken(AT_ONCE)
        with trio.move_on_after(0) as scope:
            await bench.engine.read(0, small.span)
        assert scope.cancelled_caught
        for request in requests:
            bench.kernel.complete(request)
        await bench.taken(0)
        assert len(bench.kernel.seen) == AT_ONCE


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
async def test_what_passes_is_tried_again_but_not_for_ever(fd: int, code: int) -> None:
    refusals = 3

    def busy(kernel: FakeLiburing, request: Request) -> None:
        nonlocal refusals
        refusals -= 1
        kernel.complete(request, result=-code if refusals >= 0 else None)

    async with running(fd, FakeLiburing(automatic=busy)) as bench:
        memory = Memory(4096)
        await bench.engine.read(0, memory.span)
        assert memory.view == content(0, 4096)
        refusals = 1 << 30
        with pytest.raises(DeviceError, match=os.strerror(code)):
            await bench.engine.read(0, memory.span)
        assert len(bench.kernel.seen) == 4 + RETRIES_MAX + 1


async def test_a_submission_without_memory_is_repeated(fd: int) -> None:
    kernel = FakeLiburing(automatic=all_at_once)
    kernel.submit_errors.extend([errno.EAGAIN, errno.EBUSY])
    async with running(fd, kernel) as bench:
        memory = Memory(4096)
        await bench.engine.read(0, memory.span)
        assert memory.view == content(0, 4096)


async def test_a_refused_submission_fails_what_the_kernel_has_not_got(fd: int) -> None:
    async with running(fd, FakeLiburing()) as bench:
        memory, others = Memory(8192), [Memory(4096) for _ in range(2 * ENTRIES)]
        done = trio.Event()

        async def read() -> None:
            await bench.engine.read(0, memory.at(0, 4096))
            done.set()

        async def fail(number: int) -> None:
            with pytest.raises(DeviceError, match="refused"):
                await bench.engine.read(0, others[number].span)

        bench.nursery.start_soon(read)
        (request,) = await bench.taken(1)
        bench.kernel.submit_errors.append(errno.EPERM)
        async with trio.open_nursery() as nursery:
            for number in range(2 * ENTRIES):
                nursery.start_soon(fail, number)
        with pytest.raises(DeviceError, match="refused"):
            await bench.engine.sync()
        assert bench.engine.statistics().inflight == 1
        assert not done.is_set()
        bench.kernel.complete(request)
        await done.wait()
        assert memory.view[:4096] == content(0, 4096)


async def test_an_engine_that_is_stopped_waits_for_the_kernel_and_fails_the_rest(fd: int) -> None:
    kernel = FakeLiburing()
    engine = UringEngine(Target(fd, "the device", SIZE, 4096, False), Ring(kernel, entries=ENTRIES))
    memory, small = Memory(20 * MIB), Memory(8192)
    outcomes: list[str] = []

    async def read(offset: int, span: Span) -> None:
        try:
            await engine.read(offset, span)
            outcomes.append("read")
        except DeviceError as error:
            outcomes.append(str(error))

    async with trio.open_nursery() as callers:
        stopped = trio.Event()

        async def run(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
            with trio.CancelScope() as scope:
                await engine.run(task_status=_Started(task_status, scope))
            stopped.set()

        scope: trio.CancelScope = await callers.start(run)
        callers.start_soon(read, 0, small.span)
        await trio.testing.wait_all_tasks_blocked()
        callers.start_soon(read, 0, memory.span)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not stopped.is_set()
        with pytest.raises(RuntimeError, match="holds memory"):
            engine.close()
        first, *rest = kernel.taken
        kernel.complete(first, limit=4096)
        for request in rest:
            kernel.complete(request)
        await stopped.wait()
    refusal = "the device: the engine takes no requests: its run() has ended"
    assert outcomes == [refusal, refusal]
    engine.close()
    engine.close()


class _Started:
    """Hands the scope of a service to whoever starts it."""

    def __init__(self, status: trio.TaskStatus[trio.CancelScope], scope: trio.CancelScope) -> None:
        self._status, self._scope = status, scope

    def started(self, value: None = None) -> None:
        self._status.started(self._scope)


async def test_nothing_is_taken_before_the_engine_runs(fd: int) -> None:
    engine = UringEngine(Target(fd, "the device", SIZE, 4096, False), Ring(FakeLiburing()))
    with pytest.raises(DeviceError, match="has not started"):
        await engine.sync()
    engine.close()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_the_kernel_does_bytes_are_right_or_an_error(fd: int, seed: int) -> None:
    """Short, late, doubled, invented and failed completions; callers that are cancelled."""
    dice = random.Random(seed)

    def misbehave(kernel: FakeLiburing, request: Request) -> None:
        while kernel.taken and dice.random() < 0.7:
            victim = dice.choice(kernel.taken)
            kind = dice.randrange(6)
            if kind == 0:
                kernel.complete(victim, result=-errno.EAGAIN)
            elif kind == 1 and victim.length:
                kernel.complete(victim, limit=dice.randrange(4096, victim.length + 1))
            elif kind == 2:
                kernel.complete(victim, result=-errno.EIO)
            elif kind == 3:
                kernel.post(dice.choice(kernel.seen).number + (1 << 40), 4096)
            else:
                kernel.complete(victim)
                if dice.random() < 0.3:
                    kernel.post(victim.number, carry_out(victim))

    async def work(bench: Bench, slot: int) -> None:
        length = dice.choice([4096, 65536, 3 * MIB])
        memory = Memory(length)
        for turn in range(10):
            memory.view[:] = written = pattern(seed * 1000 + slot * 10 + turn, length)
            with trio.CancelScope() as scope, contextlib.suppress(DeviceError):
                if dice.random() < 0.1:
                    scope.cancel()
                await bench.engine.write(slot * 4 * MIB, [memory.span])
                memory.view[:] = bytes(length)
                await bench.engine.read(slot * 4 * MIB, memory.span)
                assert memory.view == written

    async def finish(kernel: FakeLiburing) -> None:
        """Late completions, once nobody moves any more."""
        while True:
            await trio.testing.wait_all_tasks_blocked()
            for request in list(kernel.taken):
                kernel.complete(request)

    async with running(fd, FakeLiburing(automatic=misbehave)) as bench:
        bench.nursery.start_soon(finish, bench.kernel)
        async with trio.open_nursery() as workers:
            for slot in range(8):
                workers.start_soon(work, bench, slot)
        assert bench.kernel.inflight_max <= ENTRIES
