"""Stripes of a request: each once, all of them, and never more than there is credit for."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.errors import PeerProtocolError
from ctxfs.wire.transfer import Dispatch, Reception


@given(
    st.integers(1, 5000), st.integers(1, 700), st.integers(2, 9), st.randoms(use_true_random=False)
)
def test_all_bytes_arrive_whatever_the_order_within_the_window(
    length: int, unit: int, stripes: int, chance: random.Random
) -> None:
    window = unit * stripes
    reception = Reception(length, unit, window)
    dispatch = Dispatch(length, unit, reception.first_credit)
    under_way: list[tuple[int, int]] = []
    while not reception.is_complete:
        if dispatch.is_ready and (not under_way or chance.random() < 0.6):
            under_way.append(dispatch.take(unit * chance.randrange(4)))
            assert sum(size for _, size in under_way) <= window
        else:
            offset, size = under_way.pop(chance.randrange(len(under_way)))
            reception.accept(offset, size)
            half = size // 2
            dispatch.give(reception.add(half))
            dispatch.give(reception.add(size - half))
    assert dispatch.is_done
    assert not dispatch.is_ready


@pytest.mark.parametrize(
    ("offset", "length"),
    [(1, 100), (0, 99), (0, 101), (300, 100), (200, 100), (400, 1), (100, 50), (0, 300), (0, 240)],
)
def test_a_stripe_that_is_none_is_refused(offset: int, length: int) -> None:
    reception = Reception(250, 100, 1000)
    with pytest.raises(PeerProtocolError, match="nobody awaits"):
        reception.accept(offset, length)


def test_a_stripe_comes_once() -> None:
    reception = Reception(250, 100, 1000)
    reception.accept(100, 150)
    for offset, length in ((200, 50), (0, 250), (100, 100)):
        with pytest.raises(PeerProtocolError, match="was here before"):
            reception.accept(offset, length)
    reception.accept(0, 100)


def test_who_sends_beyond_its_credit_is_found_out() -> None:
    reception = Reception(1000, 100, 200)
    reception.accept(0, 100)
    reception.accept(100, 100)
    with pytest.raises(PeerProtocolError, match="credit"):
        reception.accept(200, 100)


def test_an_empty_block_is_complete_at_once() -> None:
    assert Reception(0, 100, 200).is_complete
    assert Dispatch(0, 100, 0).is_done
