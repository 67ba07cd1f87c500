"""Who else has a file open, as the kernel says it."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.device import leases
from ctxfs.errors import TierTrouble

pytestmark = pytest.mark.skipif(not leases.are_enabled(), reason="leases are switched off")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of one page."""
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    return file


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    """Our only descriptor of it."""
    number = os.open(path, os.O_RDWR)
    yield number
    os.close(number)


def test_a_file_that_is_ours_alone_is_free(fd: int) -> None:
    assert not leases.is_written_elsewhere(fd)
    assert not leases.is_open_elsewhere(fd)


def test_a_writer_shows_until_it_has_closed(fd: int, path: Path) -> None:
    other = os.open(path, os.O_WRONLY)
    assert leases.is_written_elsewhere(fd)
    assert leases.is_open_elsewhere(fd)
    os.close(other)
    assert not leases.is_written_elsewhere(fd)


def test_a_reader_is_no_writer(fd: int, path: Path) -> None:
    other = os.open(path, os.O_RDONLY)
    assert not leases.is_written_elsewhere(fd)
    assert leases.is_open_elsewhere(fd)
    os.close(other)
    assert not leases.is_open_elsewhere(fd)


@pytest.mark.parametrize("writes", [True, False])
def test_a_mapping_counts_as_the_descriptor_it_was_made_of(
    fd: int, path: Path, *, writes: bool
) -> None:
    with open(path, "r+b" if writes else "rb") as file:
        access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
        view = mmap.mmap(file.fileno(), 0, access=access)
    assert leases.is_written_elsewhere(fd) is writes
    assert leases.is_open_elsewhere(fd)
    view.close()
    assert not leases.is_open_elsewhere(fd)


def test_the_descriptor_writes_and_is_not_inherited_afterwards(fd: int, path: Path) -> None:
    leases.is_written_elsewhere(fd)
    os.pwrite(fd, b"x", 0)
    assert path.read_bytes()[:1] == b"x"
    assert not os.get_inheritable(fd)


def test_an_unlinked_file_can_be_asked_about(fd: int, path: Path) -> None:
    path.unlink()
    assert not leases.is_written_elsewhere(fd)


def test_a_descriptor_that_is_none_is_trouble_not_an_answer() -> None:
    with pytest.raises(TierTrouble):
        leases.is_written_elsewhere(987_654)


def test_a_switch_that_is_off_or_missing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SWITCH", tmp_path / "leases-enable")
    assert not leases.are_enabled()
    (tmp_path / "leases-enable").write_text("0\n")
    assert not leases.are_enabled()
    (tmp_path / "leases-enable").write_text("1\n")
    assert leases.are_enabled()
