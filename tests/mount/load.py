"""A mixed load by several processes on a few shared names, which notices any wrong byte.

Every content says where in a pool of random bytes, which all processes have, it was taken from.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.mount.calls import Pages
from tests.mount.harness import MIB, Daemon, noise, wait_until

POOL_BYTES = 8 * MIB
HEADER = struct.Struct("<8sIII")  # magic, place in the pool, length of the body, CRC of these two
MAGIC = b"ctxload\0"
BODY_MAX = 2 * MIB
STEADY = "steady"  # how names begin that clients leave alone
HELD_MAX = 3  # files that a process keeps open or mapped for a while
SLOTS, SLOT, SLOT_HANDLE = 12288, 64, struct.Struct("<Q")  # of the session file
HANG_S = 60.0  # from being told to stop, until a process is taken for hung
# No such key; and no room where everything is in use.
ALLOWED = {errno.ENOENT, errno.ENOSPC}


@cache
def _pool() -> bytes:
    return noise(0, POOL_BYTES)


def content(dice: random.Random) -> bytes:
    """One block's bytes."""
    length = dice.choice((dice.randrange(1, 5000), dice.randrange(BODY_MAX)))
    start = dice.randrange(POOL_BYTES - length)
    said = struct.pack("<II", start, length)
    head = HEADER.pack(MAGIC, start, length, zlib.crc32(said))
    return head + _pool()[start : start + length]


def check(found: bytes, where: object) -> None:
    """Raise AssertionError if this was not written in one piece by one of us."""
    assert len(found) >= HEADER.size, f"{where} has {len(found)} bytes"
    magic, start, length, crc = HEADER.unpack_from(found)
    assert magic == MAGIC, f"{where} begins with {magic!r}"
    assert crc == zlib.crc32(struct.pack("<II", start, length)), f"{where} has a broken header"
    assert len(found) == HEADER.size + length, f"{where}: {len(found)} bytes, not {length} and head"
    same = memoryview(found)[HEADER.size :] == memoryview(_pool())[start : start + length]
    assert same, f"{where} has other bytes than it says"


@dataclass
class Tally:
    """What one process did. `pauses`: its longest operation of each kind, in seconds."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    pauses: dict[str, float] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        self.done += other.done
        self.refused += other.refused
        for name, pause in other.pauses.items():
            self.pauses[name] = max(pause, self.pauses.get(name, 0.0))

    def __str__(self) -> str:
        name = max(self.pauses, key=self.pauses.__getitem__)
        return (
            f"{sum(self.done.values())} operations: {dict(self.done)}; refused: "
            f"{dict(self.refused)}; the longest took {self.pauses[name]:.3f} s: {name}"
        )


class Client:
    """One process's share of the load."""

    def __init__(self, mount: Path, number: int, *, keys: int, cold: bool) -> None:
        self._mount = mount
        self._number = number
        self._keys = [f"key{each}" for each in range(keys)]
        self._cold = cold
        self._dice = random.Random(number)
        self._written = 0
        self._held: list[tuple[int, Pages | None, str]] = []
        self.tally = Tally()

    def go_on(self, stop: Callable[[], bool]) -> Tally:
        """Do this and that until `stop`; raises AssertionError for what nobody may ever see."""
        operations: Sequence[Callable[[], None]] = (
            self.put_by_close, self.put_by_rename, self.put_by_rename, self.put_slowly,
            self.replace_while_open, self.read, self.read, self.read, self.read_mapped,
            self.read_mapped, self.hold, self.let_go, self.unlink, self.rename, self.attribute,
            self.place, self.list, self.stat,
        )  # fmt: skip
        while not stop():
            self._do(self._dice.choice(operations))
        while self._held:
            self._do(self.let_go)
        return self.tally

    def _do(self, operation: Callable[[], None]) -> None:
        name = operation.__name__
        before = time.monotonic()
        try:
            operation()
            self.tally.done[name] += 1
        except OSError as error:
            if error.errno not in ALLOWED:
                raise AssertionError(f"{name}: {error}") from error
            self.tally.refused[f"{name} {errno.errorcode[error.errno or 0]}"] += 1
        pause = time.monotonic() - before
        self.tally.pauses[name] = max(pause, self.tally.pauses.get(name, 0.0))

    def _any(self) -> Path:
        return self._mount / self._dice.choice(self._keys)

    def _temporary(self) -> Path:
        self._written += 1
        return self._mount / f".{self._number}-{self._written}.tmp"

    # -- writers

    def put_by_close(self) -> None:
        with open(self._any(), "wb", buffering=0) as file:
            _write(file.fileno(), content(self._dice))

    def put_by_rename(self) -> None:
        temporary = self._temporary()
        try:
            with open(temporary, "wb", buffering=0) as file:
                _write(file.fileno(), content(self._dice))
            temporary.rename(self._any())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def put_slowly(self) -> None:
        """In pieces, with looks around in between, and renamed while it is still open."""
        temporary, whole = self._temporary(), content(self._dice)
        piece = len(whole) // 8 + 1
        try:
            with open(temporary, "wb", buffering=0) as file:
                for start in range(0, len(whole), piece):
                    _write(file.fileno(), whole[start : start + piece])
                    assert os.fstat(file.fileno()).st_size == min(start + piece, len(whole))
                    self._any().exists()
                temporary.rename(self._any())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def replace_while_open(self) -> None:
        """Who has the old content open goes on seeing it."""
        path = self._any()
        with open(path, "rb", buffering=0) as old:
            before = _read(old.fileno())
            check(before, path)
            with open(path, "wb", buffering=0) as new:
                _write(new.fileno(), content(self._dice))
            os.lseek(old.fileno(), 0, os.SEEK_SET)
            assert _read(old.fileno()) == before, f"{path} changed beneath who had it open"

    # -- readers

    def read(self) -> None:
        path = self._any()
        with open(path, "rb", buffering=0) as file:
            check(_read(file.fileno()), path)

    def read_mapped(self) -> None:
        path = self._any()
        with (
            open(path, "rb", buffering=0) as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
        ):
            check(view[:], path)

    def hold(self) -> None:
        if len(self._held) == HELD_MAX:
            self.let_go()
        path = self._any()
        pages = Pages(path) if self._dice.random() < 0.5 else None
        fd = -1 if pages is not None else os.open(path, os.O_RDONLY)
        self._held.append((fd, pages, path.name))

    def let_go(self) -> None:
        """What was open or mapped all the while is as right as at first, whatever went on."""
        if not self._held:
            return
        fd, pages, name = self._held.pop(self._dice.randrange(len(self._held)))
        if pages is not None:
            check(pages.content(), f"the mapping of {name}")
            pages.close()
        else:
            check(_read(fd), f"the open {name}, inode {os.fstat(fd).st_ino},")
            os.close(fd)

    # -- names and attributes

    def unlink(self) -> None:
        self._any().unlink()

    def rename(self) -> None:
        self._any().rename(self._any())

    def attribute(self) -> None:
        path, value = self._any(), str(self._dice.random()).encode()
        os.setxattr(path, "user.load", value)
        with contextlib.suppress(OSError):  # others set and replace it, too
            os.getxattr(path, "user.load")

    def place(self) -> None:
        tiers = (b"auto", b"cold", b"hot") if self._cold else (b"auto",)
        os.setxattr(self._any(), "user.ctx.tier", self._dice.choice(tiers))

    def list(self) -> None:
        for name in os.listdir(self._mount):
            assert name.startswith(("key", ".", STEADY)), f"{name!r} is listed"

    def stat(self) -> None:
        assert self._any().stat().st_size >= HEADER.size


def _write(fd: int, data: bytes) -> None:
    assert os.write(fd, data) == len(data)


def _read(fd: int) -> bytes:
    """In one piece, as clients do, with room for one byte more than there should be."""
    size = os.fstat(fd).st_size
    found = os.read(fd, size + 1)
    assert len(found) == size, f"{len(found)} of {size} bytes were read"
    return found


Work = Callable[[Callable[[], bool]], Any]


class Crowd:
    """Processes that work until they are told to stop. Use as a context manager."""

    def __init__(self, daemon: Daemon, works: Sequence[Work]) -> None:
        """Each of `works` gets a function that says whether to stop; what it returns is kept.

        If one of them hangs, the daemon is killed.
        """
        self._daemon = daemon
        context = multiprocessing.get_context("fork")
        self._stop = context.Event()
        self._members = []
        for work in works:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=self._work, args=(work, theirs))
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _work(self, work: Work, answer: Connection) -> None:
        try:
            answer.send((None, work(self._stop.is_set)))
        except BaseException as error:
            answer.send((f"{type(error).__name__}: {error}", None))

    def wait(self, seconds: float) -> bool:
        """Let them work for so long; False at once where somebody has ended already."""
        return not multiprocessing.connection.wait([pipe for _, pipe in self._members], seconds)

    def stop(self) -> list[Any]:
        """Tell them, and return what they return; fails with what any of them failed of."""
        self._stop.set()
        answers, complaints = [], []
        members, self._members = self._members, []
        deadline = time.monotonic() + HANG_S
        for process, pipe in members:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                complaints.append(f"process {process.pid} hung")
                self._end_mount()
            try:
                complaint, answer = pipe.recv()
            except EOFError:
                complaint, answer = "died", None
            process.join()
            pipe.close()
            complaints += [f"process {process.pid}: {complaint}"] * bool(complaint)
            answers.append(answer)
        assert not complaints, "\n".join(complaints)
        return answers

    def _end_mount(self) -> None:
        """What waits for an answer that does not come cannot even be killed before."""
        if self._daemon.process is not None:
            self._daemon.kill()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(AssertionError):  # another one is on its way
            self.stop()


def total(tallies: Sequence[Tally]) -> Tally:
    """All of them as one; it is printed, too."""
    result = Tally()
    for tally in tallies:
        result.add(tally)
    sys.stdout.write(f"{result}\n")
    return result


def check_every_key(daemon: Daemon) -> None:
    """What is there is right, and no temporary name was left."""
    paths = list(daemon.mount.iterdir())
    for path in paths:
        assert not path.name.startswith("."), f"{path.name} was left"
        os.setxattr(path, "user.ctx.tier", b"auto")  # what has to stay in DRAM may fill it
    for path in paths:
        check(_found(path), path)


def _found(path: Path) -> bytes:
    """Read a block that is there. While others move, there may be no room to bring it up."""

    contents: list[bytes] = []

    def is_found() -> bool:
        with contextlib.suppress(FileNotFoundError):
            contents.append(path.read_bytes())
        return bool(contents)

    wait_until(is_found)
    return contents[0]


def check_nothing_leaked(daemon: Daemon) -> None:
    """At rest: no block is open, and no memory of the hot tier is anything but a block's."""
    wait_until(lambda: daemon.stats()["blocks"]["writing"] == 0)
    wait_until(lambda: not _open_blocks(daemon))
    wait_until(lambda: not _files_of_nobody(daemon))
    wait_until(lambda: not _slots_taken(daemon))
    # What a mapping, a descriptor or a backing id holds has no name, but takes memory.
    wait_until(lambda: _held_bytes(daemon) == _named_bytes(daemon))


def _open_blocks(daemon: Daemon) -> list[str]:
    stories = (os.getxattr(path, "user.ctx.story") for path in daemon.mount.iterdir())
    return [story["key"] for story in map(json.loads, stories) if story["open"]]


def _files_of_nobody(daemon: Daemon) -> set[str]:
    """Files among the blocks of which no name of the mount tells."""
    known = {f"{path.stat().st_ino:016x}" for path in daemon.mount.iterdir()}
    files = {path.name for path in (daemon.state / "hot" / "blocks").iterdir()}
    return files - known


def _slots_taken(daemon: Daemon) -> int:
    """Open files in the session file (docs/direct.md), where the channel keeps one."""
    try:
        content = (daemon.state / "hot" / "session").read_bytes()
    except FileNotFoundError:
        return 0
    handles = (SLOT_HANDLE.unpack_from(content, at)[0] for at in range(SLOTS, len(content), SLOT))
    return sum(handle != 0 for handle in handles)


def _held_bytes(daemon: Daemon) -> int:
    usage = os.statvfs(daemon.state / "hot")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _named_bytes(daemon: Daemon) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (daemon.state / "hot").rglob("*"))
