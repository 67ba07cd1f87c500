"""What the kernel is answered. Each function returns the bytes after the header, or with it."""

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

OUT_HEADER = Struct("=IiQ")  # length, minus errno, unique

# inode, size, blocks; atime, mtime, ctime: seconds, then nanoseconds of each; mode, nlink, uid,
# gid, rdev, blksize, flags
_ATTR = "QQQqqqIIIIIIIIII"
ATTR = Struct("=" + _ATTR)
# node, generation, lifetime of the name and of the attributes: seconds, then nanoseconds of each
ENTRY = Struct("=QQQQII" + _ATTR)
ATTR_OUT = Struct("=QI4x" + _ATTR)
_OPEN = "QIi"  # handle, flags, backing id (padding before 7.40)
OPEN_OUT = Struct("=" + _OPEN)
_OPEN_WHOLE = Struct("=IiQ" + _OPEN)
WRITE_OUT = Struct("=I4x")
STATFS_OUT = Struct("=QQQQQIII4x24x")
XATTR_OUT = Struct("=I4x")
DIRENT = Struct("=QQII")  # inode, offset of the next one, length of the name, type
DIRENT_ALIGN = 8
# major, minor, readahead, flags, background requests, congestion, write, time granularity, pages,
# map alignment, flags2, stack depth, request timeout
INIT_OUT = Struct("=IIIIHHIIHHIIH22x")

BLKSIZE = 4096
_NO_ATTR = (0,) * 16
SECOND_NS = 1_000_000_000


class Attributes(NamedTuple):
    """What stat shows of a node, and for how many seconds it may be believed."""

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


class Filesystem(NamedTuple):
    """What statvfs shows; sizes in units of `block_bytes`."""

    blocks: int
    free: int
    files: int
    files_free: int
    block_bytes: int
    name_bytes_max: int


class InitAnswer(NamedTuple):
    """What both sides do from here on."""

    major: int
    minor: int
    max_readahead: int
    flags: int  # 64 bits: those of flags2 in the upper half
    max_background: int
    congestion_threshold: int
    max_write: int
    time_gran: int
    max_pages: int
    max_stack_depth: int


def header(unique: int, length: int) -> bytes:
    """Return the header of a good answer with `length` bytes to follow."""
    return OUT_HEADER.pack(OUT_HEADER.size + length, 0, unique)


def failure(unique: int, code: int) -> bytes:
    """Return the answer that names an error; 0: that it is done, with nothing more to say."""
    return OUT_HEADER.pack(OUT_HEADER.size, -code, unique)


def lifetime(seconds: float) -> tuple[int, int]:
    """Return whole seconds, and the nanoseconds beyond."""
    return divmod(int(seconds * SECOND_NS), SECOND_NS)


def _attr(attr: Attributes) -> tuple[int, ...]:
    atime, atime_ns = divmod(attr.atime_ns, SECOND_NS)
    mtime, mtime_ns = divmod(attr.mtime_ns, SECOND_NS)
    ctime, ctime_ns = divmod(attr.ctime_ns, SECOND_NS)
    return (
        attr.inode, attr.size, attr.blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns,
        attr.mode, attr.nlink, attr.uid, attr.gid, 0, BLKSIZE, 0,
    )  # fmt: skip


def entry(attr: Attributes) -> bytes:
    """Return what LOOKUP, MKDIR and their like are answered: 128 bytes.

    Inode numbers are never used twice here, so the generation beside them is 0.
    """
    entry_s, entry_ns = lifetime(attr.entry_s)
    attr_s, attr_ns = lifetime(attr.attr_s)
    return ENTRY.pack(attr.inode, 0, entry_s, attr_s, entry_ns, attr_ns, *_attr(attr))


@lru_cache(16)
def missing(seconds: float) -> bytes:
    """Return what LOOKUP is answered where nothing is, and for how long that may be believed."""
    whole, rest = lifetime(seconds)
    return ENTRY.pack(0, 0, whole, 0, rest, 0, *_NO_ATTR)


def attributes(attr: Attributes) -> bytes:
    """Return what GETATTR and SETATTR are answered: 104 bytes."""
    return ATTR_OUT.pack(*lifetime(attr.attr_s), *_attr(attr))


def opened(handle: int, flags: int, backing: int = 0) -> bytes:
    """Return what OPEN is answered, and CREATE after the entry: 16 bytes."""
    return OPEN_OUT.pack(handle, flags, backing)


def whole_opened(unique: int, handle: int, flags: int, backing: int) -> bytes:
    """Return what OPEN is answered, with its header."""
    return _OPEN_WHOLE.pack(_OPEN_WHOLE.size, 0, unique, handle, flags, backing)


def handle_of(answer: bytes | memoryview) -> int:
    """Return the handle in what OPEN or CREATE is answered."""
    return int(OPEN_OUT.unpack_from(answer, len(answer) - OPEN_OUT.size)[0])


def inode_of(answer: bytes | memoryview) -> int:
    """Return the inode in an answer that begins with an entry."""
    return int(ENTRY.unpack_from(answer)[0])


def written(length: int) -> bytes:
    """Return what WRITE is answered: 8 bytes."""
    return WRITE_OUT.pack(length)


def attribute_size(length: int) -> bytes:
    """Return what GETXATTR and LISTXATTR are answered when they ask for the size: 8 bytes."""
    return XATTR_OUT.pack(length)


def filesystem(info: Filesystem) -> bytes:
    """Return what STATFS is answered: 80 bytes."""
    size = info.block_bytes
    return STATFS_OUT.pack(
        info.blocks, info.free, info.free, info.files, info.files_free, size,
        info.name_bytes_max, size,
    )  # fmt: skip


def dirent(inode: int, place: int, name: bytes, mode: int) -> bytes:
    """Return one line for READDIR, padded to 8 bytes; `place` is where the next one begins."""
    kind = mode >> 12  # the upper bits of a mode are the types of dirent.h
    padding = -len(name) % DIRENT_ALIGN
    return DIRENT.pack(inode, place, len(name), kind) + name + b"\0" * padding


def direntplus(attr: Attributes, place: int, name: bytes) -> bytes:
    """Return one line for READDIRPLUS: an entry, and the line for READDIR."""
    return entry(attr) + dirent(attr.inode, place, name, attr.mode)


def init(answer: InitAnswer) -> bytes:
    """Return what INIT is answered: 64 bytes."""
    low, high = answer.flags & 0xFFFFFFFF, answer.flags >> 32
    return INIT_OUT.pack(
        answer.major, answer.minor, answer.max_readahead, low, answer.max_background,
        answer.congestion_threshold, answer.max_write, answer.time_gran, answer.max_pages, 0,
        high, answer.max_stack_depth, 0,
    )  # fmt: skip
