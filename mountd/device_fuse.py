"""/dev/fuse: the only one that opens it, mounts with it, and hands it backing files."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ctxfs.device import mounts
from ctxfs.errors import ConfigError
from mountd.mounts import resolved

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
    """A mount, by its open descriptor of /dev/fuse.

    `shared`: a parent holds the descriptor too, so that closing ours ends nothing. `adopted`: it
    was mounted already, by a process that is gone.
    """

    def __init__(
        self, fd: int, point: Path, *, shared: bool = False, adopted: bool = False
    ) -> None:
        self.fd = fd
        self.point = point
        self.shared = shared
        self.adopted = adopted
        self.ended = False  # from outside
        os.set_blocking(fd, False)
        self._readable = select.poll()
        self._readable.register(fd, select.POLLIN)

    def has_request(self) -> bool:
        """Whether a request is there to be read now, or the mount ended."""
        return bool(self._readable.poll(0))

    def wait_briefly(self, longest_ns: int) -> bool:
        """Look again and again for a request; whether one came, or the mount ended.

        Being woken takes longer than the next request of the same caller takes to come. Whoever
        else wants this processor gets it between two looks.
        """
        until_ns = time.monotonic_ns() + longest_ns
        while time.monotonic_ns() < until_ns:
            os.sched_yield()
            if self._readable.poll(0):
                return True
        return False

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

    def notify(self, notice: bytes) -> None:
        """Tell the kernel something unasked. That it knows nothing of it is no error."""
        try:
            os.write(self.fd, notice)
        except OSError as error:
            # EINVAL: the connection was aborted.
            if error.errno not in (errno.ENOENT, errno.EINVAL, *ENDED):
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

    def leave(self) -> None:
        """Let go without ending a shared mount: whoever comes next answers what waits."""
        if self.shared:
            os.close(self.fd)
        else:
            self.close()

    def close(self) -> None:
        """End the mount, if it has not been from outside; who uses it gets ENOTCONN."""
        os.close(self.fd)
        if self.ended:
            return
        if self.shared:
            end(self.point)
        elif os.geteuid() == 0:
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


def open_device() -> int:
    """Open /dev/fuse, to mount with. Raises OSError."""
    return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)


def is_unused(fd: int) -> bool:
    """Whether nothing was ever mounted with this descriptor. Takes no request from it."""
    try:
        os.read(fd, 1)  # of a mount this is EINVAL: no request is as short
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def mounted_at(point: Path) -> str | None:
    """The device number of our mount that shows at `point`, or None."""
    found = mounts.mount_at(resolved(point))
    return found.device if found is not None and found.kind == KIND else None


def end(point: Path) -> None:
    """End the mount at `point` for everybody: who uses it, or waits for it, gets ENOTCONN.

    That it does not show there any more is no error: it was unmounted lazily.
    """
    try:
        mounts.unmount(point, lazily=True, forced=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def mount(
    point: Path, *, fsname: str, allow_other: bool, privileged: bool, fd: int | None = None
) -> FuseDevice:
    """Mount at `point`, by mount(2) or else through fusermount3. Raises ConfigError.

    With `fd`, a descriptor of /dev/fuse that a parent holds too: by mount(2) with that, or, if it
    is mounted already, not at all.
    """
    if fd is not None and not is_unused(fd):
        return FuseDevice(fd, point, shared=True, adopted=True)
    options = ["default_permissions"]
    if allow_other:
        options.append("allow_other")
    try:
        if fd is not None:
            _mount_with(fd, point, fsname, options)
            return FuseDevice(fd, point, shared=True)
        if privileged:
            fd = _mount(point, fsname, options)
        else:
            fd = _mount_by_helper(point, fsname, options)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot mount at {point}: {reason}; see ctx doctor") from error
    return FuseDevice(fd, point)


def _mount_with(fd: int, point: Path, fsname: str, options: Sequence[str]) -> None:
    told = [f"fd={fd}", "rootmode=40000", f"user_id={os.getuid()}", f"group_id={os.getgid()}"]
    flags = mounts.MS_NOSUID | mounts.MS_NODEV
    mounts.mount(point, KIND, fsname, ",".join([*told, *options]), flags)


def _mount(point: Path, fsname: str, options: Sequence[str]) -> int:
    fd = open_device()
    try:
        _mount_with(fd, point, fsname, options)
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
