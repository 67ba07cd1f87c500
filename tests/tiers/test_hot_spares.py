"""Files kept with their pages for blocks that come."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.device import leases
from ctxfs.tiers.hot_spares import SUFFIX, Spares

pytestmark = pytest.mark.skipif(not leases.are_enabled(), reason="leases are switched off")

SIZE = 128 << 10


@pytest.fixture
def dirfd(tmp_path: Path) -> Iterator[int]:
    """Where they lie."""
    number = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield number
    os.close(number)


@pytest.fixture
def spares(dirfd: int) -> Spares:
    """Up to four files."""
    return Spares(dirfd, 4 * SIZE)


def left(path: Path, name: str, size: int = SIZE) -> Path:
    """A file whose block has left."""
    file = path / name
    file.write_bytes(name.encode() * (size // len(name)))
    return file


def test_a_file_is_given_to_a_block_of_its_size_alone(spares: Spares, tmp_path: Path) -> None:
    left(tmp_path, "aa")
    assert spares.keep("aa", SIZE, SIZE)
    assert spares.physical_bytes == SIZE
    assert spares.take(SIZE - 4096) is None
    found = spares.take(SIZE)
    assert found is not None
    fd, spare = found
    assert (spare.name, spare.size) == ("aa" + SUFFIX, SIZE)
    assert os.pread(fd, 4, 0) == b"aaaa"
    os.close(fd)
    assert spares.take(SIZE) is None
    assert spares.physical_bytes == 0


def test_a_file_that_somebody_has_mapped_is_never_given(spares: Spares, tmp_path: Path) -> None:
    with open(left(tmp_path, "aa"), "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    left(tmp_path, "bb")
    assert spares.keep("aa", SIZE, SIZE)
    assert spares.keep("bb", SIZE, SIZE)
    found = spares.take(SIZE)
    assert found is not None
    assert found[1].name == "bb" + SUFFIX
    os.pwrite(found[0], bytes(SIZE), 0)
    os.close(found[0])
    assert view[:] == b"aa" * (SIZE // 2)
    view.close()
    assert spares.take(SIZE) is None
    assert not (tmp_path / ("aa" + SUFFIX)).exists()


def test_no_more_is_kept_than_was_allowed(spares: Spares, tmp_path: Path) -> None:
    for number in range(6):
        left(tmp_path, f"{number:02}")
    kept = [spares.keep(f"{number:02}", SIZE, SIZE) for number in range(6)]
    assert kept == [True] * 4 + [False] * 2
    assert (tmp_path / "05").exists()


def test_small_files_and_those_with_holes_are_not_kept(spares: Spares, tmp_path: Path) -> None:
    left(tmp_path, "small", 4096)
    left(tmp_path, "holes")
    assert not spares.keep("small", 4096, 4096)
    assert not spares.keep("holes", SIZE, SIZE - 4096)
    assert not spares.keep("missing", SIZE, SIZE)


def test_their_memory_comes_back_when_it_is_asked_for_or_nobody_uses_it(
    spares: Spares, tmp_path: Path
) -> None:
    left(tmp_path, "aa")
    spares.keep("aa", SIZE, SIZE)
    spares.drop_if_idle()  # it has just come
    assert len(spares) == 1
    spares.drop_if_idle()
    assert not list(tmp_path.iterdir())
    left(tmp_path, "bb")
    spares.keep("bb", SIZE, SIZE)
    spares.drop()
    assert spares.physical_bytes == len(list(tmp_path.iterdir())) == 0


def test_a_file_that_was_removed_or_changed_behind_our_back_is_not_given(
    spares: Spares, tmp_path: Path
) -> None:
    for name in ("aa", "bb"):
        left(tmp_path, name)
        assert spares.keep(name, SIZE, SIZE)
    (tmp_path / ("aa" + SUFFIX)).unlink()
    (tmp_path / ("bb" + SUFFIX)).write_bytes(b"short")
    assert spares.take(SIZE) is None
    assert spares.physical_bytes == 0


def test_where_leases_are_off_nothing_is_kept(
    dirfd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SWITCH", tmp_path / "missing")
    left(tmp_path, "aa")
    assert not Spares(dirfd, SIZE).keep("aa", SIZE, SIZE)
