"""Homes of keys: in proportion to weights, zones first, and only as many moves as there must be."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfs.core.members import Member, MemberState
from ctxfs.core.placement import NOBODY, Placement, hash_key, hash_keys, names_of

KEYS = [b"key-%d" % number for number in range(20_000)]
HASHES = hash_keys(KEYS)
FEW = KEYS[:300]


def member(name: str, zone: str = "a", weight: int = 100) -> Member:
    return Member(name=name, slot=0, address="h:1", zone=zone, weight=weight)


clusters = st.lists(
    st.builds(
        member,
        st.integers(0, 999).map("n{}".format),
        st.sampled_from("abc"),
        st.integers(1, 1 << 50),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each.name,
)


def homes(members: list[Member], replicas: int) -> dict[bytes, tuple[str, ...]]:
    placement = Placement(members)
    return {key: placement.homes(key, replicas) for key in FEW}


@given(clusters, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_homes_do_not_depend_on_the_order_of_members(
    members: list[Member], replicas: int, order: random.Random
) -> None:
    shuffled = order.sample(members, len(members))
    assert homes(members, replicas) == homes(shuffled, replicas)


@given(clusters, st.integers(1, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_when_a_member_leaves_only_its_own_keys_move(
    members: list[Member], replicas: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(members))
    before = homes(members, replicas)
    after = homes([each for each in members if each is not gone], replicas)
    for key in FEW:
        if gone.name not in before[key]:
            assert after[key] == before[key]
        else:
            # Who was a home stays one.
            assert set(before[key]) - {gone.name} <= set(after[key])


@given(clusters, st.integers(1, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_a_batch_has_the_same_homes_as_each_key_alone(
    members: list[Member], replicas: int, data: st.DataObject
) -> None:
    placement = Placement(members)
    rows = placement.homes_of(hash_keys(FEW), replicas)
    assert rows.shape == (len(FEW), replicas)
    for key, row in zip(FEW, rows, strict=True):
        assert names_of(placement, row) == placement.homes(key, replicas)


@given(clusters, st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_replicas_are_spread_over_zones_before_one_gets_two(
    members: list[Member], replicas: int
) -> None:
    zone_of = {each.name: each.zone for each in members}
    sizes = Counter(zone_of.values())
    for chosen in homes(members, replicas).values():
        assert len(set(chosen)) == len(chosen) == min(replicas, len(members))
        counts = Counter(zone_of[name] for name in chosen)
        for zone, size in sizes.items():
            # A zone has fewer than another only if all of its members are taken.
            assert counts[zone] == size or counts[zone] + 1 >= max(counts.values())


def test_load_is_in_proportion_to_weight() -> None:
    weights = {"n1": 1, "n2": 2, "n3": 4, "n4": 8, "n5": 1}
    placement = Placement(member(name, "a", weight << 30) for name, weight in weights.items())
    counts = np.bincount(placement.homes_of(HASHES, 1)[:, 0], minlength=5)
    expected = np.array([weights[name] for name in placement.names]) / 16 * len(KEYS)
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected))


def test_the_second_home_of_keys_is_spread_as_the_first_is() -> None:
    placement = Placement(member(f"n{number}") for number in range(5))
    pairs = Counter(map(tuple, placement.homes_of(HASHES, 2).tolist()))
    assert len(pairs) == 20
    expected = len(KEYS) / 20
    assert all(abs(count - expected) < 5 * expected**0.5 for count in pairs.values())


def test_a_new_member_gets_its_share_and_nothing_else_moves() -> None:
    old = [member(f"n{number}") for number in range(4)]
    before, after = Placement(old), Placement([*old, member("n4")])
    first, second = before.homes_of(HASHES, 1)[:, 0], after.homes_of(HASHES, 1)[:, 0]
    moved = second == after.index("n4")
    assert np.array_equal(first[~moved], second[~moved])
    assert abs(np.count_nonzero(moved) - len(KEYS) / 5) < 4 * (len(KEYS) / 5) ** 0.5


def test_more_weight_only_attracts_keys() -> None:
    before = Placement([member("n1"), member("n2"), member("n3")])
    after = Placement([member("n1"), member("n2", weight=150), member("n3")])
    first, second = before.homes_of(HASHES, 1)[:, 0], after.homes_of(HASHES, 1)[:, 0]
    changed = first != second
    assert np.any(changed)
    assert np.all(second[changed] == 1)


def test_the_ranking_goes_on_where_the_homes_end() -> None:
    placement = Placement(member(f"n{number}", "ab"[number % 2]) for number in range(6))
    for key in FEW:
        ranking = placement.ranking(key, 6)
        assert len(set(ranking)) == 6
        assert all(placement.homes(key, count) == ranking[:count] for count in range(7))


def test_who_is_suspect_is_no_home() -> None:
    away = member("n2").with_state(MemberState.SUSPECT)
    assert Placement([member("n1"), away]).names == ("n1",)


def test_without_members_nobody_is_home() -> None:
    placement = Placement([])
    assert placement.homes(b"k", 2) == ()
    assert placement.homes_of(HASHES[:3], 2).tolist() == [[NOBODY, NOBODY]] * 3


def test_placement_is_the_same_on_every_host_and_in_every_version() -> None:
    # Written down: a change here moves every block of every cluster.
    placement = Placement(
        [member("n1", "a"), member("n2", "a", 200), member("n3", "b"), member("n4", "b", 50)]
    )
    assert hash_key(b"chat/session42.kv") == 10487588785715656948
    assert placement.homes(b"a", 3) == ("n1", "n3", "n2")
    assert placement.homes(b"b", 3) == ("n3", "n2", "n4")
    assert placement.homes(b"chat/session42.kv", 3) == ("n4", "n1", "n3")


@pytest.mark.parametrize("count", [1, 900])
def test_the_largest_clusters_are_placed_in_batches_too(count: int) -> None:
    placement = Placement(member(f"n{number}", f"z{number % 7}") for number in range(count))
    rows = placement.homes_of(HASHES[:2000], 2)
    for key, row in zip(KEYS[:20], rows[:20], strict=True):
        assert names_of(placement, row) == placement.homes(key, 2)
    assert names_of(placement, rows[-1]) == placement.homes(KEYS[1999], 2)
