"""The engine for machines that refuse io_uring: preadv and pwritev in threads."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from ctxfs.device.engine import EngineStatistics, Span
from ctxfs.device.mapping import bytes_at
from ctxfs.device.requests import (
    Counters,
    Target,
    check_present,
    check_request,
    failure,
    nothing_moved,
)
from ctxfs.errors import DeviceError

THREADS_MAX = 32
IOV_MAX = 1024  # vectors that one call takes (limits.h)

Vectors = list[memoryview]


class ThreadEngine:
    """Direct I/O on one open descriptor, one thread a request. Satisfies `Engine`.

    The descriptor stays its owner's. A cancelled caller waits until its thread has returned, since
    the kernel may be writing to its memory.
    """

    name = "threads"

    def __init__(self, target: Target) -> None:
        self.size_bytes = target.size_bytes
        self.alignment = target.alignment
        self._target = target
        self._counters = Counters()
        self._limiter = trio.CapacityLimiter(THREADS_MAX)
        self._closed = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Nothing to keep running; here because every engine is started the same way."""
        task_status.started()

    async def read(self, offset: int, target: Span) -> None:
        total = check_request(self._target, offset, [target])
        await self._in_thread(_transfer, os.preadv, self._target, "read", offset, [target])
        self._counters.reads += 1
        self._counters.read_bytes += total

    async def write(self, offset: int, sources: Sequence[Span]) -> None:
        total = check_request(self._target, offset, sources)
        await self._in_thread(_transfer, os.pwritev, self._target, "write", offset, sources)
        self._counters.writes += 1
        self._counters.written_bytes += total

    async def sync(self) -> None:
        await self._in_thread(_sync, self._target)
        self._counters.syncs += 1

    def statistics(self) -> EngineStatistics:
        return self._counters.frozen(int(self._limiter.borrowed_tokens))

    def grow(self, size_bytes: int) -> None:
        """The device is larger than it was: requests may go up to there from now on."""
        self._target = replace(self._target, size_bytes=size_bytes)
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Refuse further requests. The descriptor is left open."""
        self._closed = True

    async def _in_thread(self, call: Callable[..., None], *args: object) -> None:
        if self._closed:
            raise DeviceError(f"{self._target.name}: the engine is closed")
        try:
            await trio.to_thread.run_sync(call, *args, limiter=self._limiter)
        except DeviceError:
            self._counters.errors += 1
            raise


def _transfer(
    call: Callable[[int, Vectors, int], int],
    target: Target,
    verb: str,
    offset: int,
    spans: Sequence[Span],
) -> None:
    """Move all bytes of `spans`, however many calls that takes."""
    vectors = [bytes_at(span) for span in spans if span.length]
    while vectors:
        what = f"{verb} at {offset}"
        try:
            moved = call(target.fd, vectors[:IOV_MAX], offset)
        except OSError as error:
            raise failure(target, what, error.errno or errno.EIO) from error
        # Only whole units count: the next call has to be aligned as well.
        moved -= moved % target.alignment
        if moved == 0:
            raise nothing_moved(target, what)
        offset += moved
        vectors = _rest(vectors, moved)


def _rest(vectors: Vectors, moved: int) -> Vectors:
    """What is left of `vectors` after their first `moved` bytes."""
    for done, vector in enumerate(vectors):
        if moved < len(vector):
            return [vector[moved:], *vectors[done + 1 :]]
        moved -= len(vector)
    return []


def _sync(target: Target) -> None:
    try:
        os.fdatasync(target.fd)
    except OSError as error:
        raise failure(target, "flush", error.errno or errno.EIO) from error
    check_present(target)
