"""A liburing whose kernel does as a test says: short, late, doubled, invented completions.

It has the calls that `ctxfs.device.uring.Binding` names and reads the entries from the memory that
the ring maps, so that their packing is tested as well. Requests are really carried out, on the
descriptor that they name, when the test (or `automatic`) lets them complete.
"""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ctxfs.device.engine import Span
from ctxfs.device.mapping import bytes_at
from ctxfs.device.uring import (
    COMMAND_AT,
    ENTRY,
    OP_FSYNC,
    OP_READ,
    OP_READV,
    OP_URING_CMD,
    OP_WRITE,
    OP_WRITEV,
    SETUP_SQE128,
    SQES_OFFSET,
)


@dataclass(frozen=True, slots=True)
class Request:
    """One entry as the kernel sees it."""

    opcode: int
    fd: int
    offset: int
    address: int
    length: int
    flags: int
    number: int
    command: bytes = b""


class FakeRing:
    """A queue whose entries lie in a sparse file, mapped as the real ones are."""

    def __init__(self) -> None:
        self.ring_fd = os.memfd_create("ring", os.MFD_CLOEXEC)
        self.entries = 0
        self.stride = ENTRY.size
        self.tail = 0  # entries handed out
        self.head = 0  # entries that the kernel took
        self.eventfd = -1
        self.completions: deque[tuple[int, int]] = deque()


class FakeCompletion:
    """One completion, the only item of what a peek gives."""

    def __init__(self) -> None:
        self.user_data = 0
        self.result = 0

    def __getitem__(self, index: int) -> "FakeCompletion":
        assert index == 0, "further ones are wrong in the real binding"
        return self

    @property
    def res(self) -> int:
        if self.result < 0:
            raise OSError(-self.result, os.strerror(-self.result))
        return self.result


def carry_out(request: Request, limit: int | None = None) -> int:
    """Do what the request says, at most `limit` bytes of it; the result as the kernel puts it."""
    if request.opcode == OP_FSYNC:
        return 0
    length = request.length if limit is None else min(limit, request.length)
    if length == 0:
        return 0
    call = {OP_READ: os.preadv, OP_WRITE: os.pwritev}.get(request.opcode)
    if call:
        return call(request.fd, [bytes_at(Span(request.address, length))], request.offset)
    assert limit is None or limit >= request.length
    call = {OP_READV: os.preadv, OP_WRITEV: os.pwritev}[request.opcode]
    return call(request.fd, vectors_at(request.address, request.length), request.offset)


def vectors_at(address: int, count: int) -> list[memoryview]:
    """The memory that an array of struct iovec names."""
    numbers = (ctypes.c_ulong * (2 * count)).from_address(address)
    return [bytes_at(Span(*numbers[n : n + 2])) for n in range(0, 2 * count, 2)]


@dataclass
class FakeLiburing:
    """Requests wait in `taken`, in the order of their submission, until `complete` is called."""

    # Called for each request when it is submitted: completes it, or leaves it in `taken`.
    automatic: Callable[["FakeLiburing", Request], None] | None = None
    # What the next submissions raise, an errno each, 0 for none.
    submit_errors: deque[int] = field(default_factory=deque)
    taken: list[Request] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)  # everything ever submitted
    submissions: int = 0
    inflight_max: int = 0

    def Ring(self) -> FakeRing:
        self.ring = FakeRing()
        return self.ring

    def Cqe(self) -> FakeCompletion:
        return FakeCompletion()

    def io_uring_queue_init(self, entries: int, ring: FakeRing, flags: int, /) -> None:
        ring.entries = entries
        ring.stride = 2 * ENTRY.size if flags & SETUP_SQE128 else ENTRY.size
        os.ftruncate(ring.ring_fd, SQES_OFFSET + entries * ring.stride)

    def io_uring_queue_exit(self, ring: FakeRing, /) -> None:
        os.close(ring.ring_fd)

    def io_uring_register_eventfd(self, ring: FakeRing, fd: int, /) -> None:
        ring.eventfd = fd

    def io_uring_get_sqe(self, ring: FakeRing, /) -> object | None:
        if ring.tail - ring.head >= ring.entries:
            return None
        ring.tail += 1
        return object()

    def io_uring_sq_ready(self, ring: FakeRing, /) -> int:
        return ring.tail - ring.head

    def io_uring_submit(self, ring: FakeRing, /) -> int:
        if self.submit_errors and (code := self.submit_errors.popleft()):
            raise OSError(code, os.strerror(code))
        self.submissions += 1
        count = ring.tail - ring.head
        for _ in range(count):
            place = SQES_OFFSET + ring.head % ring.entries * ring.stride
            ring.head += 1
            entry = os.pread(ring.ring_fd, ring.stride, place)
            opcode, _, _, fd, offset, address, length, flags, number, *_ = ENTRY.unpack_from(entry)
            command = entry[COMMAND_AT:] if opcode == OP_URING_CMD else b""
            request = Request(opcode, fd, offset, address, length, flags, number, command)
            self.taken.append(request)
            self.seen.append(request)
            self.inflight_max = max(self.inflight_max, len(self.taken))
            if self.automatic:
                self.automatic(self, request)
        return count

    def io_uring_cq_ready(self, ring: FakeRing, /) -> int:
        return len(ring.completions)

    def io_uring_peek_cqe(self, ring: FakeRing, cqe: FakeCompletion, /) -> None:
        if not ring.completions:
            raise BlockingIOError(errno.EAGAIN, "nothing completed")
        cqe.user_data, cqe.result = ring.completions[0]

    def io_uring_cqe_seen(self, ring: FakeRing, entry: FakeCompletion, /) -> None:
        ring.completions.popleft()

    # -- what a test says

    def complete(
        self, request: Request, result: int | None = None, limit: int | None = None
    ) -> None:
        """Let a request end: carried out, up to `limit` bytes of it, or with `result` instead."""
        self.taken.remove(request)
        self.post(request.number, carry_out(request, limit) if result is None else result)

    def post(self, number: int, result: int) -> None:
        """A completion, whether anybody asked for it or not."""
        self.ring.completions.append((number, result))
        os.eventfd_write(self.ring.eventfd, 1)
