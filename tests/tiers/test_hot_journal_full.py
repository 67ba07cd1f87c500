"""The hot journal in a tmpfs that others have filled to its last page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.core.meta import Drop
from ctxfs.device import mounts
from ctxfs.tiers.hot_journal import HotJournal

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    mounts.mount_tmpfs(tmp_path, "ctxfs-test", "size=2m")
    yield tmp_path
    mounts.unmount(tmp_path, lazily=True)


def fill(directory: Path) -> Path:
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return path


def test_what_happens_in_a_full_tmpfs_is_written_down(small: Path) -> None:
    journal = HotJournal(small)
    entries = [Drop(number, number) for number in range(2000)]
    journal.append(entries[0])
    filler = fill(small)
    for entry in entries[1:]:
        journal.append(entry)
    assert journal.load() == entries
    journal.keep_ballast()
    given_back = journal.ballast_bytes
    filler.unlink()
    journal.keep_ballast()
    assert given_back == 0 < journal.ballast_bytes
    journal.close()


def test_a_journal_without_room_to_be_rewritten_stays_what_it_was(small: Path) -> None:
    journal = HotJournal(small)
    entries = [Drop(number, number) for number in range(2000)]

    def rewrite() -> None:
        with journal.rewriting() as add:
            add(entries[:1])
            fill(small)
            for entry in entries:
                journal.append(entry)

    with pytest.raises(OSError, match="rewritten"):
        rewrite()
    assert journal.load() == entries
    assert not (small / "journal.new").exists()
    journal.close()


def test_an_entry_that_has_no_room_at_all_leaves_the_journal_whole(small: Path) -> None:
    journal = HotJournal(small)
    journal.append(Drop(1, 1))
    fill(small)
    journal.ballast_bytes = 0
    (small / "ballast").unlink()
    fill(small)

    def go_on() -> None:
        for number in range(2, 100_000):
            journal.append(Drop(number, number))

    with pytest.raises(OSError, match="cannot grow"):
        go_on()
    entries = journal.load()
    assert entries == [Drop(number, number) for number in range(1, len(entries) + 1)]
    journal.close()
