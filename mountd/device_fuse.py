"""/dev/fuse: the only one that opens it, mounts with it, and hands it backing files."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ctxfs.device import mounts
from ctxfs.errors import ConfigError

DEVICE = Path("/dev/fuse")
KIND = "fuse.ctxfs"
FUSERMOUNT = "fusermount3"
COMM_FD = "_FUSE_COMMFD"  # fusermount3(1): the socket over which it hands back the descriptor
PAGES_LIMIT = Path("/proc/sys/fs/fuse/max_pages_limit")
PAGES_LIMIT_BEFORE = 256  # what kernels without that setting (before 6.13) take at most
PAGES_WANTED = 1024  # 4 MiB: longer requests gain nothing and take memory for each that waits

# linux/fuse.h: _IOW(229, 1, struct fuse_backing_map {s32 fd; u32 flags; u64 padding}), and
# _IOW(229, 2, u32)
BACKING_OPEN = 0x4010E501
BACKING_CLOSE = 0x4004E502
_BACKING_MAP = struct.Struct("=iIQ")
_BACKING_ID = struct.Struct("=I")
_NOTIFY = struct.Struct("=IiQ")  # struct fuse_out_header: length, code, 0
NOTIFY_RESEND = 7

# What a read says when the mount was ended, or its connection aborted.
ENDED = (errno.ENODEV, errno.ECONNABORTED)
# No request there, or none any more: its caller was killed while we reached for it.
NOTHING = (errno.EAGAIN, errno.EINTR, errno.ENOENT)


class FuseDevice:
    """A mount, by its open descriptor of /dev/fuse."""

    def __init__(self, fd: int, point: Path) -> None:
        self.fd = fd
        self.point = point
        self.ended = False  # from outside
        os.set_blocking(fd, False)

    def read(self, buffer: bytearray) -> int | None:
        """Read one request; its length, or None if there is none now. 0: the mount has ended."""
        try:
            return os.readv(self.fd, (buffer,))
        except OSError as error:
            if error.errno in NOTHING:
                return None
            if error.errno in ENDED:
                self.ended = True
                return 0
            raise

    def answer(self, *pieces: bytes | memoryview) -> None:
        """Write one answer. That nobody waits for it any more is no error."""
        try:
            os.writev(self.fd, pieces)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *ENDED):
                raise

    def open_backing(self, fd: int) -> int:
        """Register a file for passthrough and return its id. Raises OSError.

        What is registered is a descriptor that only reads: clients' opens get their own rights all
        the same, and the registration does not count among those who may write the file.
        """
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The id comes back as the result only if the buffer may be changed.
            buffer = bytearray(_BACKING_MAP.pack(reading, 0, 0))
            number: int = fcntl.ioctl(self.fd, BACKING_OPEN, buffer, True)
        finally:
            os.close(reading)
        return number

    def close_backing(self, number: int) -> None:
        """Take a registered file back; the kernel keeps it for those who still use it.

        One that is not registered (any more) is none.
        """
        try:
            fcntl.ioctl(self.fd, BACKING_CLOSE, _BACKING_ID.pack(number))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def resend(self) -> None:
        """Have the kernel repeat every request that was read and not answered (Linux 6.9)."""
        os.write(self.fd, _NOTIFY.pack(_NOTIFY.size, NOTIFY_RESEND, 0))

    def close(self) -> None:
        """End the mount, if it has not been from outside; who uses it gets ENOTCONN."""
        os.close(self.fd)
        if self.ended:
            return
        if os.geteuid() == 0:
            mounts.unmount(self.point, lazily=True)
        else:
            command = (FUSERMOUNT, "-u", "-q", "-z", "--", os.fspath(self.point))
            subprocess.run(command, check=False)


def is_mounted(fd: int) -> bool:
    """Whether a descriptor of /dev/fuse has a mount that was not ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def max_pages() -> int:
    """Return how many pages of 4096 bytes one request may have here."""
    try:
        limit = int(PAGES_LIMIT.read_text())
    except (OSError, ValueError):
        limit = PAGES_LIMIT_BEFORE
    return min(limit, PAGES_WANTED)


def mount(point: Path, *, fsname: str, allow_other: bool, privileged: bool) -> FuseDevice:
    """Mount at `point`, by mount(2) or else through fusermount3. Raises ConfigError."""
    options = ["default_permissions"]
    if allow_other:
        options.append("allow_other")
    try:
        if privileged:
            fd = _mount(point, fsname, options)
        else:
            fd = _mount_by_helper(point, fsname, options)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot mount at {point}: {reason}; see ctx doctor") from error
    return FuseDevice(fd, point)


def _mount(point: Path, fsname: str, options: Sequence[str]) -> int:
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    told = [f"fd={fd}", "rootmode=40000", f"user_id={os.getuid()}", f"group_id={os.getgid()}"]
    try:
        flags = mounts.MS_NOSUID | mounts.MS_NODEV
        mounts.mount(point, KIND, fsname, ",".join([*told, *options]), flags)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mount_by_helper(point: Path, fsname: str, options: Sequence[str]) -> int:
    told = ["rw", "nosuid", "nodev", f"fsname={fsname}", "subtype=ctxfs", *options]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        command = (FUSERMOUNT, "-o", ",".join(told), "--", os.fspath(point))
        done = subprocess.run(
            command,
            env={**os.environ, COMM_FD: str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
        if done.returncode != 0:
            raise OSError(errno.EPERM, " ".join(done.stderr.split()) or "fusermount3 failed")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        raise OSError(errno.EPROTO, "fusermount3 handed no descriptor back")
    os.set_inheritable(fds[0], False)
    return fds[0]
