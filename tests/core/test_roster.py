"""Who comes and goes: suspect before gone, and we are always there."""

from dataclasses import replace

import pytest

from ctxfs.core.members import Member, MemberState
from ctxfs.core.roster import Roster

WAIT_NS = 100


def member(name: str, **changes: object) -> Member:
    made = Member(name=name, slot=0, address=f"{name}:1", zone="z", weight=1)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def roster() -> Roster:
    made = Roster(member("me"), WAIT_NS)
    made.put(member("a"), member("b"))
    return made


def states(roster: Roster) -> dict[str, str]:
    return {each.name: each.state.value for each in roster.membership}


def test_who_is_missed_is_suspect_for_a_while_and_then_gone(roster: Roster) -> None:
    roster.miss("a", 10)
    assert states(roster) == {"a": "suspect", "b": "live", "me": "live"}
    assert (roster.next_ns(), roster.absent_since_ns("a")) == (110, 10)
    roster.expire(109)
    assert "a" in roster.membership
    roster.expire(110)
    assert states(roster) == {"b": "live", "me": "live"}
    assert roster.next_ns() is None


def test_who_comes_back_in_time_was_never_gone(roster: Roster) -> None:
    roster.miss("a", 10)
    roster.put(member("a", incarnation=2))
    roster.expire(1000)
    assert states(roster)["a"] == "live"


def test_missing_somebody_again_does_not_begin_the_wait_anew(roster: Roster) -> None:
    roster.miss("a", 10)
    roster.miss("a", 50)
    roster.put_all([member("b")], 60)
    assert roster.next_ns() == 110


def test_a_whole_list_makes_suspect_whoever_is_not_in_it(roster: Roster) -> None:
    roster.put_all([member("b"), member("c")], 10)
    assert states(roster) == {"a": "suspect", "b": "live", "c": "live", "me": "live"}


def test_only_what_changes_makes_a_new_snapshot(roster: Roster) -> None:
    before = roster.membership
    roster.put(member("a"))
    roster.put_all([member("a"), member("b")], 10)
    roster.miss("stranger", 10)
    roster.vouch("stranger")
    roster.expire(10**9)
    assert roster.membership is before
    roster.miss("a", 10)
    assert roster.membership.epoch == before.epoch + 1


def test_nobody_else_says_what_we_are(roster: Roster) -> None:
    roster.put(member("me", slot=9))
    roster.miss("me", 10)
    roster.put_all([], 10)
    assert roster.membership.get("me") == member("me")
    roster.rename_me(member("me", slot=7))
    assert roster.membership.get("me") == member("me", slot=7)


def test_what_was_known_before_keeps_its_state_and_gets_the_whole_wait() -> None:
    roster = Roster(member("me"), WAIT_NS)
    away = member("b", state=MemberState.SUSPECT)
    roster.recall([member("me", slot=9), member("a"), away], 1000)
    assert states(roster) == {"a": "live", "b": "suspect", "me": "live"}
    assert roster.next_ns() == 1100
    roster.vouch("b")
    assert states(roster)["b"] == "live"
