"""Whether compressing pays, as it is learned."""

from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core import worth
from ctxfs.core.worth import Worth


def test_what_was_never_tried_is_worth_a_try() -> None:
    assert Worth().is_promising(b"bf16")


def test_a_kind_that_does_not_pay_is_tried_again_now_and_then() -> None:
    learned = Worth()
    learned.tried(b"noise", 1000, None)
    asked = [learned.is_promising(b"noise") for _ in range(3 * worth.PROBE_EVERY)]
    assert asked.count(True) == 3
    assert learned.is_promising(b"bf16")


def test_a_kind_that_came_to_pay_is_taken_again() -> None:
    learned = Worth()
    learned.tried(b"", 1000, 1000)
    for _ in range(20):
        learned.tried(b"", 1000, 500)
    assert learned.is_promising(b"")


def test_one_bad_block_does_not_end_a_good_kind() -> None:
    learned = Worth()
    learned.tried(b"", 1500, 1000)
    learned.tried(b"", 1000, None)
    assert learned.is_promising(b"")


@given(st.lists(st.floats(1e-12, 1e-6), min_size=1), st.lists(st.floats(1e-12, 1e-6), min_size=1))
def test_the_faster_way_up_is_known_once_both_were_gone(
    inflate: list[float], cold: list[float]
) -> None:
    learned = Worth()
    assert learned.inflates_faster_than_cold()
    for each in inflate:
        learned.inflated(1 << 20, each * (1 << 20))
    assert learned.inflates_faster_than_cold()
    for each in cold:
        learned.read_cold(1 << 20, each * (1 << 20))
    if max(inflate) < min(cold):
        assert learned.inflates_faster_than_cold()
    if min(inflate) > max(cold):
        assert not learned.inflates_faster_than_cold()


def test_kinds_are_bounded_however_many_come() -> None:
    learned = Worth()
    for number in range(3 * worth.KINDS_MAX):
        learned.tried(b"%d" % number, 10, 9)
    assert len(learned._ratios) <= worth.KINDS_MAX
