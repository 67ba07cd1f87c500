"""Deadlines: what is due, and that setting the clock neither expires nor revives a block."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core import expiry
from ctxfs.core.columns import U64
from ctxfs.core.expiry import ExpiryQueue
from ctxfs.core.times import NEVER, Now

deadlines = st.dictionaries(st.integers(1, 50), st.integers(1, 1000), max_size=50)


def queue_of(current: dict[int, int]) -> ExpiryQueue:
    """A queue that is told of no deadline, and may ask for all."""

    def all_deadlines() -> tuple[U64, U64]:
        return np.array([*current], np.uint64), np.array([*current.values()], np.uint64)

    return ExpiryQueue(all_deadlines)


@given(deadlines, st.integers(0, 1001))
def test_exactly_what_is_past_its_deadline_is_due(current: dict[int, int], now: int) -> None:
    queue = queue_of({})
    for generation, deadline in current.items():
        queue.set(generation, deadline)
    due = list(queue.due(now, lambda generation: current.get(generation, NEVER)))
    assert sorted(due) == sorted(g for g, d in current.items() if d <= now)
    assert list(queue.due(now, lambda generation: current.get(generation, NEVER))) == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "set", "set", "drop", "pass"]), st.integers(1, 20))
)


@given(deadlines, STEPS, st.integers(1, 12), st.randoms())
def test_the_last_deadline_of_each_block_counts_however_few_are_kept(
    current: dict[int, int], steps: list[tuple[str, int]], kept_max: int, random: Random
) -> None:
    now = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expiry, "_KEPT_MAX", 2 * kept_max)
        queue = queue_of(current)
        queue.look_again()
        for step, number in [*steps, ("pass", 2000)]:
            if step == "set":
                current[number] = random.choice([NEVER, now + random.randint(1, 300)])
                queue.set(number, current[number])
            elif step == "drop":
                current.pop(number, None)
            else:
                now += number
                earliest = min((d for d in current.values() if d), default=None)
                told = queue.next_deadline_ns()
                assert earliest is None or (told is not None and told <= earliest)
                expected = {g for g, d in current.items() if NEVER < d <= now}
                assert set(queue.due(now, lambda g: current.get(g, NEVER))) == expected
                for generation in expected:
                    del current[generation]


def test_no_more_are_kept_than_some_thousands() -> None:
    current = {generation: 10**6 - generation for generation in range(1, 50_000)}
    queue = queue_of(current)
    for generation, deadline in current.items():
        queue.set(generation, deadline)
    assert len(queue) < 1 << 15
    assert queue.next_deadline_ns() == 10**6 - 49_999
    due = list(queue.due(10**6, lambda generation: current[generation]))
    assert due == sorted(current, reverse=True)


def test_the_next_deadline_is_the_earliest() -> None:
    queue = queue_of({})
    assert queue.next_deadline_ns() is None
    queue.set(1, 20)
    queue.set(2, 10)
    assert queue.next_deadline_ns() == 10


@given(st.integers(1, 2**62), st.integers(0, 2**61), st.integers(10**18, 2 * 10**18))
def test_a_deadline_survives_being_written_down(deadline: int, boot: int, wall: int) -> None:
    now = Now(boot, wall)
    if now.wall_ns + deadline - boot > 1:
        assert now.to_boot(now.to_wall(deadline)) == deadline


def test_stepping_the_wall_clock_does_not_move_a_deadline_in_memory() -> None:
    before = Now(boot_ns=100, wall_ns=1_000_000)
    written = before.to_wall(150)
    after_reboot = Now(boot_ns=10, wall_ns=1_000_020)
    assert after_reboot.to_boot(written) == 10 + 30
    assert before.to_wall(NEVER) == NEVER
    assert after_reboot.to_boot(NEVER) == NEVER


def test_a_deadline_is_told_to_be_the_earliest_only_if_it_is() -> None:
    current: dict[int, int] = {}
    queue = queue_of(current)
    told = []
    for generation, deadline in ((1, 50), (2, 70), (3, 40), (4, NEVER)):
        current[generation] = deadline
        told.append(queue.set(generation, deadline))
    assert told == [True, False, True, False]
