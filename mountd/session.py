"""What is open, in a file that outlives the process: docs/direct.md has its tables.

Every change is a store into a shared mapping. A handle's number is written last and cleared first,
so a slot is whole or free at any moment.
"""

from __future__ import annotations

import enum
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from ctxfs.errors import TooManyOpen

MAGIC = b"CTXFSSES"
VERSION = 1
RESENT = 1 << 63  # linux/fuse.h, FUSE_UNIQUE_RESEND: the request may have been read before

HEADER = Struct("<8sIIIIII8xQI")
NOTED_BACKINGS = 256  # ids that were kept when no open file used them, in use again or not
SENT_BACK_AT = 1088
SENT_BACK = 62
REDIRECT = Struct("<6Q")
MARKS_AT = 4096
MARKS = 1024
SLOTS_AT = 12288
SLOTS_FIRST = 256
SLOT = Struct("<QQQIIII")
SLOT_BYTES = 64
SLOT_BITS = 24  # of a handle; the rest counts
U64 = Struct("<Q")
U32 = Struct("<I")
_READY_AT, _OPENED_AT, _BACKING_AT, _NOTED_AT = 12, 40, 48, 64
_SLOT_BACKING, _SLOT_FLAGS = 32, 36


class OpenFlag(enum.IntFlag):
    """What is known of an open file."""

    WRITABLE = 1
    WROTE = 2
    LENT = 4
    KEPT = 8
    KILLED = 16  # its writer was, before it published


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One slot."""

    number: int  # the handle
    generation: int
    request: int  # that opened it
    owner: int
    newest_pid: int
    backing: int
    flags: OpenFlag


@dataclass(frozen=True, slots=True)
class NotedRedirect:
    """An open that was sent to look its name up again. Blocks by generation; 0: none."""

    thread: int
    request: int  # that was answered so
    at_ns: int  # boot clock
    block: int
    instead: int
    held: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the first child negotiated with the kernel."""

    minor: int
    max_write: int
    passthrough: bool


class Session:
    """The file, and which request is in hand."""

    def __init__(self, path: Path) -> None:
        """Open what an earlier child left, or begin anew where there is nothing of use."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._free: list[int] = []
        self._free_redirects: list[int] = []
        self._by_request: dict[int, OpenFile] = {}
        self._marked: frozenset[int] = frozenset()
        self._mark_next = 0
        self._slots = self._opened = 0
        self.request = 0  # number of the request in hand; 0: none
        self.resumed: Agreed | None = None
        self.resized: Callable[[], None] = lambda: None
        if not self._load():
            self.begin()

    @property
    def physical_bytes(self) -> int:
        """Room it takes in the tmpfs."""
        return os.fstat(self._fd).st_blocks * 512

    # -- the whole

    def begin(self) -> None:
        """Forget everything: this is a new mount."""
        self.resumed = None
        os.ftruncate(self._fd, 0)
        self._slots, self._opened = SLOTS_FIRST, 0
        self._map_slots()
        HEADER.pack_into(self._map, 0, MAGIC, VERSION, 0, 0, 0, 0, self._slots, 0, 0)
        self._free = list(range(self._slots - 1, -1, -1))
        self._free_redirects = list(range(SENT_BACK))
        self._by_request.clear()
        self._marked = frozenset()

    def agreed(self, agreed: Agreed) -> None:
        """The mount is there and answers: from now on it can be taken over."""
        newest = U32.unpack_from(self._map, _BACKING_AT)[0]
        HEADER.pack_into(
            self._map, 0, MAGIC, VERSION, 0, agreed.minor, agreed.max_write,
            int(agreed.passthrough), self._slots, self._opened, newest,
        )  # fmt: skip
        U32.pack_into(self._map, _READY_AT, 1)

    def _load(self) -> bool:
        size = os.fstat(self._fd).st_size
        if size < SLOTS_AT + SLOTS_FIRST * SLOT_BYTES:
            return False
        head = os.pread(self._fd, HEADER.size, 0)
        magic, version, ready, minor, max_write, passes, slots, opened, _ = HEADER.unpack(head)
        if (magic, version, ready) != (MAGIC, VERSION, 1):
            return False
        if size < SLOTS_AT + slots * SLOT_BYTES:
            return False
        self._slots, self._opened = slots, opened
        self._map = mmap.mmap(self._fd, SLOTS_AT + slots * SLOT_BYTES)
        self.resumed = Agreed(minor, max_write, bool(passes))
        marks = Struct(f"<{MARKS}Q").unpack_from(self._map, MARKS_AT)
        self._marked = frozenset(marks) - {0}
        used = {file.number & (1 << SLOT_BITS) - 1 for file in self.files()}
        self._free = [index for index in range(slots - 1, -1, -1) if index not in used]
        self._by_request = {file.request: file for file in self.files()}
        self._free_redirects = []  # until they were taken over
        # One may have been counted and not stored.
        self._opened = max([opened, *(f.number >> SLOT_BITS for f in self.files())])
        return True

    def _map_slots(self) -> None:
        size = SLOTS_AT + self._slots * SLOT_BYTES
        os.posix_fallocate(self._fd, 0, size)  # a store must not find the tmpfs full
        self._map = mmap.mmap(self._fd, size)

    def _grow(self) -> None:
        before = self._slots
        size = SLOTS_AT + 2 * before * SLOT_BYTES
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise TooManyOpen("there is no room to note another open file") from error
        self._slots *= 2
        self._map.resize(size)
        U32.pack_into(self._map, 28, self._slots)
        self._free = list(range(self._slots - 1, before - 1, -1))
        self.resized()

    # -- open files

    def files(self) -> Iterator[OpenFile]:
        """Yield what is open."""
        for index in range(self._slots):
            number, generation, request, owner, newest, backing, flags = SLOT.unpack_from(
                self._map, SLOTS_AT + index * SLOT_BYTES
            )
            if number:
                yield OpenFile(number, generation, request, owner, newest, backing, OpenFlag(flags))

    def add(
        self,
        generation: int,
        owner: int,
        newest_pid: int,
        flags: int,
        request: int,
        backing: int = 0,
    ) -> int:
        """Note that a file was opened by a request; returns its handle. Raises TooManyOpen."""
        if not self._free:
            self._grow()
        index = self._free.pop()
        self._opened += 1
        U64.pack_into(self._map, _OPENED_AT, self._opened)
        number = self._opened << SLOT_BITS | index
        at = SLOTS_AT + index * SLOT_BYTES
        SLOT.pack_into(self._map, at, 0, generation, request, owner, newest_pid, backing, flags)
        U64.pack_into(self._map, at, number)
        return number

    def remove(self, number: int) -> None:
        """It was closed."""
        index = number & (1 << SLOT_BITS) - 1
        U64.pack_into(self._map, SLOTS_AT + index * SLOT_BYTES, 0)
        self._free.append(index)

    def set_flags(self, number: int, flags: int, backing: int | None = None) -> None:
        """Change what is known of an open file."""
        at = SLOTS_AT + (number & (1 << SLOT_BITS) - 1) * SLOT_BYTES
        if backing is not None:
            U32.pack_into(self._map, at + _SLOT_BACKING, backing)
        U32.pack_into(self._map, at + _SLOT_FLAGS, flags)

    @property
    def newest_backing(self) -> int:
        """The id that the kernel gave last."""
        return int(U32.unpack_from(self._map, _BACKING_AT)[0])

    @newest_backing.setter
    def newest_backing(self, number: int) -> None:
        U32.pack_into(self._map, _BACKING_AT, number)

    def noted_backings(self) -> list[int]:
        """Return the ids that are kept, whether an open file uses them or not."""
        numbers = Struct(f"<{NOTED_BACKINGS}I").unpack_from(self._map, _NOTED_AT)
        return [number for number in numbers if number]

    def set_noted_backing(self, place: int, number: int) -> None:
        """Note that an id is kept; 0: the place is free."""
        U32.pack_into(self._map, _NOTED_AT + place * U32.size, number)

    # -- opens that were sent to look their name up again

    def add_redirect(self, noted: NotedRedirect) -> int:
        """Note one; returns its place, or -1 where too many are under way."""
        if not self._free_redirects:
            return -1
        place = self._free_redirects.pop()
        at = SENT_BACK_AT + place * REDIRECT.size
        REDIRECT.pack_into(
            self._map, at, 0, noted.request, noted.at_ns, noted.block, noted.instead, noted.held
        )
        U64.pack_into(self._map, at, noted.thread)
        return place

    def set_redirect(self, place: int, instead: int, held: int) -> None:
        """What an open is to find has changed."""
        if place >= 0:
            at = SENT_BACK_AT + place * REDIRECT.size + 4 * U64.size
            Struct("<QQ").pack_into(self._map, at, instead, held)

    def remove_redirect(self, place: int) -> None:
        """That open came, or never will."""
        if place >= 0:
            U64.pack_into(self._map, SENT_BACK_AT + place * REDIRECT.size, 0)
            self._free_redirects.append(place)

    def redirects(self) -> list[NotedRedirect]:
        """Return what is noted."""
        places = range(SENT_BACK_AT, SENT_BACK_AT + SENT_BACK * REDIRECT.size, REDIRECT.size)
        found = [NotedRedirect(*REDIRECT.unpack_from(self._map, at)) for at in places]
        return [each for each in found if each.thread]

    def take_redirects(self) -> list[NotedRedirect]:
        """Return what an earlier child noted, and forget it."""
        found = self.redirects()
        for place in range(SENT_BACK):
            U64.pack_into(self._map, SENT_BACK_AT + place * REDIRECT.size, 0)
        self._free_redirects = list(range(SENT_BACK))
        return found

    # -- requests that may come twice

    def mark(self) -> None:
        """The effect of the request in hand is about to be written down."""
        if self.request:
            place = MARKS_AT + self._mark_next % MARKS * U64.size
            U64.pack_into(self._map, place, self.request)
            self._mark_next += 1

    def is_marked(self, request: int) -> bool:
        """Whether an earlier child wrote down the effect of this request."""
        return request in self._marked

    def opened_by(self, request: int) -> OpenFile | None:
        """Return what an earlier child opened for this request."""
        return self._by_request.get(request)

    def close(self) -> None:
        """Let go of it; the file stays."""
        self._map.close()
        os.close(self._fd)
