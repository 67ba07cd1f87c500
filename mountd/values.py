"""Plain values that go between the channels and what answers them."""

from __future__ import annotations

import os
from typing import NamedTuple

WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC  # flags of an open that may change the file
PAGE_BYTES = 4096
NAME_BYTES_MAX = 255
SPARE_FILES = 1 << 32  # files are bounded by bytes alone


def split_device(text: str) -> tuple[str, str | None]:
    """PATH[:SIZE] in two. A path that exists may contain a colon; so may a directory."""
    path, colon, size = text.rpartition(":")
    if not colon or "/" in size or os.path.exists(text):
        return text, None
    return path, size


class Caller(NamedTuple):
    """Who asks."""

    uid: int
    gid: int
    pid: int  # the thread
    request: int = 0  # the kernel's number of what it asks, where the channel tells


class Attr(NamedTuple):
    """What stat shows, and for how many seconds the kernel may believe it."""

    inode: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    entry_s: float
    attr_s: float


class Missing(NamedTuple):
    """A name leads nowhere, and for how many seconds the kernel may believe that."""

    entry_s: float


class SetAttr(NamedTuple):
    """What setattr is to change; None: leave as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Space(NamedTuple):
    """What statvfs shows, in pages of 4096 bytes."""

    total: int
    free: int
    files: int


class Lifetimes(NamedTuple):
    """For how many seconds a channel that can take things back lets the kernel believe them."""

    names: float = 0.0  # where a name leads, or that it leads nowhere
    directories: float = 0.0  # attributes of directories
