"""Members: what is told of them, snapshots, and what differs between two."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.members import (
    Member,
    Membership,
    MemberState,
    difference,
    from_record,
)
from ctxfs.errors import BadValue


def member(name: str, **changes: object) -> Member:
    made = Member(name=name, slot=1, address=f"{name}:7440", zone="a", weight=1 << 30)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_record_reads_back_as_the_member_it_was_made_of() -> None:
    made = member("n1", incarnation=7, instance="abc", state=MemberState.SUSPECT)
    assert from_record(made.to_record()) == made.with_state(MemberState.LIVE)


def test_a_record_of_a_later_version_is_read_without_what_it_adds() -> None:
    told = json.loads(member("n1").to_record()) | {"colour": "blue"}
    assert from_record(json.dumps(told).encode()) == member("n1")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a/b"},
        {"name": ""},
        {"name": 3},
        {"slot": 1024},
        {"slot": -1},
        {"slot": True},
        {"weight": 0},
        {"weight": 1.5},
        {"address": "nowhere"},
        {"zone": "a\nb"},
        {"zone": None},
        {"instance": "x" * 301},
    ],
)
def test_a_record_of_what_no_member_can_be_is_refused(change: dict[str, object]) -> None:
    told = json.loads(member("n1").to_record()) | change
    with pytest.raises(BadValue):
        from_record(json.dumps(told).encode())


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_no_record_whatever_makes_anything_but_a_refusal(record: bytes) -> None:
    with pytest.raises(BadValue):
        from_record(record)


def test_a_snapshot_is_equal_by_its_members_whatever_their_order() -> None:
    one, two = member("n1"), member("n2")
    assert Membership(1, [two, one]) == Membership(2, [one, two])
    assert Membership(1, [two, one]).fingerprint == Membership(2, [one, two]).fingerprint
    assert [each.name for each in Membership(1, [two, one])] == ["n1", "n2"]


def test_the_fingerprint_differs_exactly_where_keys_may_be_placed_otherwise() -> None:
    plain = Membership(1, [member("n1"), member("n2")])
    same = [member("n1", address="x:1", incarnation=5), member("n2", slot=9)]
    assert Membership(1, same).fingerprint == plain.fingerprint
    for other in (
        [member("n1")],
        [member("n1", zone="b"), member("n2")],
        [member("n1", weight=5), member("n2")],
        [member("n1", state=MemberState.SUSPECT), member("n2")],
    ):
        assert Membership(1, other).fingerprint != plain.fingerprint


def test_the_difference_tells_who_joined_left_changed_and_started_anew() -> None:
    before = Membership(1, [member("n1"), member("n2"), member("n3")])
    after = Membership(2, [member("n1"), member("n2", incarnation=9), member("n4"), member("n0")])
    change = difference(before, after)
    assert [each.name for each in change.joined] == ["n0", "n4"]
    assert [each.name for each in change.left] == ["n3"]
    assert [new.name for _, new in change.changed] == ["n2"]
    assert [each.name for each in change.restarted] == ["n2"]
    assert change.moves_homes
    assert not difference(after, Membership(3, after))


def test_a_member_that_is_suspect_changes_but_has_not_left() -> None:
    before = Membership(1, [member("n1"), member("n2")])
    after = Membership(2, [member("n1"), member("n2", state=MemberState.SUSPECT)])
    change = difference(before, after)
    assert (change.joined, change.left, change.restarted) == ((), (), ())
    assert change.moves_homes
    assert [each.name for each in after.live()] == ["n1"]


def test_who_has_left_is_in_no_snapshot() -> None:
    with pytest.raises(ValueError, match="left"):
        Membership(1, [member("n1", state=MemberState.LEFT)])
