"""What one caller asked of a ring engine, and the parts in which the kernel gets it."""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import trio

from ctxfs.device.engine import Span
from ctxfs.device.mapping import PAGE
from ctxfs.errors import DeviceError

IOV_MAX = 1024  # vectors that one request takes (linux/uio.h)

Verb = Literal["read", "write", "flush"]


@dataclass(slots=True, eq=False)
class Transfer:
    """What one caller waits for: a number of parts."""

    unsent: deque["Part"] = field(default_factory=deque)
    inflight: int = 0  # parts whose memory the kernel may be using
    resting: int = 0  # parts that are sent again after a while
    error: DeviceError | None = None  # the first one
    ended: bool = False  # failed or given up: what is unsent is dropped, what is short stays so
    settled: trio.Event = field(default_factory=trio.Event)

    # Invariant: settled is set exactly when unsent is empty and neither part flies or rests.

    def end(self, error: DeviceError | None = None) -> None:
        """Send nothing more. The caller goes on once the kernel has let go of its memory."""
        self.ended = True
        self.error = self.error or error
        self.unsent.clear()
        self.resting = 0
        self.settle()

    def settle(self) -> None:
        if not self.unsent and not self.inflight and not self.resting:
            self.settled.set()


@dataclass(slots=True, eq=False)
class Part:
    """One request as the kernel sees it: `spans` end to end from `offset`; none for a flush."""

    transfer: Transfer
    verb: Verb
    offset: int = 0
    spans: Sequence[Span] = ()
    length: int = 0  # of all spans, bytes
    sent_bytes: int = 0  # of it, when it went into the ring last
    retries: int = 0
    # An array of struct iovec that the kernel may read until the request completes.
    vectors: ctypes.Array[ctypes.c_ulong] | None = None

    @property
    def what(self) -> str:
        """For messages."""
        if self.verb == "flush":
            return self.verb
        return f"{self.verb} of {self.length} bytes at {self.offset}"

    def memory(self) -> tuple[int, int]:
        """Address and length of the one span, or of the vectors that name them all."""
        if len(self.spans) == 1:
            return self.spans[0].address, self.length
        pairs = [number for span in self.spans for number in (span.address, span.length)]
        self.vectors = (ctypes.c_ulong * len(pairs))(*pairs)
        return ctypes.addressof(self.vectors), len(self.spans)

    def skip(self, moved: int) -> None:
        """The first `moved` bytes are done."""
        self.offset += moved
        self.length -= moved
        left = [span for span in self.spans if span.length]
        while moved:
            taken = min(moved, left[0].length)
            rest = Span(left[0].address + taken, left[0].length - taken)
            left[:1] = [rest] if rest.length else []
            moved -= taken
        self.spans = left


def cut(
    transfer: Transfer, verb: Verb, offset: int, spans: Sequence[Span], part_bytes: int
) -> None:
    """Fill `transfer` with parts that cover `spans`, laid end to end from `offset`.

    Parts are about equal, at most `part_bytes` long, and whole pages; neighbours share one.
    """
    total = sum(span.length for span in spans)
    if not total:
        return
    count = -(-total // part_bytes)
    even = -(-total // count // PAGE) * PAGE
    part = Part(transfer, verb, offset)
    gathered: list[Span] = []
    for span in spans:
        start = 0
        while start < span.length:
            length = min(even - part.length, span.length - start)
            gathered.append(Span(span.address + start, length))
            part.length += length
            start += length
            if part.length == even or len(gathered) == IOV_MAX:
                part.spans, gathered = gathered, []
                transfer.unsent.append(part)
                part = Part(transfer, verb, part.offset + part.length)
    if gathered:
        part.spans = gathered
        transfer.unsent.append(part)
