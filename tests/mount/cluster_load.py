"""Clients of a cluster in trouble, which know what each of their own keys may be.

Every content says who wrote it and as which of its writings. A key `own-…` is written by one client
on one member alone, so that it can say what must be there in the end; `all-…` by everybody.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.mount.cluster_times import SlowRead
from tests.mount.harness import noise

POOL_BYTES: Final = 4 << 20
HEADER = struct.Struct("<8s24sQII")  # magic, whose key, serial, length of the body, CRC of these
MAGIC: Final = b"ctxchaos"
EVERYBODY: Final = "all"
OWN_KEYS: Final = 8
SHARED_KEYS: Final = 8
SEAL_S: Final = 2.0  # after a close, at most
SLOW_S: Final = 0.05  # what takes longer is told at the end
PAUSE_S: Final = 0.01  # between two operations: it is the troubles that matter here
# Misses and what directories say; and of a host that is down.
COMMON_ERRORS: Final = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTCONN, errno.EPERM, errno.ECONNABORTED,
}  # fmt: skip
_pool = noise(7, POOL_BYTES)


def content(whose: str, serial: int, dice: random.Random) -> bytes:
    """One block's bytes."""
    length = dice.choice((dice.randrange(1, 5000), dice.randrange(300_000)))
    head = struct.pack("<8s24sQI", MAGIC, whose.encode(), serial, length)
    return head + struct.pack("<I", zlib.crc32(head)) + _body(serial, length)


def _body(serial: int, length: int) -> bytes:
    start = serial * 7919 % (POOL_BYTES - length)
    return _pool[start : start + length]


def check(found: bytes, whose: str, where: object) -> int:
    """The serial of a content. Raises AssertionError if nobody wrote this for that key."""
    assert len(found) >= HEADER.size, f"{where} has {len(found)} bytes"
    magic, owner, serial, length, crc = HEADER.unpack_from(found)
    assert magic == MAGIC, f"{where} begins with {magic!r}"
    assert crc == zlib.crc32(found[: HEADER.size - 4]), f"{where} has a broken header"
    assert owner.rstrip(b"\0").decode() == whose, f"{where} has what was written for {owner!r}"
    assert len(found) == HEADER.size + length, f"{where} has {len(found)} bytes, not {length}"
    assert found[HEADER.size :] == _body(serial, length), f"{where} has other bytes than it says"
    return int(serial)


@dataclass
class Report:
    """What one client did, and what its own keys may be at the end: serials, None for nothing."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    longest: tuple[float, str] = (0.0, "")  # but for fsync, which is as fast as the medium
    may_be: dict[str, set[int | None]] = field(default_factory=dict)
    history: dict[str, list[str]] = field(default_factory=dict)
    # Keys that were written last without fsync: when, and what else they may have been before.
    unsynced: dict[str, tuple[float, set[int | None]]] = field(default_factory=dict)
    slow_reads: list[SlowRead] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)  # errors that few operations meet, and when

    def died(self, host: str, when: float) -> None:
        """A member died with its parent: what it had not sealed yet is lost, and what was there
        before is back."""
        for key, (written, before) in self.unsynced.items():
            if key.split("-")[1][0] == host and abs(when - written) <= SEAL_S:
                self.may_be[key] = self.may_be[key] | before

    def add(self, other: Report) -> None:
        self.done += other.done
        self.refused += other.refused
        self.longest = max(self.longest, other.longest)
        self.may_be |= other.may_be
        self.history |= other.history
        self.unsynced |= other.unsynced
        self.slow_reads += other.slow_reads
        self.odd += other.odd


class Client:
    """One process's share. `others`: all clients' names, whose keys are read here too."""

    def __init__(
        self, mount: Path, name: str, others: list[str], seed: str, tell: Callable[[str], None]
    ) -> None:
        """`tell`: is told what is being done, before; "" after it."""
        self._mount = mount
        self._name = name
        self._others = others
        self._dice = random.Random(f"{seed} {name}")
        self._serial = zlib.crc32(name.encode()) << 20
        self._tell = tell
        self._report = Report()
        for number in range(OWN_KEYS):
            self._report.may_be[self._own_key(number)] = {None}

    def go_on(self, stop: Callable[[], bool]) -> Report:
        """Do this and that until `stop`; raises AssertionError for what nobody may ever see."""
        operations = (
            self.put_own, self.put_own_synced, self.put_own_by_rename,
            self.unlink_own, self.rename_own,
            self.read, self.read, self.read, self.read_mapped, self.read_mapped,
            self.put_shared, self.unlink_shared, self.rename_shared, self.list, self.directory,
        )  # fmt: skip
        while not stop():
            self._do(self._dice.choice(operations))
            time.sleep(PAUSE_S)
        return self._report

    def _do(self, operation: Callable[[], None]) -> None:
        name = operation.__name__
        began = time.monotonic()
        self._tell(name)
        try:
            operation()
            self._report.done[name] += 1
        except OSError as error:  # a host in trouble may say so; it may not lie
            self._report.refused[f"{name}: {error.strerror}"] += 1
            if error.errno not in COMMON_ERRORS:
                self._report.odd.append(f"{time.time():.3f} {self._name} {name}: {error}")
        self._tell("")
        took = time.monotonic() - began
        now = time.time()
        if operation != self.put_own_synced:
            told = f"{name} of {self._name} until {now:.3f}"
            self._report.longest = max(self._report.longest, (took, told))
        if took > SLOW_S and name in ("read", "read_mapped"):
            self._report.slow_reads.append(SlowRead(self._name[0], now - took, now))

    def _own_key(self, number: int) -> str:
        return f"own-{self._name}-{number}"

    def _own(self) -> str:
        return self._own_key(self._dice.randrange(OWN_KEYS))

    def _shared(self) -> Path:
        return self._mount / f"all-{self._dice.randrange(SHARED_KEYS)}"

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    # -- keys of our own: where something fails, it may have happened or not

    def _becomes(self, key: str, after: set[int | None], what: Callable[[], object]) -> None:
        may_be, began = self._report.may_be, time.time()
        before = may_be[key]
        may_be[key] = before | after
        outcome = "failed"
        try:
            what()
            may_be[key] = after
            self._report.unsynced[key] = (time.time(), before)
            outcome = "done"
        except OSError as error:
            outcome = str(error.strerror)
            raise
        finally:
            line = f"{began:.3f} +{time.time() - began:.3f} {key} becomes {after}: {outcome}"
            self._report.history.setdefault(self._name, []).append(line)

    def put_own(self) -> None:
        key, serial = self._own(), self._next()
        data = content(self._name, serial, self._dice)
        self._becomes(key, {serial}, lambda: (self._mount / key).write_bytes(data))

    def put_own_synced(self) -> None:
        key, serial = self._own(), self._next()
        data = content(self._name, serial, self._dice)

        def put() -> None:
            with open(self._mount / key, "wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())

        self._becomes(key, {serial}, put)
        del self._report.unsynced[key]

    def put_own_by_rename(self) -> None:
        key, serial = self._own(), self._next()
        data = content(self._name, serial, self._dice)
        temporary = self._mount / f".{self._name}-{serial}.tmp"
        try:
            temporary.write_bytes(data)
            self._becomes(key, {serial}, lambda: temporary.rename(self._mount / key))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def unlink_own(self) -> None:
        key = self._own()
        self._becomes(key, {None}, lambda: (self._mount / key).unlink())

    def rename_own(self) -> None:
        old, new = self._own(), self._own()
        if old == new:
            return
        moved = self._report.may_be[old] - {None}

        def rename() -> None:
            (self._mount / old).rename(self._mount / new)

        self._becomes(old, {None}, lambda: self._becomes(new, moved, rename))

    # -- keys of everybody

    def put_shared(self) -> None:
        self._shared().write_bytes(content(EVERYBODY, self._next(), self._dice))

    def unlink_shared(self) -> None:
        self._shared().unlink()

    def rename_shared(self) -> None:
        self._shared().rename(self._shared())

    def directory(self) -> None:
        """Directories come and go, and hold a block at times."""
        path = self._mount / f"dir-{self._dice.randrange(3)}"
        what = self._dice.randrange(4)
        if what == 0:
            path.mkdir()
        elif what == 1:
            path.rmdir()
        elif what == 2:
            (path / "all-in").write_bytes(content(EVERYBODY, self._next(), self._dice))
        else:
            (path / "all-in").unlink()

    # -- readers

    def _any(self) -> tuple[Path, str]:
        if self._dice.random() < 0.3:
            return self._shared(), EVERYBODY
        whose = self._dice.choice(self._others)
        return self._mount / f"own-{whose}-{self._dice.randrange(OWN_KEYS)}", whose

    def read(self) -> None:
        path, whose = self._any()
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found = os.read(file.fileno(), size + 1)
            assert len(found) == size, f"{len(found)} of {size} bytes were read of {path}"
            check(found, whose, path)

    def read_mapped(self) -> None:
        path, whose = self._any()
        with (
            open(path, "rb", buffering=0) as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
        ):
            check(_copy(view), whose, path)

    def list(self) -> None:
        for name in os.listdir(self._mount):
            assert name.startswith(("own-", "all-", "dir-", ".")), f"{name!r} is listed"


def _copy(view: mmap.mmap) -> bytes:
    """The bytes of a mapping; OSError, and no SIGBUS, where they cannot be had any more."""
    fd = os.memfd_create("copy")
    try:
        if os.write(fd, view) < len(view):
            raise OSError(errno.EIO, "a page of the mapping cannot be had")
        return os.pread(fd, len(view), 0)
    finally:
        os.close(fd)
