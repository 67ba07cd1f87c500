"""Numbers of linux/fuse.h: opcodes, and the flags of the messages that are used here."""

import enum

MAJOR = 7
MINOR_MIN = 31  # what is older lays some messages out otherwise
MINOR_MAX = 45
MINOR_EPOCH = 44  # knows Notice.INC_EPOCH

ROOT_NODE = 1
PAGE_BYTES = 4096


class Opcode(enum.IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SYNCFS = 50
    STATX = 52
    COPY_FILE_RANGE_64 = 53


# Requests that the kernel wants no answer to; one would be an error.
SILENT = frozenset((Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT))


class Notice(enum.IntEnum):
    """What the kernel may be told unasked."""

    INVAL_INODE = 2
    INC_EPOCH = 8


class InitFlag(enum.IntFlag):
    """What both sides can do; bits from 32 on travel in `flags2`."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30  # `flags2` is there
    PASSTHROUGH = 1 << 37


class OpenFlag(enum.IntFlag):
    """How the kernel is to treat an open file."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NOFLUSH = 1 << 5  # close sends no FLUSH; heeded from 7.35 on
    PASSTHROUGH = 1 << 7  # read, write and mmap go to the backing file


class SetattrField(enum.IntFlag):
    """Which fields of a SETATTR count."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    HANDLE = 1 << 6
    KILL_SUIDGID = 1 << 11


OPEN_KILL_SUIDGID = 1 << 0
WRITE_KILL_SUIDGID = 1 << 2

RENAME_NOREPLACE = 1 << 0  # linux/fs.h
RENAME_EXCHANGE = 1 << 1
XATTR_CREATE = 1  # linux/xattr.h
XATTR_REPLACE = 2
