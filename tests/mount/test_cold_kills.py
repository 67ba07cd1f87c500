"""The whole daemon is killed again and again under writers: what fsync promised is there.

CTXFS_COLD_KILLS says how often, CTXFS_COLD_KILLS_SEED where the dice begin.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
import threading
from pathlib import Path

import pytest

from tests.mount.harness import Daemon
from tests.mount.load import HEADER, check, content

KILLS = int(os.environ.get("CTXFS_COLD_KILLS", "6"))
SEED = int(os.environ.get("CTXFS_COLD_KILLS_SEED", "1"))
WRITERS = 2
KEYS = 8  # of each writer: all of it fits, so that nothing is evicted
LIFE_S = 0.6  # at most, from a start to the kill
DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.EINTR}

pytestmark = [pytest.mark.channel("direct"), pytest.mark.timeout(120 + 10 * KILLS)]

Version = bytes | None  # how a content begins, which says all of it; None: no such key


def sync(path: Path) -> None:
    """Open and fsync it, be it a block or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Writer:
    """Works on keys of its own. `allowed`: of each, what may be found after a kill."""

    def __init__(self, mount: Path, number: int, dice: random.Random) -> None:
        self._mount = mount
        self._names = [f"writer{number}-{each}" for each in range(KEYS)]
        self._dice = dice
        self.allowed: dict[str, list[Version]] = {}
        self.promises = 0

    def work(self) -> None:
        """Until the daemon is dead."""
        moves = (self.put, self.put, self.put_synced, self.put_synced, self.rename, self.unlink)
        try:
            while True:
                self._dice.choice(moves)(self._dice.choice(self._names))
        except OSError as error:
            if error.errno not in DEAD:
                raise

    def may_be(self, name: str, version: Version) -> None:
        self.allowed.setdefault(name, [None]).append(version)

    def must_be(self, name: str, version: Version) -> None:
        self.allowed[name] = [version]
        self.promises += 1

    def put(self, name: str) -> None:
        """Once it is published, what it replaced is gone, and it may be lost itself."""
        data = content(self._dice)
        head = data[: HEADER.size]
        self.may_be(name, head)
        self.may_be(name, None)
        (self._mount / name).write_bytes(data)
        if self._dice.random() < 0.3:
            sync(self._mount / name)
            self.must_be(name, head)

    def put_synced(self, name: str) -> bytes:
        """There is always this one or the one before."""
        data = content(self._dice)
        head = data[: HEADER.size]
        self.may_be(name, head)
        with open(self._mount / name, "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
            self.must_be(name, head)
        return head

    def rename(self, name: str) -> None:
        """The way to replace a file: there is always this one or the one before."""
        early = f"{name}.early"
        head = self.put_synced(early)
        self.may_be(name, head)
        self.may_be(early, None)
        os.rename(self._mount / early, self._mount / name)
        if self._dice.random() < 0.5:
            sync(self._mount)
            self.must_be(name, head)
            self.must_be(early, None)

    def unlink(self, name: str) -> None:
        self.may_be(name, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._mount / name)
        if self._dice.random() < 0.5:
            sync(self._mount)
            self.must_be(name, None)

    def check(self, found: dict[str, bytes], *, only_cold: bool) -> None:
        """Raise AssertionError where this must not be what is found."""
        for name, allowed in self.allowed.items():
            version = found.get(name)
            assert version in allowed, f"{name} is {version!r}, allowed {allowed}"
            if only_cold:  # recovery has found it there, and keeps it
                self.allowed[name] = [version]


def everything(mount: Path) -> dict[str, bytes]:
    """How each block begins; raises AssertionError where the rest of it does not follow."""
    found = {}
    for path in mount.iterdir():
        data = path.read_bytes()
        check(data, path)
        found[path.name] = data[: HEADER.size]
    return found


def live_and_die(daemon: Daemon, writers: list[Writer], seconds: float) -> None:
    """Let the writers work for a while, then kill the daemon with its parent."""
    errors: list[BaseException] = []

    def work(writer: Writer) -> None:
        try:
            writer.work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    threads[0].join(seconds)  # it does not end before the daemon does
    daemon.kill()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("machine", [False, True], ids=["hot-tmpfs-stays", "hot-tmpfs-goes"])
def test_fsynced_blocks_are_there_after_every_kill_and_no_other_is_wrong(
    tmp_path: Path, channel: str, machine: bool
) -> None:
    dice = random.Random(f"{SEED}/{machine}")
    base = tmp_path / "killed"
    base.mkdir()
    with Daemon(base, hot="24MiB", cold="96MiB", channel=channel) as daemon:
        writers = [
            Writer(daemon.mount, number, random.Random(dice.random())) for number in range(WRITERS)
        ]
        for kill in range(KILLS):
            live_and_die(daemon, writers, dice.random() * LIFE_S)
            if machine:
                daemon.clean()
            daemon.start()
            found = everything(daemon.mount)
            for writer in writers:
                try:
                    writer.check(found, only_cold=machine)
                except AssertionError as error:
                    error.add_note(f"kill {kill} of CTXFS_COLD_KILLS_SEED={SEED}")
                    raise
            counters = daemon.stats()["counters"]
            assert counters["corrupt"] == counters["evicted"] == 0
        promises = sum(writer.promises for writer in writers)
        sys.stdout.write(f"{KILLS} kills, seed {SEED}, {promises} promises\n")
        assert promises > KILLS
        assert daemon.log().count("Traceback") == 0
