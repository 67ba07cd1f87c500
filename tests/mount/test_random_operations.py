"""Random operations on blocks that are being written, each compared with a model in memory.

CTXFS_STRESS_SECONDS makes it run longer, CTXFS_STRESS_SEED repeats one history alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mount.calls import Mapping
from tests.mount.harness import Daemon, wait_until

SECONDS = float(os.environ.get("CTXFS_STRESS_SECONDS", "3"))
SEED = os.environ.get("CTXFS_STRESS_SEED")
STEPS = 60  # of a history: short enough to be read where it fails
NAMES = ("a", "b", "c")
FILE_MAX = 400_000
OPEN_MAX = 5  # descriptors, and as many mappings


@pytest.fixture(scope="module")
def shared(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Small and over a cold file, so that blocks can leave and come back meanwhile."""
    base = tmp_path_factory.mktemp("shared")
    with Daemon(base, hot="96MiB", cold="256MiB", channel=channel) as one:
        yield one


@dataclass(eq=False)
class Opened:
    """A descriptor. `wrote`: closing it has to publish what it leads to."""

    fd: int
    inode: int
    reads: bool
    writes: bool
    appends: bool
    wrote: bool = False


@dataclass(eq=False)
class Mapped:
    """A mapping, and the descriptor it was made from, which may be closed by now."""

    pages: Mapping
    inode: int
    by: Opened


@dataclass
class Model:
    """What has to be true. An inode is a generation: its content is the same to all who have it."""

    contents: dict[int, bytearray] = field(default_factory=dict)  # by inode
    private: dict[str, int] = field(default_factory=dict)  # written under a name, not published
    public: dict[str, int] = field(default_factory=dict)

    def may_find(self, name: str) -> list[int]:
        """What this name may lead to for us: what is seen by others is not the first of these."""
        return [each[name] for each in (self.private, self.public) if name in each]

    def name_of_private(self, inode: int) -> str | None:
        return next((name for name, each in self.private.items() if each == inode), None)

    def publish(self, name: str, inode: int) -> None:
        private = self.name_of_private(inode)
        if private is not None:
            del self.private[private]
        self.public[name] = inode


class OtherProcess:
    """Looks at the blocks from outside, since a writer sees what nobody else sees yet."""

    def __init__(self, asked: Connection) -> None:
        self._asked = asked

    def _ask(self, path: Path, what: str) -> tuple[int, bytes] | None:
        self._asked.send((path, what))
        answer: tuple[int, bytes] | None = self._asked.recv()
        return answer

    def inode(self, path: Path) -> int | None:
        """What the name leads to, without opening it."""
        answer = self._ask(path, "stat")
        return None if answer is None else answer[0]

    def content(self, path: Path) -> tuple[int, bytes] | None:
        """What the name leads to, and all its bytes."""
        return self._ask(path, "read")


def _look(asked: Connection) -> None:
    while (question := asked.recv()) is not None:
        path, what = question
        try:
            if what == "stat":
                asked.send((path.stat().st_ino, b""))
                continue
            with open(path, "rb") as file:
                asked.send((os.fstat(file.fileno()).st_ino, file.read()))
        except FileNotFoundError:
            asked.send(None)


@contextmanager
def other_process() -> Iterator[OtherProcess]:
    """One for many questions, forked before there is anything open that it could inherit."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_look, args=(theirs,))
    process.start()
    try:
        yield OtherProcess(ours)
    finally:
        ours.send(None)
        process.join()


class History:
    """Random operations below one directory. Each is noted first, for whoever has to look at it."""

    def __init__(self, seed: int, place: Path, others: OtherProcess) -> None:
        self._dice = random.Random(seed)
        self._place = place
        self._others = others
        self._model = Model()
        self._opened: list[Opened] = []
        self._mapped: list[Mapped] = []
        self.notes: list[str] = []

    def run(self) -> None:
        steps: list[Callable[[], int | None]] = [
            self._open, self._open, self._write, self._write, self._append, self._truncate,
            self._allocate, self._map, self._write_mapped, self._write_mapped, self._unmap,
            self._copy_range, self._sync, self._close, self._close, self._rename, self._unlink,
            self._move,
        ]  # fmt: skip
        for _ in range(STEPS):
            inode = self._dice.choice(steps)()
            if inode is not None:
                self._check(inode)
        while self._opened or self._mapped:
            if self._opened and (not self._mapped or self._dice.random() < 0.5):
                self._close()
            else:
                self._unmap()
        self._check_names()

    def _note(self, what: str, *about: object) -> None:
        self.notes.append(f"{what} {' '.join(map(str, about))}")

    # -- random choices

    def _length(self) -> int:
        dice = self._dice
        near_page = dice.randrange(1, 40) * 4096 + dice.choice((-1, 0, 1))
        return dice.choice((dice.randrange(1, 100), near_page, dice.randrange(1, 120_000)))

    def _writer(self) -> Opened | None:
        writers = [each for each in self._opened if each.writes]
        return self._dice.choice(writers) if writers else None

    def _content(self, inode: int) -> bytearray:
        return self._model.contents[inode]

    # -- operations; each returns the inode whose content is to be compared

    def _open(self) -> int | None:
        if len(self._opened) == OPEN_MAX:
            return None
        name = self._dice.choice(NAMES)
        mode = self._dice.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR))
        writes = mode != os.O_RDONLY
        truncates = writes and self._dice.random() < 0.3
        appends = writes and self._dice.random() < 0.2
        known = self._model.may_find(name)
        if not writes and not known:
            return None
        flags = mode | os.O_CREAT * writes | os.O_TRUNC * truncates | os.O_APPEND * appends
        self._note("open", name, f"flags={flags:#o}")
        fd = os.open(self._place / name, flags, 0o644)
        inode = os.fstat(fd).st_ino
        one = Opened(fd, inode, mode != os.O_WRONLY, writes, appends, truncates or not known)
        self._note("  is", f"fd{fd} of {inode}")
        self._opened.append(one)
        if inode in known:
            if truncates:
                del self._content(inode)[:]
            return inode
        assert writes, f"reading found {inode}, not one of {known}"
        assert inode not in self._model.contents, "a generation came back"
        old = self._content(known[0]) if known and not truncates else b""
        self._model.contents[inode] = bytearray(old)
        self._model.private[name] = inode
        return inode

    def _write(self) -> int | None:
        one = self._writer()
        if one is None or one.appends:
            return None
        content = self._content(one.inode)
        start = self._dice.randrange(min(FILE_MAX, len(content) + 20_000) + 1)
        data = self._dice.randbytes(self._length())
        self._note("pwrite", f"fd{one.fd}", start, len(data))
        assert os.pwrite(one.fd, data, start) == len(data)
        return self._wrote(one, start, data)

    def _append(self) -> int | None:
        one = self._writer()
        if one is None or len(self._content(one.inode)) > FILE_MAX:
            return None
        data = self._dice.randbytes(self._length())
        end = len(self._content(one.inode))
        self._note("append", f"fd{one.fd}", len(data))
        if not one.appends:
            os.lseek(one.fd, 0, os.SEEK_END)
        assert os.write(one.fd, data) == len(data)
        return self._wrote(one, end, data)

    def _wrote(self, one: Opened, start: int, data: bytes) -> int:
        content = self._content(one.inode)
        content.extend(bytes(max(0, start - len(content))))
        content[start : start + len(data)] = data
        one.wrote = True
        return one.inode

    def _truncate(self) -> int | None:
        one = self._writer()
        if one is None:
            return None
        content = self._content(one.inode)
        size = self._dice.randrange(min(FILE_MAX, 2 * len(content) + 5000) + 1)
        self._note("ftruncate", f"fd{one.fd}", size)
        os.ftruncate(one.fd, size)
        one.wrote = one.wrote or size != len(content)
        del content[size:]
        content.extend(bytes(size - len(content)))
        return one.inode

    def _allocate(self) -> int | None:
        one = self._writer()
        if one is None or one.appends or not one.reads:  # the C library's emulation needs it so
            return None
        content = self._content(one.inode)
        start, length = self._dice.randrange(len(content) + 1), self._length()
        self._note("posix_fallocate", f"fd{one.fd}", start, length)
        os.posix_fallocate(one.fd, start, length)
        more = max(0, start + length - len(content))
        content.extend(bytes(more))
        one.wrote = one.wrote or more > 0
        return one.inode

    def _copy_range(self) -> int | None:
        target = self._writer()
        sources = [each for each in self._opened if each.reads and self._content(each.inode)]
        if target is None or target.appends or not sources:
            return None
        source = self._dice.choice(sources)
        if source.inode == target.inode:
            return None
        content = bytes(self._content(source.inode))
        start = self._dice.randrange(len(content))
        length = min(self._length(), len(content) - start)
        to = self._dice.randrange(len(self._content(target.inode)) + 1)
        self._note("copy_file_range", f"fd{source.fd} {start} fd{target.fd} {to} {length}")
        done = os.copy_file_range(source.fd, target.fd, length, start, to)
        assert 0 < done <= length
        return self._wrote(target, to, content[start : start + done])

    def _map(self) -> int | None:
        able = [e for e in self._opened if e.writes and e.reads and self._content(e.inode)]
        if not able or len(self._mapped) == OPEN_MAX:
            return None
        one = self._dice.choice(able)
        length = len(self._content(one.inode))
        self._note("mmap", f"fd{one.fd}", length)
        self._mapped.append(Mapped(Mapping(one.fd, length), one.inode, one))
        return one.inode

    def _write_mapped(self) -> int | None:
        if not self._mapped:
            return None
        one = self._dice.choice(self._mapped)
        content = self._content(one.inode)
        end = min(one.pages.length, len(content))
        is_open = any(each.writes and each.inode == one.inode for each in self._opened)
        # Unless it is published: it may be dropped when the last one of these is closed.
        if not end or not (is_open or one.inode in self._model.public.values()):
            return None
        start = self._dice.randrange(end)
        data = self._dice.randbytes(self._length())[: end - start]
        syncs = self._dice.random() < 0.5
        self._note("store", f"fd{one.by.fd} {start} {len(data)}", "msync" if syncs else "")
        one.pages.write(start, data)
        if syncs:
            one.pages.sync()
        return self._wrote(one.by, start, data)

    def _unmap(self) -> int | None:
        if not self._mapped:
            return None
        one = self._mapped.pop(self._dice.randrange(len(self._mapped)))
        self._note("munmap", f"of fd{one.by.fd}, {one.inode}")
        one.pages.close()
        self._wait_dropped(one.inode)
        return one.inode

    def _sync(self) -> int | None:
        one = self._writer()
        if one is None or self._dice.random() < 0.7:  # it writes to the cold tier: slow
            return None
        self._note("fsync", f"fd{one.fd}")
        os.fsync(one.fd)
        return one.inode

    def _close(self) -> int | None:
        if not self._opened:
            return None
        one = self._opened.pop(self._dice.randrange(len(self._opened)))
        self._note("close", f"fd{one.fd} of {one.inode}")
        os.close(one.fd)
        name = self._model.name_of_private(one.inode)
        if one.writes and name is not None:
            seen = self._others.inode(self._place / name)
            assert seen == one.inode or not one.wrote, f"{seen} is seen after close"
            if seen == one.inode:
                self._model.publish(name, one.inode)
        self._wait_dropped(one.inode)
        if self._dice.random() < 0.4:
            self._check_names()
        return one.inode

    def _wait_dropped(self, inode: int) -> None:
        """What was opened and not written leaves its name when nobody has it any more.

        The kernel tells the daemon so after `close` has returned.
        """
        name = self._model.name_of_private(inode)
        if name is None or inode in self._used():
            return
        del self._model.private[name]
        old = self._model.public.get(name)
        wait_until(lambda: _inode_or_none(self._place / name) == old)
        assert self._others.inode(self._place / name) == old

    def _rename(self) -> int | None:
        old, new = self._dice.sample(NAMES, 2)
        known = self._model.may_find(old)
        if not known:
            return None
        self._note("rename", old, new)
        os.rename(self._place / old, self._place / new)
        if old in self._model.private:
            del self._model.private[old]
        else:
            del self._model.public[old]
        self._model.public[new] = known[0]
        return known[0]

    def _used(self) -> set[int]:
        return {each.inode for each in self._opened} | {each.inode for each in self._mapped}

    def _unlink(self) -> int | None:
        name = self._dice.choice(NAMES)
        known = self._model.may_find(name)
        if not known or self._dice.random() < 0.5:
            return None
        self._note("unlink", name)
        os.unlink(self._place / name)
        self._model.private.pop(name, None)
        self._model.public.pop(name, None)
        return known[0]

    def _move(self) -> int | None:
        """Have a block that nobody uses moved to the cold tier, whence it comes back for good."""
        used = self._used()
        for name, inode in self._model.public.items():
            if inode not in used and name not in self._model.private:
                tier = self._dice.choice((b"cold", b"hot", b"auto"))
                self._note("setxattr", name, tier)
                os.setxattr(self._place / name, "user.ctx.tier", tier)
                return None
        return None

    # -- comparing

    def _check(self, inode: int) -> None:
        """Through every descriptor and mapping: they agree on the content, and on its size."""
        expected = bytes(self._content(inode))
        for each in self._opened:
            if each.inode == inode:
                size = os.fstat(each.fd).st_size
                assert size == len(expected)
                if each.reads:
                    found = os.pread(each.fd, len(expected) + 1, 0)
                    assert_same(found, expected, f"fd{each.fd}")
        for mapped in self._mapped:
            if mapped.inode == inode:
                end = min(mapped.pages.length, len(expected))
                found = mapped.pages.read(0, end)
                assert_same(found, expected[:end], f"the mapping of fd{mapped.by.fd}")

    def _check_names(self) -> None:
        """Through another process, which sees what is published."""
        for name in NAMES:
            found = self._others.content(self._place / name)
            inode = self._model.public.get(name)
            if found is None or inode is None:
                assert (found is None) == (inode is None), f"{name}: {found and found[0]}, {inode}"
                continue
            assert found[0] == inode
            assert_same(found[1], bytes(self._content(inode)), name)


def _inode_or_none(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def assert_same(found: bytes, expected: bytes, where: str) -> None:
    """With the place of the first difference, not with all the bytes."""
    if found != expected:
        pairs = enumerate(zip(found, expected, strict=False))
        first = next((at for at, (one, other) in pairs if one != other), "the end")
        raise AssertionError(
            f"{where} differs from {first} on; it has {len(found)} bytes, not {len(expected)}"
        )


@pytest.mark.timeout(300 + SECONDS)
def test_blocks_being_written_are_what_a_model_of_them_says(shared: Daemon, place: Path) -> None:
    seeds: Iterator[int] = itertools.count() if SEED is None else iter([int(SEED)])
    end = time.monotonic() + SECONDS
    count = 0
    with other_process() as others:
        for seed in seeds:
            folder = place / str(seed)
            folder.mkdir()
            history = History(seed, folder, others)
            try:
                history.run()
            except (AssertionError, OSError) as error:
                told = "\n".join(history.notes)
                raise AssertionError(f"CTXFS_STRESS_SEED={seed}:\n{told}\n{error}") from error
            for path in folder.iterdir():
                path.unlink()
            count += 1
            if time.monotonic() > end:
                break
    sys.stdout.write(f"{count} histories of {STEPS} steps\n")
    assert "Traceback" not in shared.log()
