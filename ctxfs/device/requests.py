"""What all engines agree on: which requests are sane, what a failure means, what is counted."""

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ctxfs.device.engine import EngineStatistics, Span
from ctxfs.device.queues import WHOLE_BYTES
from ctxfs.errors import DeviceError, DeviceLost

_BLKGETSIZE64 = 0x80081272  # _IOR(0x12, 114, size_t)

# The device itself is gone, whatever the request was.
_GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN})


@dataclass(frozen=True, slots=True)
class Target:
    """One open device or file, as an engine needs to know it. Sizes in bytes."""

    fd: int
    name: str  # for messages
    size_bytes: int
    alignment: int
    is_block_device: bool
    request_bytes_max: int = WHOLE_BYTES  # that the kernel takes in one piece


@dataclass(slots=True)
class Counters:
    """What an engine has done since it was made."""

    reads: int = 0
    writes: int = 0
    syncs: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    errors: int = 0

    def frozen(self, inflight: int) -> EngineStatistics:
        return EngineStatistics(
            reads=self.reads,
            writes=self.writes,
            syncs=self.syncs,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
            errors=self.errors,
            inflight=inflight,
        )


def check_request(target: Target, offset: int, spans: Sequence[Span]) -> int:
    """The number of bytes that `spans` hold together.

    Raises ValueError for what no careful caller asks: anything that is not a multiple of the
    alignment, or that does not lie on the device.
    """
    total = sum(span.length for span in spans)
    bits = offset
    for span in spans:
        if span.length < 0:
            raise ValueError(f"a span of {span.length} bytes")
        bits |= span.address | span.length
    if bits % target.alignment:
        raise ValueError(f"{target.name}: {offset=} {spans=} is not aligned to {target.alignment}")
    if offset < 0 or offset + total > target.size_bytes:
        raise ValueError(f"{target.name}: {total} bytes at {offset} of {target.size_bytes}")
    return total


def failure(target: Target, what: str, code: int) -> DeviceError:
    """The error for errno `code`; `what` names the request, as in "read at 4096"."""
    # A raw drive has no free space to run out of: a removed one answers writes with ENOSPC.
    lost = code in _GONE or (code == errno.ENOSPC and target.is_block_device)
    text = f"{target.name}: {what}: {os.strerror(code)}"
    return DeviceLost(text) if lost else DeviceError(text)


def nothing_moved(target: Target, what: str) -> DeviceLost:
    """A removed drive answers reads with 0 bytes and no error."""
    return DeviceLost(f"{target.name}: {what}: the device moved no bytes")


def block_device_size(fd: int) -> int:
    """In bytes. Raises OSError."""
    (size,) = struct.unpack("=Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))
    return int(size)


def check_present(target: Target) -> None:
    """Raise DeviceLost if the device has gone, or shrunk, since it was opened.

    A removed drive answers a flush with success: its size is all that tells.
    """
    if not target.is_block_device:
        return
    try:
        size = block_device_size(target.fd)
    except OSError as error:
        raise failure(target, "flush", error.errno or errno.EIO) from error
    if size < target.size_bytes:
        raise DeviceLost(f"{target.name}: flush: the device has {size} bytes left")
