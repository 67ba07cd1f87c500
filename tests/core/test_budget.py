"""The write budget: never more than a day's worth a day, and a little ahead."""

from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.budget import DAY_NS, FIRST_SHARE, WriteBudget

TIB = 1 << 40


def test_without_a_limit_everything_is_allowed() -> None:
    budget = WriteBudget(None, 0)
    assert budget.allows(0, 10**18)


def test_a_used_up_budget_comes_back_with_time() -> None:
    budget = WriteBudget(TIB, 0)
    assert budget.allows(0, 0)
    assert not budget.allows(0, TIB // FIRST_SHARE)
    assert budget.allows(DAY_NS // 1000, TIB // FIRST_SHARE)


def test_what_is_saved_up_is_a_day_at_most() -> None:
    budget = WriteBudget(TIB, 0)
    assert budget.allows(30 * DAY_NS, 0)
    assert not budget.allows(30 * DAY_NS, TIB)


def test_a_changed_limit_counts_at_once() -> None:
    budget = WriteBudget(None, 0)
    budget.change(TIB)
    assert not budget.allows(0, TIB // FIRST_SHARE)
    budget.change(None)
    assert budget.allows(0, 10 * TIB)


@given(st.lists(st.tuples(st.integers(0, DAY_NS), st.integers(0, TIB // 10)), max_size=200))
def test_writes_that_were_allowed_stay_within_the_rate(steps: list[tuple[int, int]]) -> None:
    budget = WriteBudget(TIB, 0)
    now_ns = written = 0
    for passed_ns, want in steps:
        now_ns += passed_ns
        if budget.allows(now_ns, written):
            written += want
        # The last one may have begun when a byte was left.
        assert written <= TIB / FIRST_SHARE + TIB * now_ns / DAY_NS + TIB // 10 + 1
