"""What is taken back from the kernel, and what is left alone."""

from __future__ import annotations

import pytest

from mountd import beliefs
from mountd.beliefs import LATE_NS, SECOND_NS, Beliefs
from mountd.fuseproto import notices

LIFETIME_S = 5.0
NAMES = notices.names_changed()


class Kernel:
    """Takes notices, and has a clock to set."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.now_ns = 0
        self.beliefs = Beliefs(self.told.append, lambda: self.now_ns)
        self.beliefs.begin(LIFETIME_S, names=True)

    def taken(self) -> list[bytes]:
        """Notices since the last call."""
        told = self.told[:]
        self.told.clear()
        return told


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_a_name_that_was_told_is_taken_back_once_when_it_changes(kernel: Kernel) -> None:
    kernel.beliefs.tell_name((1, b"k"), LIFETIME_S)
    kernel.beliefs.name_changed(1, b"k")
    kernel.beliefs.name_changed(1, b"k")
    assert kernel.taken() == [NAMES]


def test_a_name_that_was_not_told_is_not_taken_back(kernel: Kernel) -> None:
    kernel.beliefs.tell_name((1, b"k"), LIFETIME_S)
    kernel.beliefs.name_changed(1, b"other")
    kernel.beliefs.name_changed(2, b"k")
    assert not kernel.taken()


def test_a_name_is_taken_back_until_its_lifetime_is_over_for_those_who_heard_of_it_late(
    kernel: Kernel,
) -> None:
    kernel.beliefs.tell_name((1, b"a"), LIFETIME_S)
    kernel.beliefs.tell_name((1, b"b"), LIFETIME_S)
    kernel.now_ns = int(LIFETIME_S * SECOND_NS) + LATE_NS
    kernel.beliefs.name_changed(1, b"a")
    assert not kernel.taken()
    kernel.now_ns -= 1
    kernel.beliefs.name_changed(1, b"b")
    assert kernel.taken() == [NAMES]


def test_taking_names_back_makes_them_all_unheard_of(kernel: Kernel) -> None:
    for name in (b"a", b"b"):
        kernel.beliefs.tell_name((1, name), LIFETIME_S)
    kernel.beliefs.name_changed(1, b"a")
    kernel.beliefs.name_changed(1, b"b")
    assert kernel.taken() == [NAMES]


def test_what_the_kernel_changes_itself_is_not_taken_back(kernel: Kernel) -> None:
    kernel.beliefs.tell_name((1, b"k"), LIFETIME_S)
    with kernel.beliefs.changed_by_kernel((1, b"k")):
        kernel.beliefs.name_changed(1, b"k")
    kernel.beliefs.name_changed(1, b"k")
    assert not kernel.taken()


def test_a_name_that_the_kernel_could_not_change_is_believed_as_before(kernel: Kernel) -> None:
    kernel.beliefs.tell_name((1, b"k"), LIFETIME_S)
    with pytest.raises(KeyError), kernel.beliefs.changed_by_kernel((1, b"k")):
        raise KeyError
    kernel.beliefs.name_changed(1, b"k")
    assert kernel.taken() == [NAMES]


def test_what_was_believed_of_a_name_moves_with_a_rename(kernel: Kernel) -> None:
    kernel.beliefs.tell_name((1, b"old"), LIFETIME_S)
    with kernel.beliefs.renamed_by_kernel((1, b"old"), (2, b"new")):
        kernel.beliefs.name_changed(1, b"old")
        kernel.beliefs.name_changed(2, b"new")
    assert not kernel.taken()
    kernel.beliefs.name_changed(1, b"old")
    assert not kernel.taken()
    kernel.beliefs.name_changed(2, b"new")
    assert kernel.taken() == [NAMES]


def test_both_names_of_an_exchange_are_still_believed(kernel: Kernel) -> None:
    for name in (b"a", b"b"):
        for place in ((1, b"a"), (1, b"b")):
            kernel.beliefs.tell_name(place, LIFETIME_S)
        with kernel.beliefs.renamed_by_kernel((1, b"a"), (1, b"b")):
            pass
        kernel.beliefs.name_changed(1, name)
        assert kernel.taken() == [NAMES]


def test_more_names_than_are_remembered_are_taken_back(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beliefs, "NAMES_MAX", 3)
    for number in range(4):
        kernel.beliefs.tell_name((1, b"%d" % number), LIFETIME_S)
    assert kernel.taken() == [NAMES]
    kernel.beliefs.name_changed(1, b"3")
    assert kernel.taken() == [NAMES]


def test_attributes_are_taken_back_if_they_were_told_within_their_lifetime(
    kernel: Kernel,
) -> None:
    assert kernel.beliefs.tell_attributes(7)
    kernel.now_ns = int(LIFETIME_S * SECOND_NS) + LATE_NS - 1
    assert kernel.beliefs.tell_attributes(8)
    for inode in (7, 7, 8, 9):
        kernel.beliefs.attributes_changed(inode)
    assert kernel.taken() == [notices.attributes_changed(7), notices.attributes_changed(8)]


def test_attributes_told_just_before_a_turn_are_remembered_for_a_lifetime_after_it(
    kernel: Kernel,
) -> None:
    turn_ns = int(LIFETIME_S * SECOND_NS) + LATE_NS
    kernel.beliefs.tell_attributes(1)
    kernel.now_ns = turn_ns - 1
    kernel.beliefs.tell_attributes(7)
    for kernel.now_ns in (turn_ns, 2 * turn_ns - 1):
        kernel.beliefs.tell_attributes(1)
    kernel.beliefs.attributes_changed(7)
    assert kernel.taken() == [notices.attributes_changed(7)]


def test_more_attributes_than_are_remembered_are_not_to_be_believed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beliefs, "ATTRIBUTES_MAX", 2)
    assert [kernel.beliefs.tell_attributes(inode) for inode in (1, 2, 3)] == [True, True, False]


def test_after_the_mount_ended_nothing_is_taken_back(kernel: Kernel) -> None:
    kernel.beliefs.tell_name((1, b"k"), LIFETIME_S)
    kernel.beliefs.tell_attributes(7)
    kernel.beliefs.end()
    kernel.beliefs.name_changed(1, b"k")
    kernel.beliefs.attributes_changed(7)
    assert not kernel.taken()


def test_of_what_a_daemon_before_told_everything_is_taken_back_while_it_may_be_believed(
    kernel: Kernel,
) -> None:
    kernel.beliefs.resume()
    kernel.beliefs.attributes_changed(7)
    assert kernel.taken() == [NAMES, notices.attributes_changed(7)]
    kernel.now_ns = int(LIFETIME_S * SECOND_NS) + LATE_NS
    kernel.beliefs.attributes_changed(7)
    assert not kernel.taken()


def test_the_kernel_forgets_a_directory_by_itself_where_it_asks_for_the_change(
    kernel: Kernel,
) -> None:
    kernel.beliefs.tell_attributes(1)
    kernel.beliefs.tell_attributes(7)
    with kernel.beliefs.renamed_by_kernel((1, b"old"), (1, b"new")):
        kernel.beliefs.attributes_changed(1)
        kernel.beliefs.attributes_changed(7)
    assert kernel.taken() == [notices.attributes_changed(7)]
    kernel.beliefs.attributes_changed(1)
    assert kernel.taken() == [notices.attributes_changed(1)]
