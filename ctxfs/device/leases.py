"""Who else has a file open: asked of the kernel, by the leases of fcntl(2).

A lease is granted exactly where nobody has the file open in a way that conflicts, mappings
included: they keep the open description that they were made of. It is given back at once.
"""

import fcntl
import os
import signal
from pathlib import Path

from ctxfs.errors import TierTrouble

SWITCH = Path("/proc/sys/fs/leases-enable")


def are_enabled() -> bool:
    """Whether the administrator has left leases on; without them, nothing can be asked."""
    try:
        return SWITCH.read_text().strip() != "0"
    except OSError:
        return False


def is_written_elsewhere(fd: int) -> bool:
    """Whether anybody but us has the file open, or mapped, for writing.

    `fd` must be our only descriptor that may write it, and without a mapping of ours. It is a
    reading one meanwhile, since our own right to write would conflict, too. Raises TierTrouble.
    """
    path = f"/proc/self/fd/{fd}"
    try:
        _replace(fd, path, os.O_RDONLY)
        try:
            return not _grants(fd, fcntl.F_RDLCK)
        finally:
            _replace(fd, path, os.O_RDWR)
    except OSError as error:
        raise TierTrouble(f"a hot file cannot be opened again: {error.strerror}") from error


def is_open_elsewhere(fd: int) -> bool:
    """Whether anybody else has the file open, or mapped, in whatever way.

    `fd` must be our only descriptor of it, and able to write.
    """
    return not _grants(fd, fcntl.F_WRLCK)


def _grants(fd: int, kind: int) -> bool:
    # Who opens the file in this very moment waits for us, and we are told by SIGIO, which would
    # be our end; this signal is ignored by default.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    except BlockingIOError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _replace(fd: int, path: str, flags: int) -> None:
    other = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.dup2(other, fd, inheritable=False)
    finally:
        os.close(other)
