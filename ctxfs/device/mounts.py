"""What is mounted where, and the two system calls that change it."""

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 2, 4, 8, 32, 1024  # linux/mount.h
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
TMPFS_MAGIC = 0x01021994  # linux/magic.h
_STATFS_BYTES = 256  # more than struct statfs has anywhere; its first field is a long, f_type


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    device: str  # "major:minor"
    point: str
    kind: str  # file system type
    source: str


def parse_mountinfo(text: str) -> list[Mount]:
    """Mounts in the order in which they were made: where two have one point, the last one shows."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        found.append(Mount(fields[2], _plain(fields[4]), rest[0], _plain(rest[1])))
    return found


def _plain(text: str) -> str:
    """Space, tab, newline and backslash are written as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mounts() -> list[Mount]:
    return parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))


def mount_at(point: Path) -> Mount | None:
    """What is mounted on `point`, a resolved path."""
    there = [mount for mount in mounts() if mount.point == str(point)]
    return there[-1] if there else None


def use_of(device: Path) -> str:
    """What keeps others from a block device, as far as one can see: "mounted on /data"."""
    number = device.stat().st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    for mount in mounts():
        if mount.device == name:
            return f"mounted on {mount.point}"
    try:
        holders = sorted(os.listdir(f"/sys/dev/block/{name}/holders"))
    except OSError:
        holders = []
    if holders:
        return f"used by {', '.join(holders)}"
    return "used by another program, or part of it is mounted"


def mount(point: Path, kind: str, source: str, options: str, flags: int) -> None:
    """Mount a file system of some kind on `point`; `options` are its own. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    told = os.fsencode(source), os.fsencode(point), kind.encode()
    if libc.mount(*told, ctypes.c_ulong(flags), options.encode()):
        _raise(point)


def mount_tmpfs(point: Path, source: str, options: str, *, remount: bool = False) -> None:
    """Mount, or change, a tmpfs on `point`. Raises OSError."""
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | (MS_REMOUNT if remount else 0)
    mount(point, "tmpfs", source, options, flags)


def unmount(point: Path, *, lazily: bool = False, forced: bool = False) -> None:
    """Unmount `point`; lazily: at once for everybody, for good when the last file is closed.

    Forced: FUSE answers whoever waits for it with an error, and nobody from then on.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if lazily else 0) | (MNT_FORCE if forced else 0)
    if libc.umount2(os.fsencode(point), flags):
        _raise(point)


def is_tmpfs(path: Path) -> bool:
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), answer):
        _raise(path)
    return ctypes.c_long.from_buffer(answer).value == TMPFS_MAGIC


def _raise(path: Path) -> None:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(path))
