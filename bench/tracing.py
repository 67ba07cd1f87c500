"""Inside a traced daemon: when it reads each request of the kernel, and when it answers.

`python -m bench profile` has the daemon's interpreter import this before anything else. It looks
at the bytes that pass through `os.readv` and `os.writev` on /dev/fuse, so that it needs to know
nothing of the daemon; it adds about a microsecond to each request.
"""

import atexit
import cProfile
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DEVICE = "/dev/fuse"
REQUEST = struct.Struct("<IIQ")  # struct fuse_in_header: length, opcode, number, …
ANSWER = struct.Struct("<IiQ")  # struct fuse_out_header: length, error, number
OPEN = 14
NOTHING = 0  # instead of an opcode: a read that found no request

# Opcode, and nanoseconds of the monotonic clock: read begun and ended, answer begun and ended.
Record = tuple[int, int, int, int, int]


class Tracer:
    """Stands in for `os.readv` and `os.writev`, and remembers what went by."""

    def __init__(self, file: Path, functions: cProfile.Profile | None) -> None:
        self._file = file
        self._functions = functions
        self._readv, self._writev = os.readv, os.writev
        self._is_device: dict[int, bool] = {}
        self._open: dict[int, tuple[int, int, int]] = {}  # by the request's number
        self.records: list[Record] = []

    def install(self) -> None:
        """Take the place of the two calls until the interpreter ends, and then write it down."""
        # The signatures of these two are more than what anybody calls them with.
        os.readv = self.readv  # type: ignore[assignment]
        os.writev = self.writev  # type: ignore[assignment]
        atexit.register(self.save)

    def readv(self, fd: int, buffers: Sequence[bytearray | memoryview]) -> int:
        """Read, and note which request it is."""
        if not self._on_device(fd):
            return self._readv(fd, buffers)
        begun = time.monotonic_ns()
        try:
            length = self._readv(fd, buffers)
        except BlockingIOError:
            ended = time.monotonic_ns()
            self.records.append((NOTHING, begun, ended, ended, ended))
            raise
        ended = time.monotonic_ns()
        if length >= REQUEST.size:
            _, opcode, number = REQUEST.unpack_from(buffers[0])
            self._open[number] = (opcode, begun, ended)
            if opcode == OPEN and self._functions is not None:
                self._functions.enable()
                self._functions = None
        return length

    def writev(self, fd: int, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Write, and note which request is answered by it."""
        if not self._on_device(fd):
            return self._writev(fd, buffers)
        number = ANSWER.unpack_from(buffers[0])[2]
        begun = time.monotonic_ns()
        try:
            return self._writev(fd, buffers)
        finally:
            ended = time.monotonic_ns()
            if (request := self._open.pop(number, None)) is not None:
                self.records.append((*request, begun, ended))

    def save(self) -> None:
        """Write the records to the file, unless this process answered nobody."""
        if self.records:
            self._file.write_text(json.dumps(self.records))

    def _on_device(self, fd: int) -> bool:
        known = self._is_device.get(fd)
        if known is None:
            known = os.readlink(f"/proc/self/fd/{fd}") == DEVICE
            # What is no device may be closed, and its number become the device's.
            if known:
                self._is_device[fd] = known
        return known


def install(folder: str, *, functions: bool) -> None:
    """Trace this interpreter; `functions` has cProfile look on from the first OPEN."""
    stem = Path(folder) / str(os.getpid())
    profiler = cProfile.Profile() if functions else None
    Tracer(stem.with_suffix(".json"), profiler).install()
    if profiler is not None:
        atexit.register(_save_functions, profiler, stem.with_suffix(".functions"))


def _save_functions(profiler: cProfile.Profile, file: Path) -> None:
    profiler.disable()
    stats: Callable[[Path], None] = profiler.dump_stats
    if profiler.getstats():
        stats(file)
