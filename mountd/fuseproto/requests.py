"""What the kernel asks: one named tuple for each kind of request, and the table of their bytes.

A request is a header of 40 bytes, a fixed part, names that end in a NUL, and at most one run of
data or pairs of numbers to the end of the message.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple

from mountd.fuseproto.constants import Opcode

# length, opcode, unique, node, uid, gid, pid, length of extensions in units of 8 bytes
HEADER = Struct("=IIQQIIIH2x")
HEADER_BYTES = HEADER.size
EXTENSION_UNIT_BYTES = 8
FORGET_ONE = Struct("=QQ")


class Malformed(Exception):
    """A request whose bytes do not fit its kind. Names what is wrong with it."""


class UnknownOpcode(Exception):
    """A request of a kind that is not known here; the kernel takes ENOSYS well."""


class Header(NamedTuple):
    """What every request begins with."""

    length: int
    opcode: int
    unique: int  # the request's number, which the answer carries too
    node: int
    uid: int
    gid: int
    pid: int  # the thread; 0 where there is none, or it cannot be seen from here
    extensions: int = 0  # length, in units of 8 bytes


class Nothing(NamedTuple):
    """READLINK, STATFS, DESTROY: the header says it all."""


class Name(NamedTuple):
    """LOOKUP, UNLINK, RMDIR, REMOVEXATTR."""

    name: bytes


class Symlink(NamedTuple):
    """SYMLINK."""

    name: bytes
    target: bytes


class Forget(NamedTuple):
    """FORGET: so many references to the header's node are gone."""

    lookups: int


class BatchForget(NamedTuple):
    """BATCH_FORGET: (node, count) each."""

    nodes: tuple[tuple[int, int], ...]


class Getattr(NamedTuple):
    """GETATTR."""

    flags: int
    handle: int


class Setattr(NamedTuple):
    """SETATTR. `fields` says which count; times are seconds and nanoseconds."""

    fields: int
    handle: int
    size: int
    atime_s: int
    mtime_s: int
    ctime_s: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int


class Mknod(NamedTuple):
    """MKNOD. The kernel has applied the umask to the mode, here and below."""

    mode: int
    device: int
    umask: int
    name: bytes


class Mkdir(NamedTuple):
    """MKDIR."""

    mode: int
    umask: int
    name: bytes


class Rename(NamedTuple):
    """RENAME: from a name in the header's node to one in another."""

    new_parent: int
    old_name: bytes
    new_name: bytes


class Rename2(NamedTuple):
    """RENAME2: with the flags of renameat2(2)."""

    new_parent: int
    flags: int
    old_name: bytes
    new_name: bytes


class Link(NamedTuple):
    """LINK: a new name in the header's node for another node."""

    old_node: int
    name: bytes


class Open(NamedTuple):
    """OPEN, OPENDIR. `flags` are those of open(2)."""

    flags: int
    open_flags: int


class Create(NamedTuple):
    """CREATE."""

    flags: int
    mode: int
    umask: int
    open_flags: int
    name: bytes


class Read(NamedTuple):
    """READ, READDIR, READDIRPLUS."""

    handle: int
    offset: int
    size: int
    read_flags: int
    lock_owner: int
    flags: int


class Write(NamedTuple):
    """WRITE. The data is a view of the buffer that was parsed."""

    handle: int
    offset: int
    size: int
    write_flags: int
    lock_owner: int
    flags: int
    data: memoryview


class Release(NamedTuple):
    """RELEASE, RELEASEDIR."""

    handle: int
    flags: int
    release_flags: int
    lock_owner: int


class Flush(NamedTuple):
    """FLUSH: a descriptor was closed."""

    handle: int
    lock_owner: int


class Fsync(NamedTuple):
    """FSYNC, FSYNCDIR."""

    handle: int
    flags: int


class Setxattr(NamedTuple):
    """SETXATTR, without the extension that nobody here negotiates."""

    size: int
    flags: int
    name: bytes
    value: memoryview


class Getxattr(NamedTuple):
    """GETXATTR: `size` 0 asks how long the value is."""

    size: int
    name: bytes


class Listxattr(NamedTuple):
    """LISTXATTR: `size` 0 asks how long the list is."""

    size: int


class Init(NamedTuple):
    """INIT. Kernels before 7.36 send no `flags2`."""

    major: int
    minor: int
    max_readahead: int
    flags: int
    flags2: int


class Access(NamedTuple):
    """ACCESS."""

    mask: int


class Interrupt(NamedTuple):
    """INTERRUPT: whoever waits for that request got a signal."""

    unique: int


class Ioctl(NamedTuple):
    """IOCTL."""

    handle: int
    flags: int
    command: int
    argument: int
    in_size: int
    out_size: int
    data: memoryview


class Poll(NamedTuple):
    """POLL."""

    handle: int
    kernel_handle: int
    flags: int
    events: int


class Fallocate(NamedTuple):
    """FALLOCATE."""

    handle: int
    offset: int
    length: int
    mode: int


class Lseek(NamedTuple):
    """LSEEK."""

    handle: int
    offset: int
    whence: int


class CopyFileRange(NamedTuple):
    """COPY_FILE_RANGE, COPY_FILE_RANGE_64."""

    handle_in: int
    offset_in: int
    node_out: int
    handle_out: int
    offset_out: int
    length: int
    flags: int


class Syncfs(NamedTuple):
    """SYNCFS."""


class Statx(NamedTuple):
    """STATX."""

    flags: int
    handle: int
    statx_flags: int
    mask: int


Body = (
    Nothing | Name | Symlink | Forget | BatchForget | Getattr | Setattr | Mknod | Mkdir | Rename
    | Rename2 | Link | Open | Create | Read | Write | Release | Flush | Fsync | Setxattr
    | Getxattr | Listxattr | Init | Access | Interrupt | Ioctl | Poll | Fallocate | Lseek
    | CopyFileRange | Syncfs | Statx
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """How a kind of request lies in a message."""

    make: Callable[..., Body]
    fixed: Struct  # the fields that are used; what is padding is skipped
    names: int = 0
    data: int | None = None  # which fixed field has the length of the data, if there is data
    fixed_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fixed_bytes", self.fixed.size)


_NO_FIXED = Struct("=")
_NAME = Layout(Name, _NO_FIXED, names=1)
_OPEN = Layout(Open, Struct("=II"))
_READ = Layout(Read, Struct("=QQIIQI4x"))
_RELEASE = Layout(Release, Struct("=QIIQ"))
_RELEASE_GIST = Struct("=II28xH10xI")  # length, opcode, length of extensions, flags
_RELEASE_BYTES = HEADER_BYTES + _RELEASE.fixed_bytes
_RELEASE_START = [_RELEASE_BYTES, int(Opcode.RELEASE)]
# length, opcode, unique, node, thread, length of extensions, flags
_OPEN_GIST = Struct("=IIQQ8xIH2xI4x")
_OPEN_BYTES = HEADER_BYTES + _OPEN.fixed_bytes
_OPEN_OPCODE = int(Opcode.OPEN)
_LOOKUP_GIST = Struct("=IIQQ8xIH2x")  # length, opcode, unique, node, thread, extensions
_LOOKUP_OPCODE = int(Opcode.LOOKUP)
_FSYNC = Layout(Fsync, Struct("=QI4x"))
_COPY = Layout(CopyFileRange, Struct("=7Q"))
_INIT = Struct("=IIII")
_INIT_EXTENDED = Struct("=IIIII44x")
_BATCH = Struct("=I4x")

LAYOUTS: dict[int, Layout] = {
    Opcode.LOOKUP: _NAME,
    Opcode.FORGET: Layout(Forget, Struct("=Q")),
    Opcode.GETATTR: Layout(Getattr, Struct("=I4xQ")),
    Opcode.SETATTR: Layout(Setattr, Struct("=I4xQQ8xqqqIIII4xII4x")),
    Opcode.READLINK: Layout(Nothing, _NO_FIXED),
    Opcode.SYMLINK: Layout(Symlink, _NO_FIXED, names=2),
    Opcode.MKNOD: Layout(Mknod, Struct("=III4x"), names=1),
    Opcode.MKDIR: Layout(Mkdir, Struct("=II"), names=1),
    Opcode.UNLINK: _NAME,
    Opcode.RMDIR: _NAME,
    Opcode.RENAME: Layout(Rename, Struct("=Q"), names=2),
    Opcode.LINK: Layout(Link, Struct("=Q"), names=1),
    Opcode.OPEN: _OPEN,
    Opcode.READ: _READ,
    Opcode.WRITE: Layout(Write, Struct("=QQIIQI4x"), data=2),
    Opcode.STATFS: Layout(Nothing, _NO_FIXED),
    Opcode.RELEASE: _RELEASE,
    Opcode.FSYNC: _FSYNC,
    Opcode.SETXATTR: Layout(Setxattr, Struct("=II"), names=1, data=0),
    Opcode.GETXATTR: Layout(Getxattr, Struct("=I4x"), names=1),
    Opcode.LISTXATTR: Layout(Listxattr, Struct("=I4x")),
    Opcode.REMOVEXATTR: _NAME,
    Opcode.FLUSH: Layout(Flush, Struct("=Q8xQ")),
    Opcode.OPENDIR: _OPEN,
    Opcode.READDIR: _READ,
    Opcode.RELEASEDIR: _RELEASE,
    Opcode.FSYNCDIR: _FSYNC,
    Opcode.ACCESS: Layout(Access, Struct("=I4x")),
    Opcode.CREATE: Layout(Create, Struct("=IIII"), names=1),
    Opcode.INTERRUPT: Layout(Interrupt, Struct("=Q")),
    Opcode.DESTROY: Layout(Nothing, _NO_FIXED),
    Opcode.IOCTL: Layout(Ioctl, Struct("=QIIQII"), data=4),
    Opcode.POLL: Layout(Poll, Struct("=QQII")),
    Opcode.FALLOCATE: Layout(Fallocate, Struct("=QQQI4x")),
    Opcode.READDIRPLUS: _READ,
    Opcode.RENAME2: Layout(Rename2, Struct("=QI4x"), names=2),
    Opcode.LSEEK: Layout(Lseek, Struct("=QQI4x")),
    Opcode.COPY_FILE_RANGE: _COPY,
    Opcode.SYNCFS: Layout(Syncfs, Struct("=8x")),
    Opcode.STATX: Layout(Statx, Struct("=I4xQII")),
    Opcode.COPY_FILE_RANGE_64: _COPY,
}


def parse_header(buffer: bytes | bytearray, length: int) -> Header:
    """Return the header of a message of `length` bytes. Raises Malformed."""
    if length < HEADER_BYTES:
        raise Malformed(f"{length} bytes are no request")
    header = Header._make(HEADER.unpack_from(buffer))
    if header.length != length:
        raise Malformed(f"a request of {header.length} bytes came as {length}")
    return header


def is_release_without(flags: int, buffer: bytes | bytearray, length: int) -> bool:
    """Whether a message is the RELEASE of a file that was opened with none of these flags.

    Nothing more of it is looked at: who opens the next file is waiting.
    """
    if length != _RELEASE_BYTES:
        return False
    *start, extensions, opened_with = _RELEASE_GIST.unpack_from(buffer)
    return start == _RELEASE_START and not extensions and not opened_with & flags


def open_without(flags: int, buffer: bytes | bytearray, length: int) -> tuple[int, int, int] | None:
    """Return unique, node and thread of an OPEN with none of these flags; None for all else.

    Most opens are, and their callers wait for nothing else.
    """
    if length != _OPEN_BYTES:
        return None
    said, opcode, unique, node, thread, extensions, asked = _OPEN_GIST.unpack_from(buffer)
    if opcode != _OPEN_OPCODE or said != length or extensions or asked & flags:
        return None
    return unique, node, thread


def looked_up(buffer: bytes | bytearray, length: int) -> tuple[int, int, int, bytes] | None:
    """Return unique, node, thread and name of a LOOKUP; None for all else.

    Programs look for many names that lead nowhere.
    """
    if length <= HEADER_BYTES:
        return None
    said, opcode, unique, node, thread, extensions = _LOOKUP_GIST.unpack_from(buffer)
    if opcode != _LOOKUP_OPCODE or said != length or extensions:
        return None
    name, end, rest = bytes(buffer[HEADER_BYTES:length]).partition(b"\0")
    return None if rest or not end else (unique, node, thread, name)


def parse_body(header: Header, buffer: bytes | bytearray) -> Body:
    """Return what comes after the header; data in it is a view of `buffer`.

    Raises Malformed, UnknownOpcode.
    """
    start, end = HEADER_BYTES, header.length
    if header.extensions:
        end -= header.extensions * EXTENSION_UNIT_BYTES
        if end < start:
            raise Malformed("its extensions are longer than itself")
    layout = LAYOUTS.get(header.opcode)
    if layout is None:
        return _parse_special(header.opcode, buffer, end)
    if start + layout.fixed_bytes > end:
        raise Malformed(f"{end - start} bytes, where at least {layout.fixed_bytes} are due")
    fields: tuple[Any, ...] = layout.fixed.unpack_from(buffer, start)
    start += layout.fixed_bytes
    for _ in range(layout.names):
        stop = buffer.find(b"\0", start, end)
        if stop < 0:
            raise Malformed("a name without its end")
        fields += (bytes(buffer[start:stop]),)
        start = stop + 1
    if layout.data is not None:
        length = fields[layout.data]
        if start + length > end:
            raise Malformed(f"{end - start} bytes of data, where {length} are due")
        fields += (memoryview(buffer)[start : start + length],)
    return layout.make(*fields)


def _parse_special(opcode: int, buffer: bytes | bytearray, end: int) -> Body:
    """INIT has two lengths, BATCH_FORGET any."""
    start = HEADER.size
    if opcode == Opcode.INIT:
        if start + _INIT_EXTENDED.size <= end:
            return Init._make(_INIT_EXTENDED.unpack_from(buffer, start))
        if start + _INIT.size <= end:
            return Init._make((*_INIT.unpack_from(buffer, start), 0))
        raise Malformed("an INIT that says too little")
    if opcode == Opcode.BATCH_FORGET:
        if start + _BATCH.size > end:
            raise Malformed("a BATCH_FORGET without its count")
        (count,) = _BATCH.unpack_from(buffer, start)
        start += _BATCH.size
        if start + count * FORGET_ONE.size > end:
            raise Malformed(f"{end - start} bytes, where {count} pairs are due")
        pairs = memoryview(buffer)[start : start + count * FORGET_ONE.size]
        return BatchForget(tuple(FORGET_ONE.iter_unpack(pairs)))
    raise UnknownOpcode(str(opcode))


def pack(header: Header, body: Body) -> bytes:
    """Return a request as the kernel would send it; `header.length` is filled in."""
    content = _pack_body(header.opcode, body)
    return HEADER.pack(HEADER_BYTES + len(content), *header[1:]) + content


def _pack_body(opcode: int, body: Body) -> bytes:
    if isinstance(body, Init):
        return _INIT_EXTENDED.pack(*body)
    if isinstance(body, BatchForget):
        pairs = b"".join(FORGET_ONE.pack(*pair) for pair in body.nodes)
        return _BATCH.pack(len(body.nodes)) + pairs
    layout = LAYOUTS[opcode]
    values: list[Any] = list(body)
    data = bytes(values.pop()) if layout.data is not None else b""
    fixed = len(values) - layout.names
    names = b"".join(name + b"\0" for name in values[fixed:])
    return layout.fixed.pack(*values[:fixed]) + names + data
