"""The liburing binding: its only importer, what refuses it, and one thin ring.

Three facts shape this module. The binding's wheel is compiled for AVX-512, so that making a ring
on another processor ends the process with SIGILL, which nothing can catch: `probe` reads the
processor's flags before anything is imported. No call of the binding releases the GIL: nothing
here ever waits in it, the kernel signals an eventfd instead. And its calls take whole bytearrays
only: entries are packed straight into the ring's memory, which also is the faster way.
"""

import contextlib
import errno
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Protocol, cast

from ctxfs.errors import CtxfsError

ENTRIES = 64  # of the submission queue, and so requests in flight at once; a power of two

# struct io_uring_sqe: opcode, flags, ioprio, fd, offset, address, length, rw_flags, user_data,
# buf_index, personality, splice_fd, addr3, padding (linux/io_uring.h).
ENTRY = struct.Struct("<BBHiQQIIQHHiQQ")
SQES_OFFSET = 0x10000000  # IORING_OFF_SQES
OP_NOP, OP_READV, OP_WRITEV, OP_FSYNC, OP_READ, OP_WRITE = 0, 1, 2, 3, 22, 23
OP_URING_CMD = 46
FSYNC_DATASYNC = 1
SETUP_SQE128, SETUP_CQE32 = 1 << 10, 1 << 11
COMMAND_AT = 48  # where a device's own command begins in an entry

NEEDED_CPU_FLAGS = frozenset({"avx2", "avx512bw", "avx512f", "avx512vl", "bmi2", "movbe"})


class UringUnavailable(CtxfsError):
    """This machine, kernel or container does not let us use io_uring; the text says why."""


class Binding(Protocol):
    """What is used of the liburing module. Rings and entries are opaque objects of its own."""

    def Ring(self) -> Any: ...
    def Cqe(self) -> Any: ...
    def io_uring_queue_init(self, entries: int, ring: Any, flags: int, /) -> object: ...
    def io_uring_queue_exit(self, ring: Any, /) -> object: ...
    def io_uring_register_eventfd(self, ring: Any, fd: int, /) -> object: ...
    def io_uring_get_sqe(self, ring: Any, /) -> object | None: ...
    def io_uring_submit(self, ring: Any, /) -> int: ...
    def io_uring_sq_ready(self, ring: Any, /) -> int: ...
    def io_uring_cq_ready(self, ring: Any, /) -> int: ...
    def io_uring_peek_cqe(self, ring: Any, cqe: Any, /) -> object: ...
    def io_uring_cqe_seen(self, ring: Any, entry: Any, /) -> None: ...


def missing_cpu_flags(cpuinfo: str) -> list[str]:
    """Which processor features the binding needs and `cpuinfo` (/proc/cpuinfo) lacks, sorted."""
    lines = [line for line in cpuinfo.splitlines() if line.startswith("flags")]
    common = set(NEEDED_CPU_FLAGS) if lines else set()
    for line in lines:
        common &= set(line.partition(":")[2].split())
    return sorted(NEEDED_CPU_FLAGS - common)


def load_binding() -> Binding:
    """The liburing module. Raises UringUnavailable where it cannot be imported or used."""
    try:
        missing = missing_cpu_flags(Path("/proc/cpuinfo").read_text())
    except OSError as error:
        raise UringUnavailable(f"/proc/cpuinfo cannot be read: {error.strerror}") from error
    if missing:
        raise UringUnavailable(f"liburing needs a processor with {', '.join(missing)}")
    try:
        import liburing
    except (ImportError, OSError) as error:
        raise UringUnavailable(f"liburing cannot be imported: {error}") from error
    return cast("Binding", liburing)


def probe() -> str | None:
    """Why io_uring cannot be used here, or None where it can: a ring is made and tried."""
    try:
        ring = Ring(load_binding(), entries=4)
    except UringUnavailable as error:
        return str(error)
    try:
        ring.put(OP_NOP, 1)
        ring.submit()
        return None if ring.reap() == [(1, 0)] else "io_uring did not answer a request"
    except OSError as error:
        return _refusal(error)
    finally:
        ring.close()


def _refusal(error: OSError) -> str:
    """What refused io_uring, as far as one can tell from here."""
    try:
        setting = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        setting = "0"
    if error.errno == errno.ENOSYS:
        return "the kernel has no io_uring, or a sandbox hides it"
    if error.errno in (errno.EPERM, errno.EACCES):
        if setting != "0":
            return f"kernel.io_uring_disabled is {setting}"
        return "io_uring is refused here (a container's seccomp profile, as a rule)"
    return f"io_uring: {error.strerror}"


class Ring:
    """One submission and completion queue, as thin as can be. Not safe between threads.

    A wide one has entries of twice the size, as commands to devices need them.
    """

    def __init__(self, binding: Binding, entries: int = ENTRIES, *, wide: bool = False) -> None:
        """Raises UringUnavailable where the kernel refuses."""
        if entries & (entries - 1):
            raise ValueError(f"{entries} entries: not a power of two")
        self.entries = entries
        self._setup = SETUP_SQE128 | SETUP_CQE32 if wide else 0
        self._stride = 2 * ENTRY.size if wide else ENTRY.size
        self._lib = binding
        self._ring, self._cqe = binding.Ring(), binding.Cqe()
        self._taken = 0
        with contextlib.ExitStack() as undo:
            try:
                self._init(undo)
            except OSError as error:
                raise UringUnavailable(_refusal(error)) from error
            self._release = undo.pop_all()

    def _init(self, undo: contextlib.ExitStack) -> None:
        # Cooperative or deferred completions (setup flags) made no difference that shows.
        self._lib.io_uring_queue_init(self.entries, self._ring, self._setup)
        undo.callback(self._lib.io_uring_queue_exit, self._ring)
        size = self.entries * self._stride
        self._sqes = undo.enter_context(mmap.mmap(self._ring.ring_fd, size, offset=SQES_OFFSET))
        # A forked child must not share the queue with us.
        self._sqes.madvise(mmap.MADV_DONTFORK)
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, self.eventfd)
        self._lib.io_uring_register_eventfd(self._ring, self.eventfd)

    def put(
        self,
        opcode: int,
        number: int,
        *,
        fd: int = -1,
        offset: int = 0,
        address: int = 0,
        length: int = 0,
        flags: int = 0,
        command: bytes = b"",
    ) -> None:
        """Queue one request, named `number`; nothing happens before `submit`.

        The caller never has more than `entries` requests queued and in flight. A `command` needs a
        wide ring.
        """
        if self._lib.io_uring_get_sqe(self._ring) is None:
            raise RuntimeError("the submission queue is full")
        place = (self._taken & (self.entries - 1)) * self._stride
        self._taken += 1
        # fmt: off
        ENTRY.pack_into(
            self._sqes, place,
            opcode, 0, 0, fd, offset, address, length, flags, number, 0, 0, 0, 0, 0,
        )
        # fmt: on
        if command:
            place += COMMAND_AT
            self._sqes[place : place + len(command)] = command

    def submit(self) -> int:
        """Hand everything queued to the kernel. Returns how many entries it has not taken.

        That is 0 but when the kernel is short of memory, which passes. Raises OSError otherwise.
        """
        while left := self.unsubmitted():
            try:
                self._lib.io_uring_submit(self._ring)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.EINTR):
                    raise
                return left
        return 0

    def unsubmitted(self) -> int:
        """How many entries the kernel has not taken."""
        return self._lib.io_uring_sq_ready(self._ring)

    def reap(self) -> list[tuple[int, int]]:
        """(number, result) of everything that completed; a result below 0 is a negative errno."""
        lib, ring, cqe = self._lib, self._ring, self._cqe
        done: list[tuple[int, int]] = []
        while lib.io_uring_cq_ready(ring):
            # One by one: further entries of a peek are taken past the end of the queue's array.
            lib.io_uring_peek_cqe(ring, cqe)
            entry = cqe[0]
            number = entry.user_data
            try:
                result = entry.res  # raises what the kernel returned as a negative errno
            except OSError as error:
                result = -(error.errno or errno.EIO)
            lib.io_uring_cqe_seen(ring, entry)
            done.append((number, result))
        return done

    def clear_eventfd(self) -> None:
        """Before `reap`, so that a completion in between leaves the descriptor readable."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.eventfd)

    def close(self) -> None:
        """Give the queues back; safe to call twice."""
        self._release.close()
