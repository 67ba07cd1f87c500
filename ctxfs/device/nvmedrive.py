"""Finding, claiming and describing the NVMe namespace behind a device node.

The kernel shows a namespace as a block device, /dev/nvmeXnY, and as a command device, /dev/ngXnY.
Nobody asks who has the command device open, and what is written through it a mounted file system
does not see. So the block device is claimed (O_EXCL) as long as commands are sent: nobody mounts
it meanwhile, and whoever uses it already, or a partition of it, keeps us out.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxfs.device import mounts
from ctxfs.errors import ConfigError, DeviceBusy

SYS = Path("/sys")
DEV = Path("/dev")
SECTOR = 512  # the unit of sizes in /sys, whatever the drive's own blocks are, bytes
BLOCKS_MAX = 1 << 16  # that one command can name

_IOCTL_ID = 0x4E40  # _IO('N', 0x40)
_IOCTL_ADMIN_COMMAND = 0xC0484E41  # _IOWR('N', 0x41, struct nvme_passthru_cmd)
# struct nvme_passthru_cmd: as nvme_uring_cmd, but that the result comes in the last field.
_ADMIN = struct.Struct("=BBHIIIQQII6III")
_IDENTIFY, _IDENTIFY_NAMESPACE, _IDENTIFY_BYTES = 6, 0, 4096

# Identify Namespace: size in blocks at 0; at 26 the number of the format in use, whose entry (size
# of metadata, log2 of the block size, speed) lies in the table at 128.
_FORMAT_AT, _FORMATS_AT = 26, 128
_FORMAT = struct.Struct("<HBB")


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a drive says of one namespace. Sizes in bytes."""

    number: int
    size_bytes: int
    block_bytes: int
    metadata_bytes: int  # beside each block


@dataclass(frozen=True, slots=True)
class Drive:
    """An open namespace that is ours alone."""

    path: Path  # the command device
    fd: int
    claim_fd: int  # the block device, held so that nobody else takes it
    namespace: Namespace
    command_bytes_max: int

    def close(self) -> None:
        """Let go of it. Call once."""
        os.close(self.fd)
        os.close(self.claim_fd)


def parse_namespace(number: int, page: bytes) -> Namespace:
    """`page`: the answer to Identify Namespace."""
    (blocks,) = struct.unpack_from("<Q", page)
    chosen = page[_FORMAT_AT]
    at = (chosen & 0xF | (chosen >> 1) & 0x30) * _FORMAT.size
    metadata_bytes, exponent, _ = _FORMAT.unpack_from(page, _FORMATS_AT + at)
    return Namespace(number, blocks << exponent, 1 << exponent, metadata_bytes)


def is_command_device(path: Path) -> bool:
    """Whether `path` is there, and is /dev/ngXnY by whatever name."""
    try:
        return bool(re.fullmatch(r"ng\d+n\d+", _kernel_name(path)))
    except OSError:
        return False


def size_bytes(path: Path, sys: Path = SYS) -> int:
    """The size of the namespace behind a command device. Raises ConfigError."""
    block = sys / "class/block" / _names(path)[1]
    return _number(path, block / "size") * SECTOR


def open_drive(path: Path) -> Drive:
    """Claim the namespace whose command device, or block device, is `path`.

    Raises ConfigError where it cannot be used as it is, DeviceBusy where somebody else uses it.
    """
    command_name, block_name = _names(path)
    block, command = DEV / block_name, DEV / command_name
    _check_plain(path, SYS / "class/block" / block_name)
    with contextlib.ExitStack() as undo:
        claim_fd = _claim(path, block)
        undo.callback(os.close, claim_fd)
        try:
            # What others wrote through the page cache must not come after what we write.
            os.fsync(claim_fd)
            fd = os.open(command, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            namespace = _identify(fd)
        except OSError as error:
            raise ConfigError(f"{command}: {_why(error)}") from error
        _check_blocks(command, namespace)
        limit = command_bytes_max(path, SYS / "class/block" / block_name, namespace.block_bytes)
        undo.pop_all()
    return Drive(command, fd, claim_fd, namespace, limit)


def command_bytes_max(path: Path, block: Path, block_bytes: int) -> int:
    """What one command may move; `block` is the block device's directory in /sys.

    The kernel cuts no command: what is larger it refuses. A page in memory may be a segment of its
    own.
    """
    queue = block / "queue"
    limits = (
        _number(path, queue / "max_hw_sectors_kb") << 10,
        _number(path, queue / "max_segments") * mmap.PAGESIZE,
        BLOCKS_MAX * block_bytes,
    )
    found = min(limits)
    return found - found % mmap.PAGESIZE


def partitions(block: Path) -> Iterator[str]:
    """Names of the partitions of the block device whose directory in /sys is `block`."""
    yield from sorted(each.parent.name for each in block.glob("*/partition"))


def _names(path: Path) -> tuple[str, str]:
    """The kernel's names of both devices of the namespace behind `path`. Raises ConfigError."""
    try:
        name = _kernel_name(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    found = re.fullmatch(r"(ng|nvme)(\d+n\d+)", name)
    if found is None:
        if re.fullmatch(r"nvme\d+n\d+p\d+", name):
            raise ConfigError(f"{path} is a partition; NVMe commands take a whole drive")
        raise ConfigError(f"{path} is no NVMe namespace (/dev/ngXnY or /dev/nvmeXnY)")
    return f"ng{found[2]}", f"nvme{found[2]}"


def _kernel_name(path: Path) -> str:
    """What /sys calls the device behind a node; empty for what is none. Raises OSError."""
    found = path.stat()
    kinds = {stat.S_IFCHR: "char", stat.S_IFBLK: "block"}
    kind = kinds.get(stat.S_IFMT(found.st_mode))
    if kind is None:
        return ""
    number = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return os.path.basename(os.path.realpath(SYS / "dev" / kind / number))


def _check_plain(path: Path, block: Path) -> None:
    if not block.exists():
        raise ConfigError(f"{path} has no block device, {block.name}: it is no plain namespace")
    if parts := list(partitions(block)):
        raise ConfigError(
            f"{path} is partitioned ({', '.join(parts)}); NVMe commands take a whole drive: "
            f"name another, or clear this one with `wipefs -a /dev/{block.name}`"
        )
    if _text(block / "ro") == "1":
        raise ConfigError(f"{path} is read-only")
    if _text(block / "queue/zoned") not in ("", "none"):
        raise ConfigError(f"{path} is zoned: it cannot be written in any order")


def _claim(path: Path, block: Path) -> int:
    try:
        return os.open(block, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: {block} is not here; it is needed too, to keep others from the drive"
        ) from None
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise DeviceBusy(f"{path}: {block} is {mounts.use_of(block)}") from error
        raise ConfigError(f"{block} cannot be opened: {_why(error)}") from error


def _identify(fd: int) -> Namespace:
    """Raises OSError."""
    number = fcntl.ioctl(fd, _IOCTL_ID)
    with mmap.mmap(-1, _IDENTIFY_BYTES) as page:
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(page))
        # fmt: off
        command = bytearray(_ADMIN.pack(
            _IDENTIFY, 0, 0, number, 0, 0, 0, address, 0, _IDENTIFY_BYTES,
            _IDENTIFY_NAMESPACE, 0, 0, 0, 0, 0, 0, 0,
        ))
        # fmt: on
        if status := fcntl.ioctl(fd, _IOCTL_ADMIN_COMMAND, command):
            raise OSError(errno.EIO, f"Identify Namespace failed: NVMe status {status:#x}")
        return parse_namespace(number, page[:])


def _check_blocks(command: Path, namespace: Namespace) -> None:
    if namespace.metadata_bytes:
        raise ConfigError(
            f"{command} keeps {namespace.metadata_bytes} bytes of metadata beside each block, "
            "which is not supported: format it without (nvme format --lbaf)"
        )
    if namespace.block_bytes not in (512, 1024, 2048, 4096):
        raise ConfigError(
            f"{command} has blocks of {namespace.block_bytes} bytes, which is not supported: "
            "512 to 4096 are (nvme format --lbaf)"
        )


def _why(error: OSError) -> str:
    reasons = {
        errno.EACCES: "you may not read and write it",
        errno.EPERM: "you may not read and write it",
        errno.ENXIO: "there is no device behind it",
        errno.ENODEV: "there is no device behind it",
    }
    return reasons.get(error.errno or 0, error.strerror or str(error))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(path: Path, file: Path) -> int:
    text = _text(file)
    if not text.isdigit():
        raise ConfigError(f"{path}: {file} does not say how the drive may be used")
    return int(text)
