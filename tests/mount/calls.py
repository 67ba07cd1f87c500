"""System calls that Python's `os` does not have, and what a block tells of itself."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from tests.mount.harness import wait_until

AT_FDCWD = -100
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
MAP_POPULATE = 0x8000
MAP_SHARED = 1
MAP_FAILED = (1 << 64) - 1
PROT_READ = 1
PROT_WRITE = 2
MS_SYNC = 4

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("inode", ctypes.c_uint64),
        ("place", ctypes.c_int64),
        ("length", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    )


_libc.opendir.restype = ctypes.c_void_p
_libc.readdir.restype = ctypes.POINTER(_Dirent)
_libc.telldir.restype = ctypes.c_long
for _function in (_libc.readdir, _libc.telldir, _libc.rewinddir, _libc.closedir):
    _function.argtypes = (ctypes.c_void_p,)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)


def _check(result: int) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def rename(old: Path, new: Path, flags: int) -> None:
    """renameat2(2)."""
    _check(_libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags))


class Pages:
    """A shared, readable mapping that holds no descriptor, as C programs make it.

    Python's own keeps one, so that the file stays open.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            self._length = os.fstat(fd).st_size
            address = _libc.mmap(None, self._length, PROT_READ, MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if address == MAP_FAILED:
            _check(-1)
        self._address: int = address

    def content(self) -> bytes:
        """All bytes."""
        return ctypes.string_at(self._address, self._length)

    def close(self) -> None:
        """Unmap."""
        _check(_libc.munmap(self._address, self._length))


class Mapping:
    """A shared mapping of an open file that may be written, and holds no descriptor either.

    The caller keeps to what the file has: beyond its end there is SIGBUS.
    """

    def __init__(self, fd: int, length: int) -> None:
        both = PROT_READ | PROT_WRITE
        address = _libc.mmap(None, length, both, MAP_SHARED, fd, 0)
        if address == MAP_FAILED:
            _check(-1)
        self._address: int = address
        self.length = length

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""
        return ctypes.string_at(self._address + start, end - start)

    def write(self, start: int, data: bytes) -> None:
        """Store."""
        ctypes.memmove(self._address + start, data, len(data))

    def sync(self) -> None:
        """msync(2), of all of it."""
        _check(_libc.msync(self._address, self.length, MS_SYNC))

    def close(self) -> None:
        """Unmap."""
        _check(_libc.munmap(self._address, self.length))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2), without the emulation that posix_fallocate(3) falls back to."""
    _check(_libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)))


def set_times(path: Path, atime_nsec: int, mtime_nsec: int) -> None:
    """utimensat(2) with UTIME_NOW and UTIME_OMIT, which `os.utime` cannot say."""
    times = (_Timespec * 2)(_Timespec(0, atime_nsec), _Timespec(0, mtime_nsec))
    _check(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, 0))


class DirectoryStream:
    """What opendir(3) returns. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        assert self._stream, os.strerror(ctypes.get_errno())

    def read(self) -> tuple[bytes, int] | None:
        """Return the next name and its DT_* type; None at the end."""
        entry = _libc.readdir(self._stream)
        return (entry.contents.name, entry.contents.type) if entry else None

    def tell(self) -> int:
        """telldir(3)."""
        return int(_libc.telldir(self._stream))

    def seek(self, place: int) -> None:
        """seekdir(3)."""
        _libc.seekdir(self._stream, place)

    def rewind(self) -> None:
        """rewinddir(3)."""
        _libc.rewinddir(self._stream)

    def names(self) -> list[bytes]:
        """Return the names from here to the end, without `.` and `..`."""
        names = []
        while (entry := self.read()) is not None:
            names.append(entry[0])
        return [name for name in names if name not in (b".", b"..")]

    def __enter__(self) -> DirectoryStream:
        return self

    def __exit__(self, *exc: object) -> None:
        _libc.closedir(self._stream)


def error_of(action: Callable[[], object]) -> int:
    """Return the errno that `action` fails with, 0 if it does not."""
    try:
        action()
    except OSError as error:
        return error.errno or -1
    return 0


def attribute(path: Path, name: str) -> str:
    """Return one `user.ctx.*` attribute as text."""
    return os.getxattr(path, f"user.ctx.{name}").decode()


def wait_sealed(path: Path) -> None:
    """Return when the block is sealed; that follows close after a moment."""
    wait_until(lambda: attribute(path, "state") == "sealed")
