"""The room of a tier in memory: a private directory there that outlives the daemon.

Where we may mount, it is a tmpfs of our own, with huge pages and a size; elsewhere a directory in
a tmpfs that is there. Nothing is removed when the process dies: the next one finds the same room,
since its place depends on the state directory alone.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from ctxfs.device import mounts
from ctxfs.errors import ConfigError, DeviceBusy, unusable

SOURCE = "ctxfs-{}"  # what mountinfo shows as the device: so we know our own
HOT, WARM = "hot", "warm"  # names of rooms
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
SHARED_MEMORY = Path("/dev/shm")
_INODES_SPARE = 1 << 16  # beside one for each page of data: empty blocks, directories, the journal
_PAGE = 4096


@dataclass(slots=True)
class Room:
    """A directory, mode 0700, that is ours alone while `dirfd` is open."""

    path: Path
    dirfd: int
    mounted: bool  # a tmpfs of its own, whose size the kernel enforces
    huge: bool  # its files get huge pages
    is_adopted: bool  # it was there before: blocks of an earlier life may be in it
    size_bytes: int  # what it can hold; of a tmpfs of our own the limit, else what was asked for

    def close(self) -> None:
        """Let go of it and leave everything for the next life. Safe to call twice."""
        if self.dirfd >= 0:
            os.close(self.dirfd)
            self.dirfd = -1

    def remove(self) -> None:
        """Give all of its memory back; what others have open or mapped lives until they let go."""
        self.close()
        if not self.mounted:
            shutil.rmtree(self.path)
            return
        try:
            mounts.unmount(self.path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            mounts.unmount(self.path, lazily=True)
        self.path.rmdir()


def prepare(state: Path, size_bytes: int, huge: str = "within_size", *, name: str = HOT) -> Room:
    """The room of this name of the daemon whose state directory is `state`, which must exist.

    `huge` is tmpfs's option of that name: never, always, within_size, advise. Raises ConfigError
    if there is no place for `size_bytes`, or somebody else's directory is in the way; NoRoom if
    not even an empty directory has room; DeviceBusy if another daemon has it.
    """
    state = state.resolve()
    if not state.is_dir():
        raise ConfigError(f"{state}: the state directory does not exist")
    room = _mounted_room(state / name, size_bytes, huge) if os.geteuid() == 0 else None
    return room or _plain_room(state, size_bytes, name)


def discard(state: Path, name: str) -> None:
    """Remove the room of this name, if an earlier daemon left one. Harmless where none is."""
    path = state.resolve() / name
    there = mounts.mount_at(path)
    if there is not None and there.kind == "tmpfs" and there.source == SOURCE.format(name):
        mounts.unmount(path, lazily=True)
        path.rmdir()
    try:
        plain = plain_place(state.resolve(), 0, name)
    except ConfigError:
        return
    if plain.is_dir() and plain.stat().st_uid == os.geteuid():
        shutil.rmtree(plain, ignore_errors=True)


def _mounted_room(path: Path, size_bytes: int, huge: str) -> Room | None:
    """A tmpfs of our own, or None where even root may not mount."""
    source = SOURCE.format(path.name)
    there = mounts.mount_at(path)
    if there and (there.kind != "tmpfs" or there.source != source):
        raise ConfigError(f"{path}: a {there.kind} ({there.source}) is mounted there")
    made = not there and _make_private(path)
    # The lock comes before the change of size: the room may be another daemon's.
    dirfd = _open_private(path) if there else -1
    try:
        got_huge = _mount(path, size_bytes, huge, remount=there is not None)
    except BaseException as error:
        if there:
            os.close(dirfd)
        if made:
            path.rmdir()
        if isinstance(error, PermissionError):
            return None
        raise
    if not there:
        dirfd = _open_private(path)
    usage = os.fstatvfs(dirfd)
    return Room(
        path=path,
        dirfd=dirfd,
        mounted=True,
        huge=got_huge,
        is_adopted=there is not None,
        size_bytes=usage.f_blocks * usage.f_frsize,
    )


def _mount(path: Path, size_bytes: int, huge: str, *, remount: bool) -> bool:
    """Mount or change the tmpfs with the best options the kernel takes; whether pages are huge.

    A tmpfs that holds more than `size_bytes` keeps its size, and its reader sees that in
    `Room.size_bytes`.
    """
    source = SOURCE.format(path.name)
    inodes = size_bytes // _PAGE + _INODES_SPARE
    limits = [f"mode=0700,size={size_bytes},nr_inodes={inodes}"]
    if remount:
        limits.append("mode=0700")
    wants_huge = huge != "never" and HUGE_PAGES.is_dir()
    for limit in limits:
        for pages in (f",huge={huge}", "") if wants_huge else ("",):
            # Whether it may be swapped out (Linux 6.4) cannot be changed later: both are tried.
            for swap in (",noswap", ""):
                try:
                    mounts.mount_tmpfs(path, source, limit + pages + swap, remount=remount)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                else:
                    return bool(pages) and not _huge_denied()
    raise ConfigError(f"{path}: the kernel takes no tmpfs of {size_bytes} bytes")


def _huge_denied() -> bool:
    """The administrator's switch that overrides all mounts."""
    try:
        return "[deny]" in (HUGE_PAGES / "shmem_enabled").read_text()
    except OSError:
        return True


def _plain_room(state: Path, size_bytes: int, name: str) -> Room:
    """A directory in a tmpfs that is there; nothing but our own counting limits its size."""
    path = plain_place(state, size_bytes, name)
    made = _make_private(path)
    return Room(
        path=path,
        dirfd=_open_private(path),
        mounted=False,
        huge=False,
        is_adopted=not made,
        size_bytes=size_bytes,
    )


def plain_place(state: Path, size_bytes: int, name: str = HOT) -> Path:
    """Where the room is that is no tmpfs of its own. Nothing is made; `state` must exist.

    Raises ConfigError where there is no tmpfs, or none that can hold `size_bytes`.
    """
    if mounts.is_tmpfs(state):
        path = state / name
    else:
        # A hash that every process computes alike, so that the next life finds it.
        digest = hashlib.blake2b(os.fsencode(state), digest_size=8).hexdigest()
        ending = "" if name == HOT else f"-{name}"
        path = SHARED_MEMORY / f"ctxfs-{os.geteuid()}-{digest}{ending}"
        if not path.parent.is_dir() or not mounts.is_tmpfs(path.parent):
            raise ConfigError(
                f"no tmpfs for the {name} tier: {path.parent} is none, and we may not mount one"
            )
    usage = os.statvfs(path.parent)
    if (capacity := usage.f_blocks * usage.f_frsize) and capacity < size_bytes:
        raise ConfigError(
            f"the {name} tier is to hold {size_bytes} bytes, {path.parent} holds {capacity}: "
            f"make the one smaller or the other larger (a container's --shm-size)"
        )
    return path


def _make_private(path: Path) -> bool:
    """Whether the directory is new. Raises ConfigError, or NoRoom where it cannot be made."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise unusable(str(path), error) from None
    return True


def _open_private(path: Path) -> int:
    """The directory's descriptor, with an exclusive lock.

    Others may write to its parent: what is there must be a directory, not a link to one, ours,
    and closed to everybody else.
    """
    try:
        dirfd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; remove what is there") from error
    try:
        found = os.fstat(dirfd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{path} is not private to us; remove what is there")
        fcntl.flock(dirfd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(dirfd)
        raise DeviceBusy(f"{path} is in use by another daemon") from None
    except BaseException:
        os.close(dirfd)
        raise
    return dirfd
