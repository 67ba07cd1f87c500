"""The mount table, and what is in the way of a mount: stale, hung or live ones."""

import ctypes
import enum
import errno
import logging
import os
import re
import select
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ctxfs.errors import ConfigError, CtxfsError, DeviceBusy

log = logging.getLogger(__name__)

SUBTYPE = "ctxfs"  # the kernel shows our mounts as fuse.ctxfs
PROBE_SECONDS = 5.0  # a mount that has not answered `stat` by then hangs
MNT_DETACH = 2


@dataclass(frozen=True, slots=True)
class MountInfo:
    """One line of /proc/self/mountinfo (proc(5))."""

    path: Path
    fstype: str
    source: str
    options: frozenset[str]
    device: str  # major:minor
    user_id: int | None = None  # who mounted it, where it is FUSE

    @property
    def is_fuse(self) -> bool:
        return self.fstype == "fuse" or self.fstype.startswith("fuse.")

    @property
    def is_ours(self) -> bool:
        return self.fstype == f"fuse.{SUBTYPE}"


class Answer(enum.Enum):
    """How a mount takes a `stat`."""

    LIVE = "live"
    STALE = "stale"  # its daemon is gone
    HUNG = "hung"  # its daemon is there and does not answer


def mount_table(text: str | None = None) -> list[MountInfo]:
    """All mounts of this process, or of a given mountinfo text, oldest first."""
    if text is None:
        text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    return [_mount_info(line) for line in text.splitlines() if " - " in line]


def mount_at(path: Path, text: str | None = None) -> MountInfo | None:
    """The mount whose root is seen at `path`: the last one put there."""
    wanted = resolved(path)
    found = [mount for mount in mount_table(text) if mount.path == wanted]
    return found[-1] if found else None


def resolved(path: Path) -> Path:
    """The absolute path without links, found without asking what is mounted at its end.

    Looking at a mount point itself could hang. So its last component is taken as it is.
    """
    absolute = Path(os.path.abspath(path))
    return Path(os.path.realpath(absolute.parent)) / absolute.name


def probe(path: Path, seconds: float = PROBE_SECONDS) -> Answer:
    """Ask a mount for its room, which the kernel does not cache, as it may what its root is.

    A mount that hangs costs another process, never this one.
    """
    script = "import os,sys\ntry: os.statvfs(sys.argv[1])\nexcept OSError as e: sys.exit(e.errno)"
    arguments = [sys.executable, "-I", "-S", "-c", script, os.fspath(path)]
    pid = os.posix_spawn(sys.executable, arguments, os.environ)
    pidfd = os.pidfd_open(pid)
    try:
        if not _ended(pidfd, seconds):
            os.kill(pid, signal.SIGKILL)
            # A process the kernel holds in the mount cannot be killed; it is not waited for.
            if _ended(pidfd, 1.0):
                os.waitpid(pid, 0)
            return Answer.HUNG
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(pidfd)
    gone = (errno.ENOTCONN, errno.ECONNABORTED)
    return Answer.STALE if os.waitstatus_to_exitcode(status) in gone else Answer.LIVE


def is_stale(path: Path) -> bool:
    """Whether a FUSE mount is left here whose daemon is gone."""
    mount = mount_at(path)
    return mount is not None and mount.is_fuse and probe(path) is Answer.STALE


def clear_stale(path: Path) -> None:
    """Take a stale mount away. Raises ConfigError where this user may not."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(resolved(path)), MNT_DETACH) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigError(f"{path}: the stale mount there cannot be cleared: {reason}")
    else:
        command = ["fusermount3", "-u", "-z", "--", os.fspath(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = " ".join(done.stderr.split())
            raise ConfigError(f"{path}: the stale mount there cannot be cleared: {reason}")
    log.warning("cleared the mount that an ended daemon left at %s", path)


def obstacle(path: Path) -> CtxfsError | None:
    """Why this user cannot mount at `path`, or None.

    A stale mount that the user may clear is no reason. What lies beneath is hidden by it, and
    only known once it is cleared.
    """
    mount = mount_at(path)
    if mount is not None and mount.is_fuse:
        answer = probe(path)
        if answer is Answer.HUNG:
            return DeviceBusy(
                f"{path}: the {mount.fstype} mount there does not answer; "
                f"end its daemon, then run: umount -l {path}"
            )
        if answer is Answer.STALE:
            return _unclearable(path, mount)
        if mount.is_ours:
            return DeviceBusy(f"{path}: ctxfs is mounted there already")
        if not _is_empty(path):
            return DeviceBusy(f"{path}: {mount.fstype} ({mount.source}) is mounted there")
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ConfigError(f"{path}: the mount point does not exist; make it with: mkdir -p {path}")
    except OSError as error:
        return ConfigError(f"{path}: {error.strerror}")
    if not stat.S_ISDIR(found.st_mode):
        return ConfigError(f"{path}: the mount point is not a directory")
    if (uid := os.geteuid()) != 0:
        if not os.access(path, os.W_OK):
            return ConfigError(f"{path}: an ordinary user mounts only where it may write")
        if found.st_mode & stat.S_ISVTX and found.st_uid != uid:
            return ConfigError(
                f"{path}: is sticky and not this user's, so it may not mount there; "
                f"make a directory in it with: mkdir {path / 'ctx'}"
            )
    return None


def _unclearable(path: Path, mount: MountInfo) -> ConfigError | None:
    if os.geteuid() in (0, mount.user_id):
        return None
    return ConfigError(
        f"{path}: the stale {mount.fstype} mount there is another user's; "
        f"let that user or root run: umount {path}"
    )


def prepare(path: Path) -> None:
    """Make sure a mount can be put at `path`: stale ones go, live ones are refused."""
    while is_stale(path):
        clear_stale(path)
    if (reason := obstacle(path)) is not None:
        raise reason


def _is_empty(directory: Path) -> bool:
    try:
        return not any(directory.iterdir())
    except OSError:
        return False  # somebody's, and not to be looked into


def _ended(pidfd: int, seconds: float) -> bool:
    readable, _, _ = select.select([pidfd], [], [], seconds)
    return bool(readable)


def _mount_info(line: str) -> MountInfo:
    front, _, back = line.partition(" - ")
    _, _, device, _, path, options, *_ = front.split(" ")
    fstype, source, details = back.split(" ")
    user = re.search(r"\buser_id=(\d+)", details)
    return MountInfo(
        path=Path(_unescaped(path)),
        fstype=_unescaped(fstype),
        source=_unescaped(source),
        options=frozenset(options.split(",")),
        device=device,
        user_id=int(user[1]) if user else None,
    )


def _unescaped(text: str) -> str:
    """Octal escapes of mountinfo: space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
