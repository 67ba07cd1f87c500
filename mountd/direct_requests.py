"""What each request of the kernel means for `Operations`, and the bytes it is answered with."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from ctxfs.errors import (
    BadValue,
    BlockExists,
    BlockNotFound,
    CtxfsError,
    NoAttribute,
    NotPermitted,
)
from mountd.backings import Backings
from mountd.beliefs import Beliefs
from mountd.fuseproto import constants, replies, requests
from mountd.fuseproto.constants import Opcode, OpenFlag, SetattrField
from mountd.fuseproto.replies import SECOND_NS, Attributes, Filesystem
from mountd.fuseproto.requests import Header
from mountd.operations import Operations
from mountd.session import RESENT
from mountd.session import OpenFlag as Known
from mountd.values import (
    NAME_BYTES_MAX,
    PAGE_BYTES,
    SPARE_FILES,
    WRITES,
    Attr,
    Caller,
    Missing,
    SetAttr,
)

log = logging.getLogger(__name__)

DONE = b""
# As plain numbers: combining flags of an enumeration takes longer than the whole answer.
NOFLUSH, PASSTHROUGH = int(OpenFlag.NOFLUSH), int(OpenFlag.PASSTHROUGH)
DIRECT_IO, KEEP_CACHE = int(OpenFlag.DIRECT_IO), int(OpenFlag.KEEP_CACHE)
CREATED_ATTR_S = 0.02
RENAMES = constants.RENAME_NOREPLACE | constants.RENAME_EXCHANGE

Answer = bytes | memoryview


class ValueTooLong(CtxfsError):
    """The caller's buffer is too small for the value."""

    code = errno.ERANGE


class NoIoctl(CtxfsError):
    """No file here has any."""

    code = errno.ENOTTY


def _caller(header: Header) -> Caller:
    return Caller(header.uid, header.gid, header.pid, header.unique & ~RESENT)


# Errors by which a request that comes again, and whose effect is written down, says it is done.
DONE_BEFORE: dict[int, type[CtxfsError]] = {
    Opcode.MKNOD: BlockExists,
    Opcode.MKDIR: BlockExists,
    Opcode.UNLINK: BlockNotFound,
    Opcode.RMDIR: BlockNotFound,
    Opcode.RENAME: BlockNotFound,
    Opcode.RENAME2: BlockNotFound,
    Opcode.SETXATTR: BlockExists,
    Opcode.REMOVEXATTR: NoAttribute,
}


class Translator:
    """One method for each kind of request; its answer is what follows the header."""

    def __init__(self, operations: Operations, backings: Backings, beliefs: Beliefs) -> None:
        self._ops = operations
        self._files = operations.files
        self._listings = operations.listings
        self._backings = backings
        self._beliefs = beliefs

    def _entry(self, parent: int, name: bytes, attr: Attr) -> bytes:
        """Answer where a name leads; from now on the kernel may believe it."""
        if attr.entry_s:
            self._beliefs.tell_name((parent, name), attr.entry_s)
        elif self._ops.is_private(attr.inode):
            self._beliefs.forget_name((parent, name))
        return replies.entry(self._believable(attr))

    def _believable(self, attr: Attr) -> Attributes:
        if attr.attr_s and not self._beliefs.tell_attributes(attr.inode):
            attr = attr._replace(attr_s=0.0)
        return Attributes._make(attr)

    def done_before(self, header: Header, body: object, error: Exception) -> Answer | None:
        """Answer what fails because an earlier daemon carried it out; None: it did not."""
        expected = DONE_BEFORE.get(header.opcode)
        if not header.unique & RESENT or expected is None or not isinstance(error, expected):
            return None
        if not self._ops.is_marked(header.unique & ~RESENT):
            return None
        if isinstance(body, requests.Mkdir | requests.Mknod):
            attr = self._ops.lookup(header.node, body.name, _caller(header))
            return self._entry(header.node, body.name, attr)
        return DONE

    # -- names

    def lookup(self, header: Header, body: requests.Name) -> Answer | None:
        """None: `lookup_everywhere` is to be asked."""
        found = self._ops.find(header.node, body.name, _caller(header))
        if isinstance(found, Missing) and self._ops.may_be_elsewhere(header.node, body.name):
            return None
        return self._found(header, body, found)

    async def lookup_everywhere(self, header: Header, body: requests.Name) -> Answer:
        found = await self._ops.find_everywhere(header.node, body.name, _caller(header))
        return self._found(header, body, found)

    def _found(self, header: Header, body: requests.Name, found: Attr | Missing) -> Answer:
        if isinstance(found, Attr):
            return self._entry(header.node, body.name, found)
        if not found.entry_s:
            raise BlockNotFound(repr(body.name))
        self._beliefs.tell_name((header.node, body.name), found.entry_s)
        return replies.missing(found.entry_s)

    def forget(self, header: Header, body: requests.Forget) -> Answer:
        self._ops.forget(header.node, body.lookups)
        return DONE

    def batch_forget(self, header: Header, body: requests.BatchForget) -> Answer:
        for node, count in body.nodes:
            self._ops.forget(node, count)
        return DONE

    async def mknod(self, header: Header, body: requests.Mknod) -> Answer:
        caller = _caller(header)
        attr = await self._ops.make_file(header.node, body.name, body.mode, caller)
        return self._entry(header.node, body.name, attr)

    def mkdir(self, header: Header, body: requests.Mkdir) -> Answer:
        with self._beliefs.changed_by_kernel((header.node, body.name)):
            attr = self._ops.mkdir(header.node, body.name, body.mode, _caller(header))
        return self._entry(header.node, body.name, attr)

    def unlink(self, header: Header, body: requests.Name) -> Answer:
        with self._beliefs.changed_by_kernel((header.node, body.name)):
            self._ops.unlink(header.node, body.name, _caller(header))
        return DONE

    def rmdir(self, header: Header, body: requests.Name) -> Answer:
        with self._beliefs.changed_by_kernel((header.node, body.name)):
            self._ops.rmdir(header.node, body.name)
        return DONE

    def link(self, header: Header, body: requests.Link | requests.Symlink) -> Answer:
        raise NotPermitted("there are no links here")

    def rename(self, header: Header, body: requests.Rename | requests.Rename2) -> Answer | None:
        """None: `rename_from_elsewhere` is to be asked."""
        sources = _sources(header, body)
        if self._ops.lie_elsewhere(*sources) or self._ops.has_promised(*sources):
            return None
        return self._rename(header, body.new_parent, body.old_name, body.new_name, _flags(body))

    async def rename_from_elsewhere(
        self, header: Header, body: requests.Rename | requests.Rename2
    ) -> Answer:
        sources = _sources(header, body)
        await self._ops.bring_here(*sources)
        done = self._rename(header, body.new_parent, body.old_name, body.new_name, _flags(body))
        await self._ops.keep_promise((body.new_parent, body.new_name), *sources)
        return done

    def _rename(self, header: Header, parent: int, old: bytes, new: bytes, flags: int) -> Answer:
        if flags & ~RENAMES:
            raise BadValue("a flag of renameat2 that is not known here")
        with self._beliefs.renamed_by_kernel((header.node, old), (parent, new)):
            self._ops.rename(
                header.node,
                old,
                parent,
                new,
                _caller(header),
                replace=not flags & constants.RENAME_NOREPLACE,
                exchange=bool(flags & constants.RENAME_EXCHANGE),
            )
        for place in ((header.node, old), (parent, new)):
            if self._ops.is_written_under(*place):
                self._beliefs.name_changed(*place)  # what moved there is not so for its writer
        return DONE

    # -- attributes

    def getattr(self, header: Header, body: requests.Getattr) -> Answer:
        return replies.attributes(self._believable(self._ops.getattr(header.node)))

    async def setattr(self, header: Header, body: requests.Setattr) -> Answer:
        fields = body.fields
        change = SetAttr(
            mode=body.mode if fields & SetattrField.MODE else None,
            uid=body.uid if fields & SetattrField.UID else None,
            gid=body.gid if fields & SetattrField.GID else None,
            size=body.size if fields & SetattrField.SIZE else None,
            atime_ns=body.atime_s * SECOND_NS + body.atime_ns
            if fields & SetattrField.ATIME
            else None,
            mtime_ns=body.mtime_s * SECOND_NS + body.mtime_ns
            if fields & SetattrField.MTIME
            else None,
        )
        # chown takes setuid and setgid from everybody; the kernel leaves that to us.
        if fields & (SetattrField.KILL_SUIDGID | SetattrField.UID | SetattrField.GID):
            self._ops.kill_privileges(header.node)
        handle = body.handle if fields & SetattrField.HANDLE else None
        attr = await self._ops.setattr(header.node, change, handle, _caller(header))
        return replies.attributes(self._believable(attr))

    def statfs(self, header: Header, body: requests.Nothing) -> Answer:
        space = self._ops.statfs()
        return replies.filesystem(
            Filesystem(
                blocks=space.total,
                free=space.free,
                files=space.files + SPARE_FILES,
                files_free=SPARE_FILES,
                block_bytes=PAGE_BYTES,
                name_bytes_max=NAME_BYTES_MAX,
            )
        )

    # -- files

    async def create(self, header: Header, body: requests.Create) -> Answer:
        if header.unique & RESENT and (known := self._opened_before(header, body.flags)):
            attr, opened = known
            return self._entry(header.node, body.name, attr) + opened
        number, attr = await self._ops.create(
            header.node, body.name, body.mode, body.flags, _caller(header)
        )
        # The kernel looks once more at what it has just made, and marks it changed at each write.
        entry = self._entry(header.node, body.name, attr._replace(attr_s=CREATED_ATTR_S))
        return entry + self._opened(attr.inode, number, body.flags, direct=False)

    def look_in_vain(self, unique: int, node: int, thread: int, name: bytes) -> bytes | None:
        """Return the whole answer to a LOOKUP that finds nothing; None: `lookup` is to be asked."""
        seconds = self._ops.nodes.lifetimes.names
        if not seconds or not self._ops.is_nothing(node, name, thread):
            return None
        self._beliefs.tell_name((node, name), seconds)
        answer = replies.missing(seconds)
        return replies.header(unique, len(answer)) + answer

    def open_to_read(self, unique: int, node: int, thread: int) -> bytes | None:
        """Return the whole answer to an OPEN for reading; None: `open` is to be asked."""
        if unique & RESENT or not self._backings.enabled:
            return None
        handle = None
        try:
            handle = self._ops.open_at_once(node, thread)
            if handle is None:
                return None
            number, backing = self._files.add_reader(handle, unique, self._backings.number_of)
        except (CtxfsError, OSError):  # `open` meets it again, and says so
            if handle is not None:
                self._ops.not_opened(handle)
            return None
        if not backing:
            return replies.whole_opened(unique, number, NOFLUSH | KEEP_CACHE, 0)
        self._backings.use(node, number)
        return replies.whole_opened(unique, number, NOFLUSH | PASSTHROUGH, backing)

    async def open(self, header: Header, body: requests.Open) -> Answer:
        if header.unique & RESENT and (known := self._opened_before(header, body.flags)):
            return known[1]
        number, direct = await self._ops.open(header.node, body.flags, _caller(header))
        if body.open_flags & constants.OPEN_KILL_SUIDGID:
            self._ops.kill_privileges(header.node)
        return self._opened(header.node, number, body.flags, direct=direct)

    def _opened(self, node: int, number: int, flags: int, *, direct: bool) -> bytes:
        # Without writes a close means nothing, and needs no FLUSH.
        answer = 0 if flags & WRITES else NOFLUSH
        if direct:
            return replies.opened(number, answer | DIRECT_IO)
        if backing := self._backings.lend(self._files, node, number):
            return replies.opened(number, answer | PASSTHROUGH, backing)
        # An inode's bytes change only through the kernel, so what it has cached stays right.
        return replies.opened(number, answer | KEEP_CACHE)

    def _opened_before(self, header: Header, flags: int) -> tuple[Attr, bytes] | None:
        """What the daemon before us opened for this request, and did not come to answer."""
        found = self._files.opened_before(header.unique & ~RESENT)
        if found is None:
            return None
        file, direct = found
        answer = 0 if flags & WRITES else NOFLUSH
        if file.backing:
            opened = replies.opened(file.number, answer | PASSTHROUGH, file.backing)
        elif file.flags & Known.KEPT:
            opened = replies.opened(file.number, answer | KEEP_CACHE)
        else:
            opened = self._opened(file.generation, file.number, flags, direct=direct)
        return self._ops.getattr(file.generation), opened

    async def read(self, header: Header, body: requests.Read) -> Answer:
        return await self._files.read(body.handle, body.offset, body.size)

    async def write(self, header: Header, body: requests.Write) -> Answer:
        if body.write_flags & constants.WRITE_KILL_SUIDGID:
            self._ops.kill_privileges(header.node)
        return replies.written(await self._files.write(body.handle, body.offset, body.data))

    def flush(self, header: Header, body: requests.Flush) -> Answer | None:
        """None: `flush_everywhere` is to be asked."""
        self._files.flush(body.handle, header.pid or None)
        return None if self._files.has_promised(body.handle) else DONE

    async def flush_everywhere(self, header: Header, body: requests.Flush) -> Answer:
        await self._files.keep_promise(body.handle)
        return DONE

    def release(self, header: Header, body: requests.Release) -> Answer:
        self._backings.give_back(header.node, body.handle)
        self._files.release(body.handle)
        return DONE

    async def fsync(self, header: Header, body: requests.Fsync) -> Answer:
        await self._files.fsync(body.handle)
        return DONE

    def take_back(self, header: Header, answer: Answer) -> None:
        """Undo what the kernel must not keep of a request that was answered with an error before.

        What it did to blocks may stay, as behind any request that came too late.
        """
        if header.opcode in (Opcode.OPEN, Opcode.CREATE):
            number = replies.handle_of(answer)
            node = header.node if header.opcode == Opcode.OPEN else replies.inode_of(answer)
            self._backings.give_back(node, number)
            self._files.abandon(number)
        if header.opcode in (Opcode.CREATE, Opcode.MKNOD):
            self._ops.forget(replies.inode_of(answer), 1)

    # -- directories

    def opendir(self, header: Header, body: requests.Open) -> Answer:
        return replies.opened(self._listings.open(header.node, _caller(header)), 0)

    def _listing(self, header: Header, body: requests.Read) -> Iterator[tuple[int, bytes, Attr]]:
        return self._listings.read(body.handle, body.offset, header.node, _caller(header))

    def readdir(self, header: Header, body: requests.Read) -> Answer:
        lines = bytearray()
        for place, name, attr in self._listing(header, body):
            line = replies.dirent(attr.inode, place, name, attr.mode)
            if len(lines) + len(line) > body.size:
                break
            lines += line
        return bytes(lines)

    def readdirplus(self, header: Header, body: requests.Read) -> Answer:
        lines = bytearray()
        for place, name, attr in self._listing(header, body):
            # Nothing to be believed: the kernel takes what a list says for newer than it is.
            told = Attributes._make(attr)._replace(entry_s=0.0, attr_s=0.0)
            line = replies.direntplus(told, place, name)
            if len(lines) + len(line) > body.size:
                break
            lines += line
            self._listings.listed(attr.inode)
        return bytes(lines)

    def releasedir(self, header: Header, body: requests.Release) -> Answer:
        self._listings.close(body.handle)
        return DONE

    async def fsyncdir(self, header: Header, body: requests.Fsync) -> Answer:
        await self._ops.fsync_directory()
        return DONE

    # -- extended attributes

    async def setxattr(self, header: Header, body: requests.Setxattr) -> Answer:
        value = bytes(body.value)
        if body.flags:
            self._check_presence(header.node, body.name, body.flags)
        await self._ops.setxattr(header.node, body.name, value, _caller(header))
        return DONE

    def _check_presence(self, node: int, name: bytes, flags: int) -> None:
        try:
            self._ops.getxattr(node, name)
        except NoAttribute:
            if flags & constants.XATTR_REPLACE:
                raise
        else:
            if flags & constants.XATTR_CREATE:
                raise BlockExists("the attribute is set already")

    def getxattr(self, header: Header, body: requests.Getxattr) -> Answer:
        return _sized(self._ops.getxattr(header.node, body.name), body.size)

    def listxattr(self, header: Header, body: requests.Listxattr) -> Answer:
        names = self._ops.listxattr(header.node)
        return _sized(b"".join(name + b"\0" for name in names), body.size)

    async def removexattr(self, header: Header, body: requests.Name) -> Answer:
        await self._ops.removexattr(header.node, body.name)
        return DONE

    # -- the rest

    def ioctl(self, header: Header, body: requests.Ioctl) -> Answer:
        raise NoIoctl("no ioctl is known here")

    def destroy(self, header: Header, body: requests.Nothing) -> Answer:
        return DONE


def _flags(body: requests.Rename | requests.Rename2) -> int:
    return body.flags if isinstance(body, requests.Rename2) else 0


def _sources(
    header: Header, body: requests.Rename | requests.Rename2
) -> Sequence[tuple[int, bytes]]:
    """Names whose blocks get another one."""
    old, new = (header.node, body.old_name), (body.new_parent, body.new_name)
    return (old, new) if _flags(body) & constants.RENAME_EXCHANGE else (old,)


def _sized(value: bytes, size: int) -> bytes:
    if not size:
        return replies.attribute_size(len(value))
    if len(value) > size:
        raise ValueTooLong(f"{len(value)} bytes")
    return value


# What is missing here is answered ENOSYS, and the kernel does it without us from then on: ACCESS
# (default_permissions), POLL (always ready), LSEEK (no holes), COPY_FILE_RANGE (by read and write),
# STATX (by GETATTR); FALLOCATE is EOPNOTSUPP to programs, and glibc writes instead.
AT_ONCE: dict[int, Callable[[Translator, Header, Any], Answer | None]] = {
    Opcode.LOOKUP: Translator.lookup,
    Opcode.FORGET: Translator.forget,
    Opcode.BATCH_FORGET: Translator.batch_forget,
    Opcode.GETATTR: Translator.getattr,
    Opcode.SYMLINK: Translator.link,
    Opcode.LINK: Translator.link,
    Opcode.MKDIR: Translator.mkdir,
    Opcode.UNLINK: Translator.unlink,
    Opcode.RMDIR: Translator.rmdir,
    Opcode.RENAME: Translator.rename,
    Opcode.RENAME2: Translator.rename,
    Opcode.STATFS: Translator.statfs,
    Opcode.RELEASE: Translator.release,
    Opcode.FLUSH: Translator.flush,
    Opcode.OPENDIR: Translator.opendir,
    Opcode.READDIR: Translator.readdir,
    Opcode.READDIRPLUS: Translator.readdirplus,
    Opcode.RELEASEDIR: Translator.releasedir,
    Opcode.GETXATTR: Translator.getxattr,
    Opcode.LISTXATTR: Translator.listxattr,
    Opcode.IOCTL: Translator.ioctl,
    Opcode.DESTROY: Translator.destroy,
}
MAY_WAIT: dict[int, Callable[[Translator, Header, Any], Coroutine[Any, Any, Answer]]] = {
    Opcode.LOOKUP: Translator.lookup_everywhere,
    Opcode.RENAME: Translator.rename_from_elsewhere,
    Opcode.RENAME2: Translator.rename_from_elsewhere,
    Opcode.SETATTR: Translator.setattr,
    Opcode.MKNOD: Translator.mknod,
    Opcode.CREATE: Translator.create,
    Opcode.OPEN: Translator.open,
    Opcode.READ: Translator.read,
    Opcode.WRITE: Translator.write,
    Opcode.FLUSH: Translator.flush_everywhere,
    Opcode.FSYNC: Translator.fsync,
    Opcode.FSYNCDIR: Translator.fsyncdir,
    Opcode.SETXATTR: Translator.setxattr,
    Opcode.REMOVEXATTR: Translator.removexattr,
}
# These may take as long as it takes to write a block out, or wait for that.
PATIENT = frozenset(
    (
        Opcode.SETATTR,
        Opcode.WRITE,
        Opcode.FLUSH,
        Opcode.FSYNC,
        Opcode.FSYNCDIR,
        Opcode.SETXATTR,
        Opcode.REMOVEXATTR,
    )
)
# Waits for nothing but the next event, and for that a moment only.
UNTIMED = frozenset((Opcode.READ,))


def is_for_reading(body: object) -> bool:
    """Whether this is an open that programs expect to be a miss where a tier is in trouble."""
    return isinstance(body, requests.Open) and not body.flags & WRITES
