"""How a ring engine puts its requests to the kernel, and what the answers mean."""

import errno
from typing import Final, Protocol

from ctxfs.device.requests import Target, check_present, failure, nothing_moved
from ctxfs.device.transfers import Part
from ctxfs.device.uring import (
    FSYNC_DATASYNC,
    OP_FSYNC,
    OP_READ,
    OP_READV,
    OP_WRITE,
    OP_WRITEV,
    Ring,
)
from ctxfs.errors import CtxfsError

_OPCODES: Final = {"read": OP_READ, "write": OP_WRITE}
_VECTORED: Final = {"read": OP_READV, "write": OP_WRITEV}
RETRIES_MAX = 64  # of one part, when the kernel says EAGAIN or EINTR


class TryAgain(CtxfsError):
    """The request did nothing, for a reason that passes; send it again in so many seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(f"again in {seconds} s")
        self.seconds = seconds


class Dialect(Protocol):
    """The words of one kind of device."""

    name: str  # of the engine that speaks it
    part_bytes: int  # what one request moves at most; larger ones are cut

    def put(self, ring: Ring, number: int, part: Part) -> None:
        """Queue `part` as request `number`."""
        ...

    def judge(self, part: Part, result: int) -> int:
        """How many bytes moved, a multiple of the alignment; all, or a beginning.

        Raises DeviceError, TryAgain.
        """
        ...


class Plain:
    """Reads, writes and flushes of a file or block device."""

    name = "io_uring"

    def __init__(self, target: Target) -> None:
        self.part_bytes = target.request_bytes_max
        self._target = target

    def put(self, ring: Ring, number: int, part: Part) -> None:
        fd = self._target.fd
        if part.verb == "flush":
            ring.put(OP_FSYNC, number, fd=fd, flags=FSYNC_DATASYNC)
            return
        opcodes = _OPCODES if len(part.spans) == 1 else _VECTORED
        address, length = part.memory()
        ring.put(
            opcodes[part.verb], number, fd=fd, offset=part.offset, address=address, length=length
        )

    def judge(self, part: Part, result: int) -> int:
        target = self._target
        if result < 0:
            if -result in (errno.EAGAIN, errno.EINTR) and part.retries < RETRIES_MAX:
                raise TryAgain
            raise failure(target, part.what, -result)
        if result > part.length:
            raise failure(target, part.what, errno.EPROTO)
        if result == part.length:
            if part.verb == "flush":
                check_present(target)
            return result
        # Only whole units count: the rest has to be aligned as well.
        if moved := result - result % target.alignment:
            return moved
        raise nothing_moved(target, part.what)
