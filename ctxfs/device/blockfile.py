"""Opening a raw device, or a preallocated file, for direct I/O, and choosing the engine."""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import trio

from ctxfs.device import mounts, nvmedrive, uring
from ctxfs.device.nvme import NvmeCommands
from ctxfs.device.queues import WHOLE_BYTES, request_bytes_max
from ctxfs.device.requests import Target, block_device_size
from ctxfs.device.ringengine import UringEngine
from ctxfs.device.threads import ThreadEngine
from ctxfs.errors import ConfigError, DeviceBusy

ALIGNMENT = 4096  # of everything we write; devices that want more are refused, bytes
SIZE_MIN = 16 << 20  # below this there is no room for a log in segments, bytes
_BUSY_SECONDS = 3.0  # from being refused as busy to giving up

_BLKSSZGET = 0x1268  # _IO(0x12, 104)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO = struct.Struct("=II")  # memory and offset alignment, at byte 152; mask at byte 0
_STATX_DIO_AT = 152

_OPEN_REFUSALS = {
    errno.EACCES: "you may not read and write it",
    errno.EPERM: "you may not read and write it",
    errno.EROFS: "it is on a read-only file system",
    errno.ENXIO: "there is no device behind it",
    errno.ENODEV: "there is no device behind it",
    errno.EISDIR: "it is a directory; name a file or a block device",
}


@dataclass(frozen=True, slots=True)
class OpenedDevice:
    """A device or file that is ours alone until `close`. Sizes in bytes.

    `engine.run` must be running, in a nursery that outlives every user of the engine, while
    requests are made.
    """

    path: Path
    engine: UringEngine | ThreadEngine
    fd: int
    is_block_device: bool
    size_bytes: int  # what may be used, a multiple of `alignment`
    alignment: int
    logical_block_size: int  # the smallest unit the medium itself knows
    direct: bool  # False: this file system has no O_DIRECT, the page cache lies between
    why_not_uring: str | None  # None with io_uring; otherwise why not, for people
    drive: nvmedrive.Drive | None = None  # an NVMe drive that takes commands; it owns `fd`

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry requests until cancelled."""
        await self.engine.run(task_status=task_status)

    async def grow(self, size_bytes: int | None) -> int:
        """Use what was added behind its end; returns how much of it is used now.

        A file is preallocated up to `size_bytes`, where that is more than it has. None: all that is
        there. Raises ConfigError where there is not so much.
        """
        size = await trio.to_thread.run_sync(_size_now, self, size_bytes)
        if size > self.engine.size_bytes:
            self.engine.grow(size)
        return self.engine.size_bytes

    def close(self) -> None:
        """Let go of it, once `run` has ended. Call once."""
        self.engine.close()
        if self.drive is None:
            os.close(self.fd)
        else:
            self.drive.close()


@dataclass(frozen=True, slots=True)
class _Opened:
    target: Target
    logical_block_size: int
    direct: bool


async def open_engine(path: Path, size_bytes: int | None, *, engine: str = "auto") -> OpenedDevice:
    """Open `path` and choose how to do I/O on it: "auto", "io_uring", "threads" or "nvme".

    A missing file is made, mode 0600, and preallocated to `size_bytes`; a smaller one grows to it;
    a larger one, or one without a size given, is used as large as it is. Of a block device the
    first `size_bytes` are used, or all. An NVMe drive named by its command device (/dev/ngXnY), or
    with the engine "nvme", is sent commands, whole.

    Raises ConfigError for what can be mended (no size, no room, no right, too small, odd sectors,
    io_uring asked for and refused), DeviceBusy if somebody else uses it.
    """
    if engine not in ("auto", "io_uring", "threads", "nvme"):
        raise ConfigError(f'engine "{engine}": it is "auto", "io_uring", "threads" or "nvme"')
    if engine == "nvme" or nvmedrive.is_command_device(path):
        if engine in ("io_uring", "threads"):
            raise ConfigError(f'{path} takes NVMe commands only: engine must be "nvme" or "auto"')
        return await trio.to_thread.run_sync(_open_drive, path, size_bytes)
    opened = await _open_when_free(path, size_bytes)
    target = opened.target
    try:
        chosen, why_not = _choose(target, engine)
    except BaseException:
        os.close(target.fd)
        raise
    return OpenedDevice(
        path=path,
        engine=chosen,
        fd=target.fd,
        is_block_device=target.is_block_device,
        size_bytes=target.size_bytes,
        alignment=target.alignment,
        logical_block_size=opened.logical_block_size,
        direct=opened.direct,
        why_not_uring=why_not,
    )


async def _open_when_free(path: Path, size_bytes: int | None) -> _Opened:
    """A daemon that was killed holds it until the kernel has ended the last of its requests."""
    deadline = trio.current_time() + _BUSY_SECONDS
    while True:
        try:
            # Preallocation can take long.
            return await trio.to_thread.run_sync(_open, path, size_bytes)
        except DeviceBusy:
            if trio.current_time() >= deadline:
                raise
        await trio.sleep(_BUSY_SECONDS / 100)


def _choose(target: Target, engine: str) -> tuple[UringEngine | ThreadEngine, str | None]:
    if engine == "threads":
        return ThreadEngine(target), "threads were asked for"
    refusal = uring.probe()
    if refusal is None:
        try:
            return UringEngine(target, uring.Ring(uring.load_binding())), None
        except uring.UringUnavailable as error:
            refusal = str(error)
    if engine == "io_uring":
        raise ConfigError(f"io_uring was asked for, but: {refusal}")
    return ThreadEngine(target), refusal


def _open_drive(path: Path, size_bytes: int | None) -> OpenedDevice:
    """A drive that is sent NVMe commands; there is no other way to do that than io_uring."""
    try:
        ring = uring.Ring(uring.load_binding(), wide=True)
    except uring.UringUnavailable as error:
        raise ConfigError(
            f"{path}: NVMe commands go through io_uring, but: {error}; its block device needs none"
        ) from error
    with contextlib.ExitStack() as undo:
        undo.callback(ring.close)
        drive = nvmedrive.open_drive(path)
        undo.callback(drive.close)
        found = drive.namespace
        size = _usable_bytes(path, found.size_bytes, size_bytes)
        target = Target(drive.fd, str(path), size, ALIGNMENT, is_block_device=True)
        limit = drive.command_bytes_max
        commands = NvmeCommands(target, found.number, found.block_bytes, limit)
        engine = UringEngine(target, ring, commands)
        undo.pop_all()
    return OpenedDevice(
        path=path,
        engine=engine,
        fd=drive.fd,
        is_block_device=True,
        size_bytes=size,
        alignment=ALIGNMENT,
        logical_block_size=found.block_bytes,
        direct=True,
        why_not_uring=None,
        drive=drive,
    )


def _usable_bytes(path: Path, there_bytes: int, asked_bytes: int | None) -> int:
    """How much of a device is used, a multiple of `ALIGNMENT`."""
    if asked_bytes is not None and asked_bytes > there_bytes:
        raise ConfigError(
            f"{path}: {asked_bytes} bytes were asked for, the device has {there_bytes}"
        )
    size = there_bytes if asked_bytes is None else asked_bytes
    size -= size % ALIGNMENT
    if size < SIZE_MIN:
        raise ConfigError(f"{path}: {size} bytes are too few: {SIZE_MIN} at least")
    return size


def _open(path: Path, size_bytes: int | None) -> _Opened:
    if size_bytes is not None and size_bytes < SIZE_MIN:
        raise ConfigError(f"{path}: {size_bytes} bytes are too few: {SIZE_MIN} at least")
    created = False
    try:
        found = path.stat()
    except FileNotFoundError:
        if size_bytes is None:
            raise ConfigError(f"{path} does not exist; give it a size to have it made") from None
        created = True
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    else:
        if not stat.S_ISBLK(found.st_mode) and not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is neither a file nor a block device")
    fd, direct = _open_descriptor(path, os.O_CREAT | os.O_EXCL if created else 0)
    try:
        return _prepare(path, fd, size_bytes, direct=direct)
    except BaseException as error:
        if created and not isinstance(error, DeviceBusy):
            path.unlink(missing_ok=True)
        os.close(fd)
        raise


def _open_descriptor(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor for reading and writing, and whether it goes around the page cache."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    if path.is_block_device():
        flags |= os.O_EXCL  # refused while it is mounted, or part of something else
    try:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if flags & os.O_CREAT:
            # The file was made before its file system said that it has no O_DIRECT.
            flags &= ~os.O_EXCL
        return os.open(path, flags, 0o600), False
    except FileNotFoundError:
        raise ConfigError(f"{path}: the directory {path.parent} does not exist") from None
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise DeviceBusy(f"{path} is {mounts.use_of(path)}") from error
        why = _OPEN_REFUSALS.get(error.errno or 0, error.strerror)
        raise ConfigError(f"{path} cannot be opened: {why}") from error


def _prepare(path: Path, fd: int, size_bytes: int | None, *, direct: bool) -> _Opened:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DeviceBusy(f"{path} is in use by another daemon") from None
    found = os.fstat(fd)
    is_block_device = stat.S_ISBLK(found.st_mode)
    if is_block_device:
        size = block_device_size(fd)
        (unit,) = struct.unpack("=i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))
    else:
        size = size_bytes = _file_size(path, fd, size_bytes)
        unit = 1
    memory_unit, offset_unit = _direct_alignment(fd)
    unit = max(unit, offset_unit)
    if max(unit, memory_unit) > ALIGNMENT:
        raise ConfigError(
            f"{path}: it wants I/O in units of {max(unit, memory_unit)} bytes, "
            f"more than {ALIGNMENT}, which is not supported"
        )
    size = _usable_bytes(path, size, size_bytes)
    piece = request_bytes_max(found.st_rdev) if is_block_device else WHOLE_BYTES
    target = Target(fd, str(path), size, ALIGNMENT, is_block_device, piece)
    return _Opened(target, unit, direct)


def _size_now(device: OpenedDevice, size_bytes: int | None) -> int:
    """What may be used of an open device."""
    path, fd = device.path, device.fd
    try:
        if device.drive is not None:
            there = nvmedrive.size_bytes(path)
        elif device.is_block_device:
            there = block_device_size(fd)
        else:
            there = size_bytes = _file_size(path, fd, size_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: its size cannot be had: {error.strerror}") from error
    return _usable_bytes(path, there, size_bytes)


def _file_size(path: Path, fd: int, size_bytes: int | None) -> int:
    """The file's size, after it grew to `size_bytes` if it was smaller."""
    found = os.fstat(fd)
    if size_bytes is None or size_bytes <= found.st_size:
        return found.st_size
    room = os.fstatvfs(fd)
    free = room.f_bavail * room.f_frsize
    no_room = f"{path}: no room for {size_bytes} bytes: its file system has {free} free"
    # Asked beforehand: to fill the file system and then fail would hurt its other users.
    if size_bytes - found.st_blocks * 512 > free:
        raise ConfigError(no_room)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, found.st_size)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(no_room) from error
        raise ConfigError(f"{path} cannot be preallocated: {error.strerror}") from error
    return size_bytes


def _direct_alignment(fd: int) -> tuple[int, int]:
    """Memory and offset alignment of O_DIRECT in bytes, as far as the kernel says; else 1 and 1."""
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return 1, 1
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return 1, 1
    if not int.from_bytes(answer.raw[:4], "little") & _STATX_DIOALIGN:
        return 1, 1
    memory, offset = _STATX_DIO.unpack_from(answer, _STATX_DIO_AT)
    return max(1, memory), max(1, offset)
