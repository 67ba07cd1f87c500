"""Where the same work is done: the mount, plain tmpfs, the local file system."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.daemon import Daemon, check_fuse, remove_tree, unmount

CTXFS = "ctxfs"
DIRECT, PYFUSE3 = CHANNELS = ("direct", "pyfuse3")  # mounts of both in one run
OURS = (CTXFS, *CHANNELS)
PLAIN = "given"  # a directory that was given as the mount and is none
TMPFS = "tmpfs"
LOCAL = "local"
FIO = "fio"
TLS = "ctxfs-tls"
IPERF = "iperf3"
REDIS = "redis"
MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of our own on one kind of file system.

    `tiers`: ctxfs answers there. `medium`: what is there can be anywhere else than in memory.
    """

    name: str
    path: Path
    tiers: bool = False
    medium: bool = True


@contextlib.contextmanager
def workroom(parent: Path) -> Iterator[Path]:
    """A temporary directory on the local file system; everything in it goes away."""
    path = Path(tempfile.mkdtemp(prefix="ctxfs-bench-", dir=parent))
    try:
        yield path
    finally:
        remove_tree(path)


@contextlib.contextmanager
def own_mount(
    base: Path,
    arguments: list[str],
    *,
    name: str = CTXFS,
    environment: dict[str, str] | None = None,
) -> Iterator[Place]:
    """A daemon with all that it keeps in `base`; all of its mount is ours."""
    check_fuse()
    folder = base / name
    mount_point = folder / "ctx"
    mount_point.mkdir(parents=True)
    with Daemon(mount_point, folder / "state", arguments, environment):
        yield Place(name, mount_point, tiers=True)


@contextlib.contextmanager
def directory_in(parent: Path, name: str, *, medium: bool = True) -> Iterator[Place]:
    """A place in `parent`, emptied and removed in the end."""
    path = parent / f"bench-{os.getpid()}"
    path.mkdir()
    try:
        yield Place(name, path, medium=medium)
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def mounted(mount_point: Path) -> Iterator[Place]:
    """A place in a mount that others use too; what is no ctxfs mount does not get its name."""
    tiers = has_tiers(mount_point)
    with directory_in(mount_point, CTXFS if tiers else PLAIN) as place:
        yield replace(place, tiers=tiers)


@contextlib.contextmanager
def tmpfs(base: Path) -> Iterator[Place]:
    """Plain tmpfs, without huge pages: a mount of our own as root, else `/dev/shm`."""
    if os.geteuid() != 0:
        with directory_in(Path("/dev/shm"), TMPFS, medium=False) as place:
            yield place
        return
    path = base / "tmpfs"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "huge=never,mode=700", "ctxfs-bench", str(path)]
    subprocess.run(command, check=True)
    try:
        yield Place(TMPFS, path, medium=False)
    finally:
        unmount(path, lazy=True)


def has_tiers(mount_point: Path) -> bool:
    """Whether `mount_point` is a ctxfs mount rather than any directory."""
    return (mount_point / ".ctx" / "stats").exists()
