"""The work that is timed. Every function does the same system calls wherever it runs."""

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.places import Place
from bench.samples import Sample, from_durations

BATCH = 200  # operations between two looks at the clock, where one takes a microsecond


class Workload:
    """The bytes to write, a buffer to read into, and how long a measure may take."""

    def __init__(self, *, size: int, blocks: int, seconds: float) -> None:
        self.size = size
        self.blocks = blocks
        self.seconds = seconds
        self.payload = os.urandom(size)
        self.buffer = bytearray(size)
        self._number = 0

    def fresh_names(self, count: int) -> list[str]:
        """Names that were never used before, so that nothing about them is cached."""
        first, self._number = self._number, self._number + count
        return [f"fresh-{number}" for number in range(first, first + count)]


@dataclass(frozen=True, slots=True)
class Measure:
    """A name on the command line, and the function behind it."""

    name: str
    what: str
    run: Callable[[Place, Workload], Sample]


def resident(place: Place, work: Workload) -> list[Path]:
    """The blocks that the reading measures read; written before the first round."""
    return [place.path / f"resident-{number}" for number in range(work.blocks)]


def prepare(place: Place, work: Workload) -> None:
    """Write the resident blocks."""
    for path in resident(place, work):
        write(path, work.payload)


def write(path: Path, payload: bytes | bytearray | memoryview) -> None:
    """Create, one write, close."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(descriptor, payload)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, payload: bytes | bytearray | memoryview) -> None:
    """One write where it is taken whole, as it is everywhere up to 2 GiB."""
    rest = memoryview(payload)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_all(path: Path, buffer: bytearray | memoryview) -> None:
    """Open, read everything into `buffer`, close."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        rest = memoryview(buffer)
        while rest:
            count = os.readv(descriptor, [rest])
            if not count:
                raise OSError(f"{path} ends {len(rest)} bytes early")
            rest = rest[count:]
    finally:
        os.close(descriptor)


def put_rename(place: Place, work: Workload) -> Sample:
    """Create under a temporary name, write, close, rename."""

    def put(name: str) -> None:
        temporary = place.path / f".{name}.tmp"
        write(temporary, work.payload)
        temporary.rename(place.path / name)

    return _put(place, work, put)


def put_close(place: Place, work: Workload) -> Sample:
    """Create under the final name, write, close."""
    return _put(place, work, lambda name: write(place.path / name, work.payload))


def _put(place: Place, work: Workload, put: Callable[[str], None]) -> Sample:
    durations: list[int] = []
    # Not counted: while other places were measured, a hypervisor takes back memory that was freed
    # here, and gives it again at ten times the time of the write.
    _put_and_remove(place, work, put)
    deadline = time.perf_counter() + work.seconds
    while not durations or time.perf_counter() < deadline:
        durations += _put_and_remove(place, work, put)
    return from_durations(durations, size=work.size)


def _put_and_remove(place: Place, work: Workload, put: Callable[[str], None]) -> list[int]:
    names = work.fresh_names(work.blocks)
    durations = timed(lambda name=name: put(name) for name in names)  # type: ignore[misc]
    for name in names:
        (place.path / name).unlink()
    return durations


def get_read(place: Place, work: Workload) -> Sample:
    """Open, read into a buffer that is used again, close."""
    return _get(place, work, lambda path: read_all(path, work.buffer))


def get_mmap(place: Place, work: Workload) -> Sample:
    """Open, map, sum all bytes as 64-bit numbers, unmap, close."""

    def get(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapping:
                numbers = np.frombuffer(mapping, dtype=np.uint64)
                numbers.sum()
                del numbers  # it holds the mapping, which could not be closed
        finally:
            os.close(descriptor)

    return _get(place, work, get)


def open_close(place: Place, work: Workload) -> Sample:
    """Open for reading, close."""
    return _get(place, work, lambda path: os.close(os.open(path, os.O_RDONLY)), size=0)


def _get(
    place: Place, work: Workload, get: Callable[[Path], None], size: int | None = None
) -> Sample:
    paths = resident(place, work)
    durations: list[int] = []
    deadline = time.perf_counter() + work.seconds
    while not durations or time.perf_counter() < deadline:
        durations += timed(lambda path=path: get(path) for path in paths)  # type: ignore[misc]
    return from_durations(durations, size=work.size if size is None else size)


def stat(place: Place, work: Workload) -> Sample:
    """`stat` of blocks that exist."""
    paths = [str(path) for path in resident(place, work)]
    return _many(work, lambda: paths, os.stat)


def miss(place: Place, work: Workload) -> Sample:
    """Look up names that nobody has asked for before."""
    return _many(work, lambda: _absent(place, work.fresh_names(BATCH)), _exists)


def miss_again(place: Place, work: Workload) -> Sample:
    """Look up absent names that were asked for before."""
    paths = _absent(place, [f"absent-{number}" for number in range(BATCH)])
    for path in paths:
        _exists(path)
    return _many(work, lambda: paths, _exists)


def _absent(place: Place, names: list[str]) -> list[str]:
    return [str(place.path / name) for name in names]


def _exists(path: str) -> bool:
    # access(2) answers without the exception that stat(2) would raise: it costs as much as a miss.
    return os.access(path, os.F_OK)


def _many(work: Workload, paths: Callable[[], list[str]], call: Callable[[str], object]) -> Sample:
    """Time whole batches for the rate, and the calls of every second one for the percentiles.

    A clock around each call costs a tenth of the shortest of them, and more in making the call.
    """
    operations = 0
    spent_ns = 0
    durations: list[int] = []
    deadline = time.perf_counter() + work.seconds
    while not operations or time.perf_counter() < deadline:
        batch = paths()
        before = time.perf_counter_ns()
        for path in batch:
            call(path)
        spent_ns += time.perf_counter_ns() - before
        operations += len(batch)
        durations += timed(partial(call, path) for path in paths())
    return from_durations(durations, size=0, seconds=spent_ns / 1e9, operations=operations)


def timed(calls: Iterable[Callable[[], object]]) -> list[int]:
    """Nanoseconds of each call, one after the other."""
    durations = []
    clock = time.perf_counter_ns
    for call in calls:
        before = clock()
        call()
        durations.append(clock() - before)
    return durations


def together(calls: Sequence[Callable[[], None]], *, clients: int, size: int) -> Sample:
    """All calls, by `clients` threads at once. System calls let go of Python's lock."""
    shares = [calls[client::clients] for client in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        before = time.perf_counter()
        durations = [each for share in pool.map(timed, shares) for each in share]
        seconds = time.perf_counter() - before
    return from_durations(durations, size=size, seconds=seconds)


WARM = (
    Measure("put-rename", "create, write, rename", put_rename),
    Measure("put-close", "create in place, write, close", put_close),
    Measure("get-read", "open, read, close", get_read),
    Measure("get-mmap", "map and sum all bytes", get_mmap),
    Measure("open-close", "open, close", open_close),
    Measure("stat", "stat", stat),
    Measure("miss", "lookup of an absent name, new each time", miss),
    Measure("miss-again", "lookup of an absent name, asked before", miss_again),
)
