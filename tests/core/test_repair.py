"""Repair: one push for each missing copy, the same in everybody's plan, and not too fast."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfs.core.members import Member
from ctxfs.core.placement import Placement, hash_keys
from ctxfs.core.repair import SECOND_NS, TokenBucket, plan, presumed

HASHES = hash_keys(b"key-%d" % number for number in range(400))


def placement(names: str, zones: str = "") -> Placement:
    """A member a letter; its zone is the letter at the same place of `zones`."""
    return Placement(
        Member(name=name, slot=0, address="h:1", zone=zone, weight=100)
        for name, zone in zip(names, zones or "z" * len(names), strict=True)
    )


@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from(["zzzz", "yyzz", "xyzz"]))
@settings(max_examples=40, deadline=None)
def test_after_the_plan_every_home_has_every_key_that_anybody_held(
    seed: int, replicas: int, zones: str
) -> None:
    after = placement("abcd", zones)
    holds = np.random.default_rng(seed).random((len(HASHES), 4)) < 0.3
    pushes = plan(HASHES, holds, after, replicas)
    assert np.all(holds[pushes.row, pushes.source])  # who sends, has
    assert not np.any(holds[pushes.row, pushes.target])  # who gets, has not
    sent = list(zip(pushes.row.tolist(), pushes.target.tolist(), strict=True))
    assert len(set(sent)) == len(sent)
    then = holds.copy()
    then[pushes.row, pushes.target] = True
    held = holds.any(axis=1)
    assert pushes.lost == np.count_nonzero(~held)
    for home in after.homes_of(HASHES, replicas).T:
        assert np.all(then[np.arange(len(HASHES)), home][held])
    assert not len(plan(HASHES, then, after, replicas))


@given(st.integers(1, 3), st.sampled_from(["abde", "abcde", "abcdef", "acdef", "f"]))
@settings(max_examples=30, deadline=None)
def test_what_each_member_plans_for_itself_is_together_the_whole_plan(
    replicas: int, names: str
) -> None:
    before, after = placement("abcde"), placement(names)
    holds = presumed(HASHES, before, after, replicas)
    whole = plan(HASHES, holds, after, replicas)
    parts = [whole.of(number) for number in range(len(names))]
    assert sum(map(len, parts)) == len(whole)
    if names == "abde":
        # The keys of the member that left, once each; and of no other.
        left = before.index("c")
        assert set(whole.row) == set(np.flatnonzero((before.homes_of(HASHES, replicas) == left)
                                                    .any(axis=1) & holds.any(axis=1)))  # fmt: skip


def test_a_member_that_joins_is_sent_its_keys_and_no_others_move() -> None:
    before, after = placement("abc"), placement("abcd")
    pushes = plan(HASHES, presumed(HASHES, before, after, 2), after, 2)
    assert set(pushes.target.tolist()) == {after.index("d")}
    # All three share the work.
    assert len(set(pushes.source.tolist())) == 3


def test_nothing_crosses_zones_that_can_come_from_nearby() -> None:
    after = placement("abcd", "yyzz")
    holds = np.zeros((len(HASHES), 4), np.bool_)
    holds[:, [0, 2]] = True  # one in each zone
    pushes = plan(HASHES, holds, after, 4)
    zone_of = np.array(after.zone_of)
    assert len(pushes) == 2 * len(HASHES)
    assert np.array_equal(zone_of[pushes.source], zone_of[pushes.target])


def test_an_empty_batch_and_an_empty_cluster_need_nothing() -> None:
    none = np.zeros((0, 2), np.bool_)
    assert len(plan(HASHES[:0], none, placement("ab"), 2)) == 0
    alone = plan(HASHES, np.zeros((len(HASHES), 0), np.bool_), placement(""), 2)
    assert (len(alone), alone.lost) == (0, len(HASHES))


def test_a_bucket_lets_a_burst_through_and_then_so_much_a_second() -> None:
    bucket = TokenBucket(bytes_per_s=1000, burst_bytes=500, now_ns=0)
    assert bucket.take(500, 0) == 0
    wait_ns = bucket.take(1000, 0)
    assert SECOND_NS <= wait_ns <= SECOND_NS + 1
    assert bucket.take(0, wait_ns) == 0
    assert bucket.take(100, wait_ns) > 0


def test_a_bucket_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(bytes_per_s=1000, burst_bytes=500, now_ns=0)
    assert bucket.take(500, 10**15) == 0
    assert bucket.take(1, 10**15) > 0


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, SECOND_NS)), max_size=50))
def test_who_waits_as_told_never_sends_more_than_the_rate(steps: list[tuple[int, int]]) -> None:
    bucket = TokenBucket(bytes_per_s=1000, burst_bytes=500, now_ns=0)
    now_ns = sent = 0
    for length, idle_ns in steps:
        now_ns += idle_ns
        now_ns += bucket.take(length, now_ns)
        sent += length
        assert sent <= 500 + now_ns * 1000 / SECOND_NS + 1


def test_what_was_not_sent_is_given_back_and_never_makes_a_larger_burst() -> None:
    bucket = TokenBucket(bytes_per_s=1000, burst_bytes=500, now_ns=0)
    assert bucket.take(1500, 0) == SECOND_NS + 1
    bucket.give_back(1500)
    assert bucket.take(500, 0) == 0
    bucket.give_back(9000)
    assert bucket.take(500, 0) == 0
    assert bucket.take(1, 0) > 0
