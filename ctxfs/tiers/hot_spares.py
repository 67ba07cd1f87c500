"""Hot files of blocks that left, kept with their pages for those of the same size that come.

To read a block into pages that are there costs less than into new ones, which the kernel fills with
zeros first. Only a promotion may take one: it overwrites the whole before anybody sees it.
"""

import contextlib
import os
from collections import OrderedDict
from dataclasses import dataclass

from ctxfs.device import leases

SUFFIX = ".spare"
SPARE_MIN_BYTES = 64 << 10  # less is not worth the calls


@dataclass(frozen=True, slots=True)
class Spare:
    """A file that holds no block any more."""

    name: str
    size: int
    physical_bytes: int


class Spares:
    """A bounded number of bytes in such files; the oldest give way."""

    def __init__(self, dirfd: int, bytes_max: int) -> None:
        """`dirfd`: where the files lie."""
        self._dirfd = dirfd
        self._bytes_max = bytes_max if leases.are_enabled() else 0
        self._spares: OrderedDict[str, Spare] = OrderedDict()
        self._touched = False
        self.physical_bytes = 0

    def __len__(self) -> int:
        return len(self._spares)

    def keep(self, name: str, size: int, physical_bytes: int) -> bool:
        """Keep a file under another name, if there is room for it here. Somebody may have it open
        or mapped: its bytes stay as they are.
        """
        is_whole = physical_bytes >= size >= SPARE_MIN_BYTES
        if not is_whole or self.physical_bytes + physical_bytes > self._bytes_max:
            return False
        spare = Spare(name + SUFFIX, size, physical_bytes)
        try:
            os.rename(name, spare.name, src_dir_fd=self._dirfd, dst_dir_fd=self._dirfd)
        except FileNotFoundError:
            return False
        self._spares[spare.name] = spare
        self.physical_bytes += physical_bytes
        self._touched = True
        return True

    def take(self, size: int) -> tuple[int, Spare] | None:
        """Return a file of that size, open, that nobody else has open or mapped; its content may
        be overwritten. It is not ours any more.
        """
        for spare in [each for each in self._spares.values() if each.size == size]:
            self._forget(spare)
            try:
                fd = os.open(spare.name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._dirfd)
            except OSError:
                self._unlink(spare)
                continue
            if os.fstat(fd).st_size == size and not leases.is_open_elsewhere(fd):
                self._touched = True
                return fd, spare
            os.close(fd)
            self._unlink(spare)  # those who read it keep it
        return None

    def drop(self) -> None:
        """Give back the memory of all."""
        for spare in list(self._spares.values()):
            self._forget(spare)
            self._unlink(spare)

    def drop_if_idle(self) -> None:
        """Give it back if none came or went since this was last called."""
        if not self._touched:
            self.drop()
        self._touched = False

    def _forget(self, spare: Spare) -> None:
        del self._spares[spare.name]
        self.physical_bytes -= spare.physical_bytes

    def _unlink(self, spare: Spare) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(spare.name, dir_fd=self._dirfd)
