"""Which ctxfs mounts there are, and which one is meant."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FILE_SYSTEM_TYPE = "fuse.ctxfs"
DEFAULT_POINT = "/ctx"
ENVIRONMENT = "CTXFS_MOUNT"


@dataclass(frozen=True, slots=True)
class Mounted:
    """One ctxfs line of the kernel's mount table."""

    point: str
    device: str  # "major:minor"; the minor number names the FUSE connection
    options: str  # of the mount and of the file system, joined by commas

    @property
    def connection(self) -> str:
        """Its directory in `/sys/fs/fuse/connections`."""
        return self.device.partition(":")[2]


def parse_mountinfo(table: str) -> list[Mounted]:
    """The ctxfs mounts in the text of `/proc/self/mountinfo` (format: proc_pid_mountinfo(5))."""
    found = []
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if kind[0] == FILE_SYSTEM_TYPE and len(fields) >= 6:
            options = ",".join([fields[5], *kind[2:3]])
            found.append(Mounted(_unescape(fields[4]), fields[2], options))
    return found


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes of blank, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mounted() -> list[Mounted]:
    """The ctxfs mounts that this process sees; empty where /proc is not there."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            return parse_mountinfo(table.read())
    except OSError:
        return []


def below(point: str, word: str) -> str | None:
    """The key of the path `word` below `point` (empty for `point` itself), or None if outside.

    Names decide; symbolic links on the way to the mount are followed where names say no.
    """
    absolute = os.path.abspath(word)
    candidates = [absolute]
    if not _within(point, absolute):
        candidates.append(os.path.realpath(absolute))
    for path in candidates:
        if _within(point, path):
            return os.path.relpath(path, point) if path != point else ""
    return None


def _within(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def resolve(point: str, mounts: Sequence[Mounted]) -> str:
    """The absolute path of a mount point, without symbolic links.

    The table is asked before the mount point itself: a daemon that hangs would not answer.
    """
    parent, name = os.path.split(os.path.abspath(point))
    path = os.path.join(os.path.realpath(parent), name)
    return path if any(mount.point == path for mount in mounts) else os.path.realpath(path)


def choose(
    explicit: str | None,
    environment: Mapping[str, str],
    words: Sequence[str],
    directory: str,
    mounts: Sequence[Mounted],
) -> str:
    """The mount point meant: the option, the environment, where the words or `directory` lie,
    the only mount there is, or `/ctx`. Raises LookupError where several could be meant.
    """
    if explicit:
        return explicit
    if environment.get(ENVIRONMENT):
        return environment[ENVIRONMENT]
    points = sorted({mount.point for mount in mounts}, key=len, reverse=True)
    # Longest first: a mount inside another one owns what lies beneath it.
    for path in [*(word for word in words if "/" in word), directory]:
        for point in points:
            if below(point, os.path.join(directory, path)) is not None:
                return point
    # A bind mount shows the same blocks: any one of them will do.
    if len({mount.device for mount in mounts}) > 1:
        raise LookupError("several ctxfs mounts: " + ", ".join(sorted(points)))
    return min(points, key=len) if points else DEFAULT_POINT
