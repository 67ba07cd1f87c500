"""Open files by number: reading, writing, closing, and what a successor must know of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ctxfs.core.block import Block
from ctxfs.core.key import is_temporary
from ctxfs.errors import NotPermitted, NotYours, TierFull, TierTrouble
from ctxfs.store.handle import Handle, Way
from ctxfs.store.store import Store
from mountd import process
from mountd.control import ControlDirectory, Reader
from mountd.session import OpenFile, OpenFlag, Session
from mountd.values import Caller

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """An open file: a block, or a file of `.ctx`."""

    handle: Handle | None = None
    reader: Reader | None = None
    newest_pid: int = 0  # at open; if it is the same at close, nobody can have inherited it
    killed: bool = False  # the writer was: what it had not published is nothing


class OpenFiles:
    """All that is open. Errors as those of `Operations`."""

    def __init__(self, store: Store, control: ControlDirectory, session: Session | None) -> None:
        """`session`: where they are written down for a daemon that takes over."""
        self._store = store
        self._names = store.catalog.names
        self._control = control
        self._session = session
        self._opened: dict[int, Opened] = {}
        self._next = 1  # where no session gives the numbers

    def add(self, opened: Opened, generation: int, caller: Caller) -> int:
        """Number an open file, and write it down."""
        if self._session is None:
            number = self._next
            self._next += 1
        else:
            owner = opened.handle.owner if opened.handle is not None else 0
            number = self._session.add(
                generation, owner, opened.newest_pid, _flags(opened), caller.request
            )
        self._opened[number] = opened
        return number

    def add_reader(
        self, handle: Handle, request: int, number_of: Callable[[int, int], int]
    ) -> tuple[int, int]:
        """Number an open for reading, lent if it may be, and write it down in one go.

        `number_of` returns what the kernel knows a file by, of an inode and a descriptor; 0: it
        takes none. Returns that, too, after the number. Raises TooManyOpen.
        """
        lending, generation = self._store.lending, handle.block.generation
        fd = lending.lend(handle)
        backing = number_of(generation, fd) if fd is not None else 0
        if fd is not None and not backing:
            lending.keep(handle)
        opened = Opened(handle)
        if self._session is None:
            number = self._next
            self._next += 1
        else:
            number = self._session.add(
                generation, handle.owner, 0, _WAY_FLAGS[handle.way], request, backing
            )
        self._opened[number] = opened
        return number, backing

    def _note(self, number: int, opened: Opened, backing: int | None = None) -> None:
        """Write down what changed of an open file."""
        if self._session is not None:
            self._session.set_flags(number, _flags(opened), backing)

    def get(self, number: int) -> Opened:
        """Return an open file. Raises TierTrouble if nobody knows it."""
        opened = self._opened.get(number)
        if opened is None:  # of the daemon's former life, and its bytes were lost
            raise TierTrouble("the open file is not known any more")
        return opened

    def inode_of(self, number: int) -> int:
        """Return the inode of an open file; 0 where it is none, or one of `.ctx`."""
        opened = self._opened.get(number)
        handle = opened.handle if opened is not None else None
        return handle.block.generation if handle is not None else 0

    def writer(self, number: int | None) -> Handle | None:
        """Return what a file is written through; None where it is not open for writing."""
        opened = self._opened.get(number) if number is not None else None
        handle = opened.handle if opened is not None else None
        return handle if handle is not None and handle.writable else None

    # -- of the daemon before this one

    def resume(self) -> list[OpenFile]:
        """Take over the open files of the daemon's former life. Returns those that are there."""
        if self._session is None:
            return []
        resumed = []
        for file in list(self._session.files()):
            opened = self._resumed(file)
            if opened is None:
                log.error("an open file of generation %d cannot be taken over", file.generation)
                self._session.remove(file.number)
            else:
                self._opened[file.number] = opened
                resumed.append(file)
        self._store.sealing.settle_resumed()
        return resumed

    def _resumed(self, file: OpenFile) -> Opened | None:
        control = self._control.by_inode.get(file.generation)
        if control is not None:
            return Opened(reader=control.open())
        block = self._names.by_inode.get(file.generation)
        if not isinstance(block, Block):
            return None
        flags = file.flags
        handle = self._store.resume(
            block,
            file.owner,
            writable=bool(flags & OpenFlag.WRITABLE),
            wrote=bool(flags & OpenFlag.WROTE),
            way=_way(flags),
        )
        if handle is None:
            return None
        killed = bool(flags & OpenFlag.KILLED)
        return Opened(handle, newest_pid=file.newest_pid, killed=killed)

    def opened_before(self, request: int) -> tuple[OpenFile, bool] | None:
        """Return what this request opened already, before the daemon was replaced.

        The last: whether it bypasses the page cache, as `Operations.open` says.
        """
        file = self._session.opened_by(request) if self._session is not None else None
        opened = self._opened.get(file.number) if file is not None else None
        if file is None or opened is None:
            return None
        return file, opened.reader is not None

    # -- lent to the kernel

    def lend(self, number: int) -> int | None:
        """Return the descriptor of a file that the kernel may serve this open from by itself."""
        opened = self._opened[number]
        fd = self._store.lending.lend(opened.handle) if opened.handle is not None else None
        if fd is None:
            self._note(number, opened)
        return fd

    def lent(self, number: int, backing: int) -> None:
        """The kernel serves this open by itself, and knows the file by this id."""
        self._note(number, self._opened[number], backing)

    def keep(self, number: int) -> None:
        """What `lend` returned could not be lent: the kernel will ask."""
        opened = self._opened[number]
        if opened.handle is not None:
            self._store.lending.keep(opened.handle)
            self._note(number, opened)

    # -- bytes

    async def read(self, number: int, offset: int, length: int) -> bytes | memoryview:
        """Read; less than asked only at the end."""
        opened = self.get(number)
        if opened.reader is not None:
            return await opened.reader(offset, length)
        assert opened.handle is not None
        return self._store.content.read(opened.handle, offset, length)

    async def write(self, number: int, offset: int, data: bytes | memoryview) -> int:
        """Write all of it."""
        opened = self.get(number)
        handle = opened.handle
        if handle is None or not handle.writable:
            raise NotPermitted("not open for writing")
        if not handle.wrote:
            handle.wrote = True  # known to a successor before the bytes are there
            self._note(number, opened)
        return await self._store.content.write(handle, offset, data)

    async def fsync(self, number: int) -> None:
        """Return when the block is on the cold tier's medium, and where else it is to be."""
        handle = self.get(number).handle
        if handle is not None:
            await self._store.sealing.sync(handle.block)

    def has_promised(self, number: int) -> bool:
        """Whether a close is to wait for what was synced before: `keep_promise`."""
        handle = self.writer(number)
        return handle is not None and self._store.sealing.has_promised(handle.block)

    async def keep_promise(self, number: int) -> None:
        """Return when what was synced before it was closed is where it is to be."""
        handle = self.writer(number)
        if handle is not None:
            await self._store.sealing.keep_promise(handle.block)

    # -- the end

    def flush(self, number: int, closer: int | None = None) -> None:
        """A descriptor was closed; `closer` is the thread that did, where the channel knows."""
        opened = self.get(number)
        handle = opened.handle
        if handle is None or not handle.writable or handle.block.published:
            return
        self._store.content.refresh(handle.block)
        fate = process.fate_of(handle.owner)
        if fate is process.Fate.KILLED and not opened.killed:
            opened.killed = True
            self._note(number, opened)
        if opened.killed:
            return  # it leaves nothing: release discards it
        if fate is process.Fate.ALIVE and self._is_stray(opened, handle, closer):
            return
        if handle.block.writing is not None and handle.block.writing.refused_at is not None:
            raise TierFull("a write to this block had no room")  # for those who did not look
        if not self._store.publish_on_close(handle):
            raise NotYours("the name was taken by somebody else meanwhile")

    def _is_stray(self, opened: Opened, handle: Handle, closer: int | None) -> bool:
        """Whether the owner still writes: another process closed a copy it inherited, or a shell
        closed the descriptor from which it had made the program's standard output.
        """
        writing = handle.block.writing
        assert writing is not None
        if writing.changed:
            if closer is not None:
                return process.process_of(closer) != handle.owner
            if is_temporary(handle.block.name):
                return False  # seeing it early does no harm: it is about to be renamed
            if process.newest_pid() == opened.newest_pid:
                return False
        # The owner closed nothing if it has a descriptor for each open description left.
        left = process.writable_descriptors(handle.owner, handle.block.generation)
        return left >= writing.writers

    def release(self, number: int) -> None:
        """The last descriptor of an open is gone."""
        opened = self._opened.pop(number, None)
        if opened is None:
            return  # by the daemon before this one, which did not come to say so
        if opened.handle is not None:
            if not opened.killed:  # a close that was taken for a stray one, and was not
                self._store.publish_on_close(opened.handle)
            self._store.release(opened.handle)
        if self._session is not None:
            self._session.remove(number)

    def abandon(self, number: int) -> None:
        """Undo an open that was refused in the end: what only it made is not published."""
        self._opened[number].killed = True
        self.release(number)


def _flags(opened: Opened) -> OpenFlag:
    """What is written down of an open file."""
    handle = opened.handle
    if handle is None or (handle.way is Way.UNSAID and not handle.writable):
        return _NONE
    flags = _WAY_FLAGS[handle.way]
    if handle.writable:
        flags |= OpenFlag.WRITABLE
        if handle.wrote:
            flags |= OpenFlag.WROTE
        if opened.killed:
            flags |= OpenFlag.KILLED
    return flags


_NONE = OpenFlag(0)
_WAY_FLAGS = {Way.UNSAID: _NONE, Way.LENT: OpenFlag.LENT, Way.KEPT: OpenFlag.KEPT}


def _way(flags: OpenFlag) -> Way:
    if flags & OpenFlag.LENT:
        return Way.LENT
    return Way.KEPT if flags & OpenFlag.KEPT else Way.UNSAID
