"""Measures that reach the medium: blocks leaving for the cold tier, and coming back."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from bench.measures import Workload, read_all, together, write, write_all
from bench.places import Place
from bench.samples import Sample


@dataclass(frozen=True, slots=True)
class ColdMeasure:
    """As Measure, with the number of clients; `direction` says what `fio` does beside it."""

    name: str
    what: str
    run: Callable[[Place, Workload, int], Sample]
    direction: Literal["read", "write"]
    synced: bool = False


class Content:
    """What is written: never the same twice, since that would be stored once."""

    _numbers = itertools.count()

    def __init__(self, work: Workload) -> None:
        self._bytes = bytearray(work.payload)

    def new(self) -> bytearray:
        """The content of the next block; good until the one after that."""
        self._bytes[:8] = next(self._numbers).to_bytes(8, "little")
        return self._bytes


@contextmanager
def new_blocks(place: Place, work: Workload) -> Iterator[list[Path]]:
    """Names for one measure; what was written under them is removed afterwards."""
    paths = [place.path / name for name in work.fresh_names(work.blocks)]
    try:
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def write_out(place: Place, work: Workload, clients: int) -> Sample:
    """Blocks that were just written go to the medium.

    In ctxfs by writing `cold` to `user.ctx.tier`; on a plain file system by `fsync`.
    """
    move = set_cold if place.tiers else sync
    with new_blocks(place, work) as paths:
        content = Content(work)
        for path in paths:
            write(path, content.new())
        return together([partial(move, path) for path in paths], clients=clients, size=work.size)


def write_out_fsync(place: Place, work: Workload, clients: int) -> Sample:
    """Create, write, `fsync`, close."""
    with new_blocks(place, work) as paths:
        contents = [Content(work) for _ in range(clients)]
        # `together` deals the calls out in turn, so a client always gets the same one.
        calls = [
            partial(write_synced, path, contents[number % clients])
            for number, path in enumerate(paths)
        ]
        return together(calls, clients=clients, size=work.size)


def cold_get(place: Place, work: Workload, clients: int) -> Sample:
    """Open and read blocks of which no memory holds a copy."""
    buffers = [bytearray(work.size) for _ in range(clients)]
    with new_blocks(place, work) as paths:
        content = Content(work)
        for path in paths:
            write_synced(path, content)
            forget(path)
            if place.tiers:
                set_cold(path)
        # `together` deals the calls out in turn, so a client always gets the same buffer.
        calls = [
            partial(read_all, path, buffers[number % clients]) for number, path in enumerate(paths)
        ]
        return together(calls, clients=clients, size=work.size)


def set_cold(path: Path) -> None:
    os.setxattr(path, "user.ctx.tier", b"cold")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: Content) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(descriptor, content.new())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Have the kernel drop its cached pages of `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


COLD = (
    ColdMeasure("write-out", "move to cold (elsewhere: fsync)", write_out, "write"),
    ColdMeasure(
        "write-out-fsync", "create, write, fsync, close", write_out_fsync, "write", synced=True
    ),
    ColdMeasure("cold-get", "open, read, close; not in memory", cold_get, "read"),
)
