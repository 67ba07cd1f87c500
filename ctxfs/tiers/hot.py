"""The hot tier: one file per block in a private tmpfs, so that the page cache *is* the tier.

Accounting is by physical bytes (`st_blocks`) of the block files and of the journal beside them.
Growth is reserved before bytes are written, so the cap holds whatever the number of writers; the
tmpfs carries the same limit, as a second line. Where the tmpfs is ours alone, what is used is asked
of the kernel: files that were lent to it live on, unlinked and closed, while somebody maps them.
"""

import contextlib
import errno
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxfs.core.meta import JournalEntry
from ctxfs.device import leases
from ctxfs.device.engine import Span
from ctxfs.device.mapping import Mapping
from ctxfs.errors import TierFull, TierTrouble
from ctxfs.tiers.hot_journal import HotJournal
from ctxfs.tiers.hot_spares import Spares

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
ARRIVING = ".arriving"  # how the names of files end whose content is not there yet
GONE = ".gone"  # of files whose block is gone, and that somebody has open
SPARES_SHARE = 16  # at most this part of the tier is files without a block
JOURNAL_ROOM_BYTES = 1 << 20  # kept free so that an entry always fits
UNUSED_MAX = 256  # files that stay open after their last lease, for the next one


def physical_ceiling(length: int, unit: int = PAGE_BYTES) -> int:
    """Return `length` rounded up to whole units."""
    return -(-length // unit) * unit


class HotFile:
    """The bytes of one block, open. `leases` counts those who use it.

    Of the open descriptions that clients have, `lent` counts those that the kernel serves from
    this file by itself, `kept` those for which it asks us. A channel that lends keeps both.
    Invariant: one of the two is 0, since the kernel refuses a mix. `granted_bytes` is room set
    aside for growth of which we are not asked.
    """

    __slots__ = (
        "_mapping",
        "dense",
        "fd",
        "generation",
        "granted_bytes",
        "kept",
        "leases",
        "lent",
        "name",
        "physical_bytes",
        "removed",
        "size",
    )

    def __init__(self, generation: int, name: str, fd: int, size: int, physical_bytes: int) -> None:
        self.generation = generation
        self.name = name
        self.fd = fd
        self.size = size
        self.physical_bytes = physical_bytes
        self.leases = 1
        self.lent = 0
        self.kept = 0
        self.granted_bytes = 0
        self.removed = False
        self.dense: bool | None = None  # None: not looked at since the last change
        self._mapping: Mapping | None = None

    def has_holes(self) -> bool:
        """Whether a mapping must not be touched: it would fill the holes with memory that nobody
        reserved, and the process dies of SIGBUS where there is none.
        """
        if self.dense is None:
            self.dense = not self.size or os.lseek(self.fd, 0, os.SEEK_HOLE) >= self.size
        return not self.dense

    def pieces(self, length: int = 1 << 20) -> Iterator[bytes]:
        """Yield the content by reading, which fills no holes."""
        for offset in range(0, self.size, length):
            yield os.pread(self.fd, length, offset)

    def mapping(self) -> Mapping:
        """Return a mapping of the whole file; only while nobody changes its size, and to be read
        only where it has no holes. Raises TierTrouble.
        """
        if self._mapping is None:
            try:
                self._mapping = Mapping(self.fd, self.size)
            except OSError as error:
                raise TierTrouble(f"a hot file cannot be mapped: {error.strerror}") from error
        return self._mapping

    def span(self) -> Span:
        """Return the content as plain memory, whole pages; of an empty block, none."""
        return self.mapping().span(0, self.size)

    def unmap(self) -> None:
        """Let go of the mapping, if there is one."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A block file of the daemon's former life."""

    generation: int
    size: int
    physical_bytes: int
    is_gone: bool  # no name led to it any more


class HotTier:
    """Block files, their room, and their journal."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        huge: bool,
        files_max: int = 1 << 20,
        is_alone: bool = False,
    ) -> None:
        """`files_max`: how many may be open for clients. `is_alone`: the tmpfs has nothing else."""
        self.capacity_bytes = capacity_bytes
        self.huge = huge
        self.is_alone = is_alone
        self.reserved_bytes = 0
        self.files_max = files_max
        self._blocks_bytes = 0
        self.beside_bytes = 0  # what else lies in the tmpfs
        self._open: dict[int, HotFile] = {}
        # Of those, files without a lease, the longest unused first. None of them is removed.
        self._unused: OrderedDict[int, HotFile] = OrderedDict()
        self._unused_max = min(UNUSED_MAX, files_max // 8)
        self._growing: set[HotFile] = set()  # they may grow without our doing
        blocks = path / "blocks"
        blocks.mkdir(mode=0o700, exist_ok=True)
        self._dirfd = os.open(blocks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.journal = HotJournal(path)
        self.spares = Spares(self._dirfd, capacity_bytes // SPARES_SHARE)
        # Invariant: _blocks_bytes == sum of physical bytes of all files of blocks, unlinked open
        # ones too.

    @property
    def is_crowded(self) -> bool:
        """Whether no more files should be opened for clients: the rest is for what must go on."""
        return len(self._open) - len(self._unused) >= self.files_max

    # -- room

    @property
    def used_bytes(self) -> int:
        """Physical bytes in use, with the room that the journal needs to be rewritten in."""
        journal = self.journal.physical_bytes
        there = self._files_bytes + self.beside_bytes + journal + self.orphaned_bytes
        return there + max(journal, JOURNAL_ROOM_BYTES)

    @property
    def _files_bytes(self) -> int:
        return self._blocks_bytes + self.spares.physical_bytes

    @property
    def orphaned_bytes(self) -> int:
        """Bytes of files that are gone for us, and that somebody still has mapped."""
        if not self.is_alone:
            return 0
        usage = os.fstatvfs(self._dirfd)
        there = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        # The journal's ballast lies in the room that is kept free for it.
        journal = self.journal.physical_bytes + self.journal.ballast_bytes
        return max(0, there - self._files_bytes - self.beside_bytes - journal)

    @property
    def room_bytes(self) -> int:
        """What may still be reserved; negative when the journal has grown over the edge."""
        return self.capacity_bytes - self.used_bytes - self.reserved_bytes

    @property
    def block_capacity_bytes(self) -> int:
        """What one block could take if it were alone."""
        journal = self.journal.physical_bytes
        beside = journal + self.beside_bytes
        return self.capacity_bytes - beside - max(journal, JOURNAL_ROOM_BYTES)

    def holds_removed(self, *, but: Collection[int]) -> bool:
        """Whether files are unlinked and open, other than these: their room is to come back."""
        return any(file.removed and file.generation not in but for file in self._open.values())

    def try_reserve(self, need_bytes: int) -> bool:
        """Set room aside, if there is."""
        if need_bytes > self.room_bytes:
            for file in self._growing:  # what was written counts twice until it is looked at
                self.settle(file)
            if need_bytes > self.room_bytes:
                self.spares.drop()
            if need_bytes > self.room_bytes:
                return False
        self.reserved_bytes += need_bytes
        return True

    def unreserve(self, need_bytes: int) -> None:
        """Give back what was set aside, used or not."""
        self.reserved_bytes -= need_bytes

    def grant(self, file: HotFile, reserved_bytes: int) -> None:
        """Let a file grow without asking; what it takes comes off room that was reserved."""
        file.granted_bytes += reserved_bytes
        self._growing.add(file)

    def take_grant(self, file: HotFile) -> None:
        """Give back what is left of a file's grant."""
        self.unreserve(file.granted_bytes)
        file.granted_bytes = 0

    def grows_no_more(self, file: HotFile) -> None:
        """Nobody writes a file without our doing any more."""
        self.take_grant(file)
        self._growing.discard(file)

    def growth_ceiling(self, file: HotFile, offset: int, length: int) -> int:
        """Return the most physical bytes that changing this range can add."""
        end = offset + length
        if end <= file.size and file.physical_bytes >= physical_ceiling(file.size):
            return 0  # no holes
        unit = HUGE_PAGE_BYTES if self.huge and end <= file.size else PAGE_BYTES
        return physical_ceiling(end, unit) - offset // unit * unit

    # -- files

    def create(self, generation: int, *, arriving: bool = False) -> HotFile:
        """Make an empty block file. Raises TierFull without an inode left, TierTrouble.

        `arriving`: it is to become the copy of a sealed block, and is none until `arrived`. The
        next daemon must not take half a copy for the whole one.
        """
        name = _name(generation) + (ARRIVING if arriving else "")
        try:
            fd = os.open(
                name,
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o600,
                dir_fd=self._dirfd,
            )
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise TierFull("the hot tier has no room for another file") from error
            raise TierTrouble(f"a hot file cannot be made: {error.strerror}") from error
        file = HotFile(generation, name, fd, 0, 0)
        self._open[generation] = file
        return file

    def recycle(self, generation: int, size: int) -> HotFile | None:
        """Return an arriving file of that size whose pages are there, if one is to be had.

        Its content is another block's, and to be overwritten whole.
        """
        found = self.spares.take(size)
        if found is None:
            return None
        fd, spare = found
        name = _name(generation) + ARRIVING
        os.rename(spare.name, name, src_dir_fd=self._dirfd, dst_dir_fd=self._dirfd)
        file = HotFile(generation, name, fd, size, spare.physical_bytes)
        self._blocks_bytes += spare.physical_bytes
        self._open[generation] = file
        return file

    def arrived(self, file: HotFile) -> None:
        """The content of an arriving file is there and right."""
        name = _name(file.generation)
        os.rename(file.name, name, src_dir_fd=self._dirfd, dst_dir_fd=self._dirfd)
        file.name = name

    def acquire(self, generation: int) -> HotFile:
        """Return the block's file, opened if it was not.

        Raises FileNotFoundError if it is lost, TierTrouble if it cannot be opened now.
        """
        file = self._open.get(generation)
        if file is not None and not file.leases:
            del self._unused[generation]
            if not os.fstat(file.fd).st_nlink:  # removed behind our back
                self._close(file)
                file = None
        if file is None:
            return self._open_file(generation, _name(generation))
        file.leases += 1
        return file

    def acquire_gone(self, generation: int) -> HotFile:
        """Like `acquire`, for a block that is gone and was open in the daemon's former life."""
        file = self._open.get(generation)
        if file is not None:
            file.leases += 1
            return file
        file = self._open_file(generation, _name(generation) + GONE)
        file.removed = True
        return file

    def _open_file(self, generation: int, name: str) -> HotFile:
        try:
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._dirfd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise TierTrouble(f"a hot file cannot be opened: {error.strerror}") from error
        facts = os.fstat(fd)
        file = HotFile(generation, name, fd, facts.st_size, facts.st_blocks * 512)
        self._open[generation] = file
        return file

    def release(self, file: HotFile) -> None:
        """Give up one lease; some time after the last one, the file is closed."""
        file.leases -= 1
        if file.leases:
            return
        file.unmap()
        self.grows_no_more(file)
        if file.removed or self._open.get(file.generation) is not file:
            self._close(file)
            return
        self._unused[file.generation] = file
        if len(self._unused) > self._unused_max:
            self._close(self._unused.popitem(last=False)[1])

    def _close(self, file: HotFile) -> None:
        if self._open.get(file.generation) is file:  # else another copy was made meanwhile
            del self._open[file.generation]
        os.close(file.fd)
        if file.removed:
            self._unlink(file.name)
            self._blocks_bytes -= file.physical_bytes

    def remove(self, generation: int, physical_bytes: int, *, spare_size: int = 0) -> None:
        """Take the block file away; one that is open, when the last lease ends.

        Until then it keeps a name, under which the next daemon finds it for those who have it open.
        `spare_size`: how long it is, if it may be kept for a block that comes.
        """
        file = self._open.get(generation)
        if file is not None and not file.leases:
            self._close(self._unused.pop(generation))
            file = None
        if file is None:
            name = _name(generation)
            if not spare_size or not self.spares.keep(name, spare_size, physical_bytes):
                self._unlink(name)
            self._blocks_bytes -= physical_bytes
            return
        file.removed = True
        if file.name.endswith(ARRIVING):
            self._unlink(file.name)
            return
        gone = _name(generation) + GONE
        # Somebody may have removed it behind our back; the accounting still holds.
        with contextlib.suppress(FileNotFoundError):
            os.rename(file.name, gone, src_dir_fd=self._dirfd, dst_dir_fd=self._dirfd)
        file.name = gone

    def retire(self, found: FoundFile) -> None:
        """Give a file of the daemon's former life, whose block is gone, the name of such."""
        if not found.is_gone:
            name = _name(found.generation)
            os.rename(name, name + GONE, src_dir_fd=self._dirfd, dst_dir_fd=self._dirfd)

    def discard(self, found: FoundFile) -> None:
        """Take away a file of the daemon's former life."""
        self._unlink(_name(found.generation) + (GONE if found.is_gone else ""))
        self._blocks_bytes -= found.physical_bytes

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._dirfd)

    # -- bytes

    def write(self, file: HotFile, offset: int, data: bytes | memoryview) -> int:
        """Write all of `data`. The caller has reserved `growth_ceiling`. Raises TierFull."""
        view = memoryview(data)
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(file.fd, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise TierFull("the hot tier is full") from error
        finally:
            file.unmap()
            self.settle(file)
        return done

    def truncate(self, file: HotFile, size: int) -> None:
        """Set the size; new bytes read as zeros and take no room until written."""
        file.unmap()
        os.ftruncate(file.fd, size)
        self.settle(file)

    def allocate(self, file: HotFile, size: int) -> None:
        """Give a new file its size and all its pages, so that a device may write into them.

        The caller has reserved them. Raises TierFull where memory is short all the same: better
        here than as a fault in the middle of a transfer. Slow for large files.
        """
        if size:
            try:
                os.posix_fallocate(file.fd, 0, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise TierFull("the hot tier's memory is short") from error

    def settle(self, file: HotFile) -> int:
        """Learn the file's size and physical bytes from the kernel; its time of change, ns."""
        facts = os.fstat(file.fd)
        physical = facts.st_blocks * 512
        grown = physical - file.physical_bytes
        self._blocks_bytes += grown
        if file.granted_bytes and grown > 0:
            used = min(grown, file.granted_bytes)
            file.granted_bytes -= used
            self.reserved_bytes -= used
        file.size, file.physical_bytes, file.dense = facts.st_size, physical, None
        return facts.st_mtime_ns

    def is_written_elsewhere(self, file: HotFile) -> bool:
        """Whether somebody may change the file without our doing. Raises TierTrouble."""
        file.unmap()
        return leases.is_written_elsewhere(file.fd)

    # -- the daemon's former life

    def scan(self) -> Iterable[FoundFile]:
        """Yield the block files that are there, and count them as used. What was arriving goes."""
        with os.scandir(self._dirfd) as entries:
            for entry in entries:
                number, _, kind = entry.name.partition(".")
                if kind not in ("", GONE[1:]):
                    self._unlink(entry.name)
                    continue
                facts = entry.stat(follow_symlinks=False)
                found = FoundFile(
                    int(number, 16), facts.st_size, facts.st_blocks * 512, is_gone=bool(kind)
                )
                self._blocks_bytes += found.physical_bytes
                yield found

    def record(self, entry: JournalEntry) -> None:
        """Append to the journal."""
        self.journal.append(entry)

    def close(self) -> None:
        """Close what is open; the files stay where they are."""
        for file in self._open.values():
            file.unmap()
            os.close(file.fd)
        self._open.clear()
        os.close(self._dirfd)
        self.journal.close()


def _name(generation: int) -> str:
    return f"{generation:016x}"
