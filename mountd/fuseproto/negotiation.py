"""INIT: what the kernel offers, and what is taken of it."""

from dataclasses import dataclass

from mountd.fuseproto.constants import MAJOR, MINOR_MAX, MINOR_MIN, PAGE_BYTES, InitFlag
from mountd.fuseproto.replies import InitAnswer
from mountd.fuseproto.requests import Init

MAX_PAGES = 0xFFFF  # what the field holds
MAX_BACKGROUND = 128  # asynchronous requests at a time; the kernel may lower it
CONGESTION_THRESHOLD = 96

# Not among them: WRITEBACK_CACHE (the daemon must see bytes when they are written), AUTO_INVAL_DATA
# (an inode's bytes change through the kernel alone, so a new mtime says nothing about its pages),
# NO_OPEN_SUPPORT (an open is a lease), EXPORT_SUPPORT (inodes are forgotten).
WANTED = (
    InitFlag.ASYNC_READ
    | InitFlag.ATOMIC_O_TRUNC
    | InitFlag.BIG_WRITES
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.ASYNC_DIO
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.ABORT_ERROR
    | InitFlag.MAX_PAGES
    | InitFlag.HANDLE_KILLPRIV_V2
)


class TooOld(Exception):
    """The kernel speaks a protocol from before 7.31."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome: the answer to send, and what it means."""

    answer: InitAnswer
    minor: int  # the protocol that is spoken, 7.minor
    passthrough: bool

    @property
    def max_write(self) -> int:
        """Most bytes in one WRITE or READ."""
        return self.answer.max_write


def agree(offer: Init, *, max_pages: int, passthrough: bool) -> Agreement | None:
    """Answer an offer. None: the kernel is newer by a major version and is to ask again.

    `max_pages` is what the machine permits for one request; `passthrough` whether it is wanted.
    Raises TooOld.
    """
    if offer.major > MAJOR:
        return None
    if (offer.major, offer.minor) < (MAJOR, MINOR_MIN):
        raise TooOld(f"the kernel speaks FUSE {offer.major}.{offer.minor}")
    offered = offer.flags
    if offered & InitFlag.INIT_EXT:
        offered |= offer.flags2 << 32
    flags = WANTED & offered
    passes = passthrough and bool(offered & InitFlag.PASSTHROUGH)
    if passes:
        flags |= InitFlag.PASSTHROUGH | InitFlag.INIT_EXT
    pages = max(1, min(max_pages, MAX_PAGES)) if flags & InitFlag.MAX_PAGES else 32
    minor = min(offer.minor, MINOR_MAX)
    answer = InitAnswer(
        major=MAJOR,
        minor=minor,
        max_readahead=offer.max_readahead,
        flags=int(flags),
        max_background=MAX_BACKGROUND,
        congestion_threshold=CONGESTION_THRESHOLD,
        max_write=pages * PAGE_BYTES,
        time_gran=1,
        max_pages=pages,
        max_stack_depth=1 if passes else 0,
    )
    return Agreement(answer, minor, passes)


def major_only() -> InitAnswer:
    """Return the answer to a kernel of a newer major version: ours, nothing else counts."""
    return InitAnswer(MAJOR, MINOR_MAX, 0, 0, 0, 0, 0, 0, 0, 0)
