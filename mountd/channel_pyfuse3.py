"""The pyfuse3 channel: any kernel, any user. Translates requests, nothing more."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyfuse3
import trio

from ctxfs.errors import ConfigError, CtxfsError
from mountd.channels import ChosenChannel
from mountd.deadlines import Waiter
from mountd.noticing import noticing
from mountd.operations import Operations
from mountd.redirects import RetryLookup
from mountd.session import Session
from mountd.values import NAME_BYTES_MAX, PAGE_BYTES, SPARE_FILES, Attr, Caller, SetAttr

log = logging.getLogger(__name__)

T = TypeVar("T")

# Requests that wait (for room, a promotion, an event) hold a task each; others go on beside them.
TASKS_MAX = 1024
WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC


@contextmanager
def _answering() -> Iterator[None]:
    """Turn errors into what the kernel is told. Anything unexpected is a bug, and crashes."""
    try:
        yield
    except CtxfsError as error:
        raise pyfuse3.FUSEError(error.code) from None
    except RetryLookup:
        raise pyfuse3.FUSEError(errno.ESTALE) from None
    except OSError as error:
        log.exception("a request failed")
        raise pyfuse3.FUSEError(error.errno or errno.EIO) from None


def _attributes(attr: Attr) -> pyfuse3.EntryAttributes:
    result = pyfuse3.EntryAttributes()
    result.st_ino = pyfuse3.InodeT(attr.inode)
    result.st_mode = pyfuse3.ModeT(attr.mode)
    result.st_nlink = attr.nlink
    result.st_uid = attr.uid
    result.st_gid = attr.gid
    result.st_size = attr.size
    result.st_blocks = attr.blocks
    result.st_blksize = PAGE_BYTES
    result.st_atime_ns = attr.atime_ns
    result.st_mtime_ns = attr.mtime_ns
    result.st_ctime_ns = attr.ctime_ns
    result.entry_timeout = attr.entry_s
    result.attr_timeout = attr.attr_s
    return result


def _caller(ctx: pyfuse3.RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid)


class _Wait(Generic[T]):
    """A request's work, in a task of its own, and who waits for what comes of it."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self._scope = trio.CancelScope()
        self._results: list[T] = []
        self._error: Exception | None = None
        self._is_late = False

    def end(self, error: CtxfsError) -> None:
        """It waited too long."""
        self._error, self._is_late = error, True
        self.over.set()
        self._scope.cancel()

    async def carry_out(self, steps: Awaitable[T], undo: Callable[[T], None]) -> None:
        try:
            with self._scope:
                result = await steps
                if self._is_late:
                    undo(result)
                else:
                    self._results.append(result)
        except Exception as error:
            if not self._is_late:
                self._error = error
            elif not isinstance(error, CtxfsError | RetryLookup | OSError):
                raise
        finally:
            self.over.set()

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


class Pyfuse3Channel(pyfuse3.Operations):
    """What pyfuse3 calls for each request of the kernel."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._ops = operations
        self.nursery: trio.Nursery | None = None  # of requests that may wait

    async def _timed(
        self,
        operation: str,
        inode: int,
        steps: Coroutine[Any, Any, T],
        *,
        name: bytes = b"",
        is_patient: bool = False,
        is_reader: bool = False,
        undo: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Await `steps`, but no longer than the deadline; `undo` what comes of them later.

        Then they go on by themselves to where they can be cancelled: a device may hang for ever.
        """
        assert self.nursery is not None
        wait = _Wait[T]()
        deadlines = self._ops.deadlines

        async def carry_out() -> None:
            waiters: list[Waiter] = []
            begin = partial(
                deadlines.begin,
                operation, inode, wait.end, name=name, is_patient=is_patient, is_reader=is_reader,
            )  # fmt: skip
            try:
                await wait.carry_out(noticing(steps, lambda: waiters.append(begin())), undo)
            finally:
                for waiter in waiters:
                    deadlines.over(waiter)

        self.nursery.start_soon(carry_out)
        await wait.over.wait()
        return wait.outcome()

    async def lookup(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        with _answering():
            caller = _caller(ctx)
            return _attributes(await self._ops.lookup_everywhere(parent_inode, name, caller))

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        for inode, count in inode_list:
            self._ops.forget(inode, count)

    async def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with _answering():
            return _attributes(self._ops.getattr(inode))

    async def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        change = SetAttr(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        with _answering():
            steps = self._ops.setattr(inode, change, fh, _caller(ctx))
            return _attributes(await self._timed("SETATTR", inode, steps, is_patient=True))

    async def mknod(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        rdev: int,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        with _answering():
            steps = self._ops.make_file(parent_inode, name, mode, _caller(ctx))
            made = await self._timed("MKNOD", parent_inode, steps, name=name, undo=self._unmake)
            return _attributes(made)

    async def mkdir(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        with _answering():
            return _attributes(self._ops.mkdir(parent_inode, name, mode, _caller(ctx)))

    async def unlink(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        with _answering():
            self._ops.unlink(parent_inode, name, _caller(ctx))

    async def rmdir(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        with _answering():
            self._ops.rmdir(parent_inode, name)

    async def symlink(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        target: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def link(
        self,
        inode: pyfuse3.InodeT,
        new_parent_inode: pyfuse3.InodeT,
        new_name: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def rename(
        self,
        parent_inode_old: pyfuse3.InodeT,
        name_old: pyfuse3.FileNameT,
        parent_inode_new: pyfuse3.InodeT,
        name_new: pyfuse3.FileNameT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        known = pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE
        if flags & ~known:
            raise pyfuse3.FUSEError(errno.EINVAL)
        sources = [(parent_inode_old, name_old)]
        if flags & pyfuse3.RENAME_EXCHANGE:
            sources.append((parent_inode_new, name_new))
        with _answering():
            if self._ops.lie_elsewhere(*sources):
                steps = self._ops.bring_here(*sources)
                await self._timed("RENAME", parent_inode_old, steps, name=name_old)
            is_promised = self._ops.has_promised(*sources)
            self._ops.rename(
                parent_inode_old,
                name_old,
                parent_inode_new,
                name_new,
                _caller(ctx),
                replace=not flags & pyfuse3.RENAME_NOREPLACE,
                exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
            )
            if is_promised:
                steps = self._ops.keep_promise((parent_inode_new, name_new), *sources)
                await self._timed("RENAME", parent_inode_old, steps, name=name_old)

    async def create(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        with _answering():
            steps = self._ops.create(parent_inode, name, mode, flags, _caller(ctx))
            handle, attr = await self._timed(
                "CREATE", parent_inode, steps, name=name, undo=self._uncreate
            )
        return _file(handle), _attributes(attr)

    def _unmake(self, made: Attr) -> None:
        self._ops.forget(made.inode, 1)  # the kernel never heard of it

    def _uncreate(self, created: tuple[int, Attr]) -> None:
        self._ops.files.abandon(created[0])
        self._unmake(created[1])

    async def open(
        self,
        inode: pyfuse3.InodeT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.FileInfo:
        with _answering():
            handle, direct = await self._timed(
                "OPEN",
                inode,
                self._ops.open(inode, flags, _caller(ctx)),
                is_reader=not flags & WRITES,
                undo=lambda opened: self._ops.files.abandon(opened[0]),
            )
        return _file(handle, direct=direct)

    # pyfuse3 takes any contiguous buffer here, and copies it once, to the kernel.
    async def read(  # type: ignore[override]
        self, fh: pyfuse3.FileHandleT, off: int, size: int
    ) -> bytes | memoryview:
        with _answering():
            return await self._ops.files.read(fh, off, size)

    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        with _answering():
            steps = self._ops.files.write(fh, off, buf)
            return await self._timed("WRITE", self._ops.files.inode_of(fh), steps, is_patient=True)

    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        with _answering():
            self._ops.files.flush(fh)
            if self._ops.files.has_promised(fh):
                steps = self._ops.files.keep_promise(fh)
                await self._timed("FLUSH", self._ops.files.inode_of(fh), steps, is_patient=True)

    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        with _answering():
            self._ops.files.release(fh)

    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        with _answering():
            steps = self._ops.files.fsync(fh)
            await self._timed("FSYNC", self._ops.files.inode_of(fh), steps, is_patient=True)

    async def fsyncdir(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        with _answering():
            await self._timed("FSYNCDIR", 0, self._ops.fsync_directory(), is_patient=True)

    async def opendir(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileHandleT:
        with _answering():
            return pyfuse3.FileHandleT(self._ops.listings.open(inode, _caller(ctx)))

    async def readdir(
        self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken
    ) -> None:
        with _answering():
            for place, name, attr in self._ops.listings.read(fh, start_id):
                shown = pyfuse3.FileNameT(name)
                if not pyfuse3.readdir_reply(token, shown, _attributes(attr), place):
                    return
                self._ops.listings.listed(attr.inode)

    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        with _answering():
            self._ops.listings.close(fh)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        with _answering():
            space = self._ops.statfs()
        result = pyfuse3.StatvfsData()
        result.f_bsize = result.f_frsize = PAGE_BYTES
        result.f_blocks = space.total
        result.f_bfree = result.f_bavail = space.free
        result.f_files = space.files + SPARE_FILES
        result.f_ffree = result.f_favail = SPARE_FILES
        result.f_namemax = NAME_BYTES_MAX
        return result

    async def setxattr(
        self,
        inode: pyfuse3.InodeT,
        name: pyfuse3.XAttrNameT,
        value: bytes,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        with _answering():
            steps = self._ops.setxattr(inode, name, value, _caller(ctx))
            await self._timed("SETXATTR", inode, steps, is_patient=True)

    async def getxattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> bytes:
        with _answering():
            return self._ops.getxattr(inode, name)

    async def listxattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> Sequence[pyfuse3.XAttrNameT]:
        with _answering():
            return [pyfuse3.XAttrNameT(name) for name in self._ops.listxattr(inode)]

    async def removexattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        with _answering():
            steps = self._ops.removexattr(inode, name)
            await self._timed("REMOVEXATTR", inode, steps, is_patient=True)


def _file(handle: int, *, direct: bool = False) -> pyfuse3.FileInfo:
    # An inode's bytes change only through the kernel, so what it has cached of them stays right.
    return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), direct_io=direct, keep_cache=not direct)


class Pyfuse3Mount:
    """A mount that pyfuse3 answers."""

    def __init__(self, channel: Pyfuse3Channel) -> None:
        self._channel = channel

    async def serve(
        self,
        scope: trio.CancelScope,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer the kernel until the mount is ended (then cancel `scope`), or until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._channel.nursery = nursery
                task_status.started()
                await pyfuse3.main(max_tasks=TASKS_MAX)
                nursery.cancel_scope.cancel()
        except* OSError as group:
            _, others = group.split(_is_end)
            if others is not None:
                raise others from None
        log.info("the mount was ended from outside")
        scope.cancel()


def _is_end(error: BaseException) -> bool:
    """Whether the mount was ended just while a request was being read; libfuse knows ENODEV only.

    fs/fuse/dev.c, fuse_dev_do_read: ECONNABORTED where the connection goes in the middle.
    """
    return isinstance(error, OSError) and error.errno == errno.ECONNABORTED


@contextmanager
def mounted(
    operations: Operations,
    path: Path,
    *,
    fsname: str,
    allow_other: bool,
    chosen: ChosenChannel,
    session: Session | None = None,
    fuse_fd: int | None = None,
) -> Iterator[Pyfuse3Mount]:
    """Mount at `path`; `serve` answers until the mount is ended. Unmounts at the end.

    libfuse cannot take over a mount: there is no `session` here, and no `fuse_fd`.
    """
    options = {"default_permissions", f"fsname={fsname}", "subtype=ctxfs"}
    if allow_other:
        options.add("allow_other")
    channel = Pyfuse3Channel(operations)
    try:
        pyfuse3.init(channel, str(path), options)
    except RuntimeError as error:
        raise ConfigError(f"cannot mount at {path}: {error}; see ctx doctor") from error
    try:
        yield Pyfuse3Mount(channel)
    finally:
        pyfuse3.close(unmount=True)
