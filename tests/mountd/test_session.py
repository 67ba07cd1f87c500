"""The file that says what is open, and what a successor reads in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mountd.session import SLOTS_FIRST, Agreed, OpenFlag, Session

AGREED = Agreed(minor=41, max_write=1 << 20, passthrough=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "session"


def begun(path: Path) -> Session:
    session = Session(path)
    session.agreed(AGREED)
    return session


def test_a_successor_finds_what_was_agreed_and_open(path: Path) -> None:
    session = begun(path)
    number = session.add(1024, 17, 99, OpenFlag.WRITABLE, request=5)
    session.set_flags(number, OpenFlag.WRITABLE | OpenFlag.LENT, backing=3)
    session.newest_backing = 3
    closed = session.add(1025, 17, 99, 0, request=7)
    session.remove(closed)
    session.close()
    successor = Session(path)
    assert successor.resumed == AGREED
    (file,) = successor.files()
    assert (file.number, file.generation, file.owner, file.newest_pid) == (number, 1024, 17, 99)
    assert (file.backing, file.flags) == (3, OpenFlag.WRITABLE | OpenFlag.LENT)
    assert successor.newest_backing == 3
    assert successor.opened_by(5) == file
    assert successor.opened_by(7) is None
    successor.close()


def test_a_mount_that_was_never_agreed_on_is_not_taken_over(path: Path) -> None:
    session = Session(path)
    session.add(1024, 17, 99, 0, request=5)
    session.close()
    successor = Session(path)
    assert successor.resumed is None
    assert list(successor.files()) == []
    successor.close()


@pytest.mark.parametrize("content", [b"", b"CTXFSSES", bytes(1 << 16), b"x" * (1 << 16)])
def test_garbage_is_begun_anew(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    session = Session(path)
    assert session.resumed is None
    session.add(1, 2, 3, 0, request=4)
    session.close()


def test_a_file_cut_short_is_begun_anew(path: Path) -> None:
    begun(path).close()
    path.write_bytes(path.read_bytes()[:-1])
    session = Session(path)
    assert session.resumed is None
    session.close()


def test_no_handle_comes_twice_in_a_mounts_life(path: Path) -> None:
    session = begun(path)
    first = session.add(1024, 1, 1, 0, request=1)
    session.remove(first)
    second = session.add(1024, 1, 1, 0, request=2)
    session.remove(second)
    session.close()
    successor = Session(path)
    third = successor.add(1024, 1, 1, 0, request=3)
    assert len({first, second, third}) == 3
    successor.close()


def test_a_request_is_marked_only_while_it_is_in_hand(path: Path) -> None:
    session = begun(path)
    session.mark()
    session.request = 6
    session.mark()
    session.request = 0
    session.mark()
    session.close()
    successor = Session(path)
    assert successor.is_marked(6)
    assert not successor.is_marked(0)
    assert not successor.is_marked(8)
    successor.close()


def test_it_grows_and_tells(path: Path) -> None:
    session = begun(path)
    told: list[int] = []
    session.resized = lambda: told.append(session.physical_bytes)
    before = session.physical_bytes
    numbers = [session.add(n, 1, 1, 0, request=n) for n in range(2 * SLOTS_FIRST + 1)]
    assert len(set(numbers)) == len(numbers)
    assert told[-1] > before
    session.close()
    successor = Session(path)
    assert {file.number for file in successor.files()} == set(numbers)
    successor.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=200))
def test_any_sequence_of_opens_and_closes_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    path = tmp_path_factory.mktemp("session") / "session"
    session = begun(path)
    is_open: dict[int, int] = {}
    for count, step in enumerate(steps):
        if step < len(is_open):
            number = sorted(is_open)[step]
            session.remove(number)
            del is_open[number]
        else:
            number = session.add(count, 1, 1, 0, request=count)
            assert number not in is_open
            is_open[number] = count
        if step == 40:
            session.close()
            session = Session(path)
    assert {file.number: file.generation for file in session.files()} == is_open
    session.close()
