"""Which registrations of hot files are kept, and which are given back."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from mountd import backings
from mountd.backings import Backings
from mountd.device_fuse import FuseDevice
from mountd.openfiles import OpenFiles
from mountd.session import OpenFile, OpenFlag, Session


class Kernel:
    """Registers files: the id is 100 and more."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self._next = 100

    def open_backing(self, fd: int) -> int:
        self._next += 1
        self.registered.add(self._next)
        return self._next

    def close_backing(self, number: int) -> None:
        self.registered.discard(number)


class Opens:
    """Lends every file."""

    def __init__(self) -> None:
        self.noted: dict[int, int] = {}

    def lend(self, handle: int) -> int:
        return handle

    def lent(self, handle: int, backing: int) -> None:
        self.noted[handle] = backing


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def lender(kernel: Kernel) -> Backings:
    return made(kernel, None)


def made(kernel: Kernel, session: Session | None) -> Backings:
    result = Backings(cast(FuseDevice, kernel), session)
    result.enabled = True
    return result


def lend(lender: Backings, node: int, handle: int) -> int:
    return lender.lend(cast(OpenFiles, Opens()), node, handle)


def test_opens_one_after_the_other_share_a_registration(kernel: Kernel, lender: Backings) -> None:
    first = lend(lender, 7, 1)
    lender.give_back(7, 1)
    assert lend(lender, 7, 2) == first
    lender.give_back(7, 2)
    assert kernel.registered == {first}


def test_a_hot_file_that_goes_is_given_back_at_once_if_nobody_has_it_open(
    kernel: Kernel, lender: Backings
) -> None:
    lend(lender, 7, 1)
    lender.give_back(7, 1)
    lender.let_go(7)
    assert not kernel.registered


def test_a_hot_file_that_goes_is_given_back_with_its_last_open(
    kernel: Kernel, lender: Backings
) -> None:
    number = lend(lender, 7, 1)
    lend(lender, 7, 2)
    lender.let_go(7)
    lender.give_back(7, 1)
    assert kernel.registered == {number}
    lender.give_back(7, 2)
    assert not kernel.registered


def test_the_longest_unused_registration_makes_room_for_another(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backings, "NOTED_BACKINGS", 2)
    lender = made(kernel, None)
    numbers = [lend(lender, node, node) for node in (1, 2, 3)]
    for node in (2, 1, 3):
        lender.give_back(node, node)
    assert kernel.registered == {numbers[0], numbers[2]}


def test_a_daemon_that_takes_over_gives_back_what_no_open_file_uses(
    kernel: Kernel, tmp_path: Path
) -> None:
    session = Session(tmp_path / "session")
    before = made(kernel, session)
    used, unused = lend(before, 1, 1), lend(before, 2, 2)
    before.give_back(2, 2)
    assert session.noted_backings() == [unused]
    after = made(kernel, session)
    after.resume([OpenFile(1, 1, 0, 0, 0, used, OpenFlag.LENT)], lambda inode: False)
    assert kernel.registered == {used}
    assert session.noted_backings() == []
    assert lend(after, 1, 3) == used
    session.close()


def test_a_block_that_went_before_the_daemon_did_takes_its_registration_along(
    kernel: Kernel, tmp_path: Path
) -> None:
    session = Session(tmp_path / "session")
    before = made(kernel, session)
    used = lend(before, 1, 1)
    before.let_go(1)
    after = made(kernel, session)
    after.resume([OpenFile(1, 1, 0, 0, 0, used, OpenFlag.LENT)], lambda inode: inode == 1)
    after.give_back(1, 1)
    assert not kernel.registered
    session.close()
