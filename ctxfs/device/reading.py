"""Opening a device or file offline, to look at it or to mend it: never made, never made larger."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ctxfs.device import mounts, nvmedrive
from ctxfs.device.requests import Target, block_device_size
from ctxfs.device.threads import ThreadEngine
from ctxfs.errors import ConfigError, DeviceBusy

ALIGNMENT: Final = 4096
_LOCKS: Final = Path("/proc/locks")


@contextmanager
def opened(path: Path, *, writable: bool = False) -> Iterator[ThreadEngine]:
    """An engine for `path`, which no daemon may open meanwhile; without `writable` it only reads.

    Raises ConfigError for what can be mended, DeviceBusy where a daemon has it open.
    """
    fd = _open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        _lock(path, fd)
        is_block_device = stat.S_ISBLK(os.fstat(fd).st_mode)
        size = block_device_size(fd) if is_block_device else os.fstat(fd).st_size
        size -= size % ALIGNMENT
        engine = ThreadEngine(Target(fd, str(path), size, ALIGNMENT, is_block_device))
        try:
            yield engine
        finally:
            engine.close()
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    try:
        found = path.stat()
        if not stat.S_ISBLK(found.st_mode) and not stat.S_ISREG(found.st_mode):
            if nvmedrive.is_command_device(path):
                raise ConfigError(f"{path} takes NVMe commands: name its block device instead")
            raise ConfigError(f"{path} is neither a file nor a block device")
        flags |= os.O_CLOEXEC
        if stat.S_ISBLK(found.st_mode):
            # Refused while it is mounted, or a daemon sends it commands.
            flags |= os.O_EXCL
        try:
            return os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without direct I/O
                raise
        return os.open(path, flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _busy(path, mounts.use_of(path)) from error
        raise ConfigError(f"{path}: {error.strerror}") from error


def _lock(path: Path, fd: int) -> None:
    """Keep daemons away until `fd` is closed. Raises DeviceBusy, with the pid of the one it is."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(path, "in use by another process") from None


def _busy(path: Path, use: str) -> DeviceBusy:
    """`use`: what is said where the process is not known."""
    pid = _lock_holder(path)
    return DeviceBusy(f"{path} is {use if pid is None else f'in use by the process {pid}'}")


def _lock_holder(path: Path) -> int | None:
    """The process that has `path` locked, as a daemon does; None where the kernel does not tell."""
    found = path.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError, ValueError):
        for line in _LOCKS.read_text(encoding="ascii").splitlines():
            words = line.split()
            # As in `1: FLOCK  ADVISORY  WRITE 4321 fe:00:131 0 EOF`; who waits has an arrow.
            if words[1:2] == ["FLOCK"] and words[5] == place and int(words[4]) > 0:
                return int(words[4])
    return None
