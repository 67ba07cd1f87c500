"""The list of entries beside the hot blocks, from which a restarted daemon knows them again.

It lies in the same tmpfs: an append costs one system call and survives the process, not the
machine. Frames carry checksums, so a torn tail is recognised and cut (docs/ondisk.md).
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ctxfs.core.meta import JournalEntry
from ctxfs.ondisk.ledger import decode_all, encode

_SLACK_BYTES = 1 << 20  # below this a rewrite frees nothing worth the work
_PAGE_BYTES = 4096
_BALLAST_BYTES = 512 << 10  # thousands of entries


class HotJournal:
    """An append-only file of frames, rewritten when most of it is history."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal"
        self._new_path = directory / "journal.new"
        self._fd = _open_append(self._path)
        self._bytes = os.fstat(self._fd).st_size
        self._bytes_after_rewrite = 0
        self._new_fd: int | None = None  # of the one that is to replace it, while that is written
        self.before_append: Callable[[], None] | None = None
        # Room that is taken so that it can be given back: clients to whom files are lent may fill
        # the tmpfs to its last page, and what happens then must be written down all the same.
        self._ballast = directory / "ballast"
        self.ballast_bytes = 0
        self.keep_ballast()

    @property
    def physical_bytes(self) -> int:
        """Room it takes in the tmpfs."""
        return -(-self._bytes // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def wants_rewrite(self) -> bool:
        """Whether more than half of it is probably history."""
        return self._bytes > 2 * self._bytes_after_rewrite + _SLACK_BYTES

    def append(self, entry: JournalEntry) -> None:
        """Add one entry; it outlives the process when this returns."""
        frame = encode(entry)
        if self.before_append is not None:
            self.before_append()
        if not self._write(frame):
            self._abandon_rewritten()
            self._ballast.unlink(missing_ok=True)
            self.ballast_bytes = 0
            if not self._write(frame):
                raise OSError(errno.ENOSPC, "the hot journal cannot grow")
        if self._new_fd is not None:
            self._append_rewritten(frame)

    def _write(self, frame: bytes) -> bool:
        """Whether there was room for the whole of it; if not, it is as if nothing was written."""
        try:
            done = os.write(self._fd, frame)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            done = 0
        if done != len(frame):  # a torn frame would hide all that follow it
            os.ftruncate(self._fd, self._bytes)
            return False
        self._bytes += done
        return True

    def keep_ballast(self) -> None:
        """Take the room anew if it was given back, and there is some."""
        if self.ballast_bytes:
            return
        fd = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _BALLAST_BYTES)
            self.ballast_bytes = os.fstat(fd).st_blocks * 512
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._ballast.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def load(self) -> list[JournalEntry]:
        """Return all entries, and cut a torn tail."""
        content = self._path.read_bytes()
        entries, good = decode_all(content)
        if good != len(content):
            os.ftruncate(self._fd, good)
        self._bytes = good
        return entries

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Callable[[Iterable[JournalEntry]], None]]:
        """Replace the whole journal, in one step at the end, by what the function given adds.

        What is appended meanwhile goes to both, so whoever adds may take breaks. Raises OSError
        where there is no room for it, and the journal is what it was.
        """
        self._new_fd = _open_append(self._new_path, os.O_TRUNC)
        try:
            yield self._add_rewritten
            fd = self._new_fd
            if fd is None:
                raise OSError(errno.ENOSPC, "the hot journal cannot be rewritten")
            size = os.fstat(fd).st_size
            os.rename(self._new_path, self._path)
        except BaseException:
            self._abandon_rewritten()
            raise
        self._new_fd = None
        os.close(self._fd)
        self._fd = fd
        self._bytes = self._bytes_after_rewrite = size

    def _add_rewritten(self, entries: Iterable[JournalEntry]) -> None:
        self._write_rewritten(b"".join(map(encode, entries)))

    def _write_rewritten(self, frames: bytes) -> None:
        if self._new_fd is None or os.write(self._new_fd, frames) != len(frames):
            raise OSError(errno.ENOSPC, "the hot journal cannot be rewritten")

    def _append_rewritten(self, frame: bytes) -> None:
        """What has no room there ends the rewriting, and nothing else."""
        try:
            self._write_rewritten(frame)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._abandon_rewritten()

    def _abandon_rewritten(self) -> None:
        if self._new_fd is not None:
            os.close(self._new_fd)
            self._new_fd = None
            self._new_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; it stays."""
        self._abandon_rewritten()
        os.close(self._fd)


def _open_append(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
