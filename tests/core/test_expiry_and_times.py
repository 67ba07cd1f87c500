"""Deadlines: what is due, and that setting the clock neither expires nor revives a block."""

from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.expiry import ExpiryQueue
from ctxfs.core.times import NEVER, Now

deadlines = st.dictionaries(st.integers(1, 50), st.integers(1, 1000), max_size=50)


@given(deadlines, st.integers(0, 1001))
def test_exactly_what_is_past_its_deadline_is_due(current: dict[int, int], now: int) -> None:
    queue = ExpiryQueue()
    for generation, deadline in current.items():
        queue.set(generation, deadline)
    due = list(queue.due(now, lambda generation: current.get(generation, NEVER)))
    assert sorted(due) == sorted(g for g, d in current.items() if d <= now)
    assert list(queue.due(now, lambda generation: current.get(generation, NEVER))) == []


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), max_size=60))
def test_only_the_last_deadline_of_a_block_counts(changes: list[tuple[int, int]]) -> None:
    queue, current = ExpiryQueue(), {}
    for generation, deadline in changes:
        current[generation] = deadline
        queue.set(generation, deadline)
    queue.compact(lambda generation: current.get(generation, NEVER))
    assert len(queue) == sum(deadline != NEVER for deadline in current.values())
    due = set(queue.due(50, lambda generation: current.get(generation, NEVER)))
    assert due == {g for g, d in current.items() if NEVER < d <= 50}


def test_the_next_deadline_is_the_earliest() -> None:
    queue = ExpiryQueue()
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
