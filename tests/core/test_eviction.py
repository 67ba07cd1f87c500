"""What goes for room, as lists: no clock, no loop."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core import eviction
from ctxfs.core.block import Block
from ctxfs.core.eviction import Lru, choose
from ctxfs.core.meta import PIN_FOREVER
from ctxfs.core.namespace import Namespace


def blocks(count: int) -> list[Block]:
    root = Namespace().root
    return [Block(number, root, b"%d" % number) for number in range(count)]


def order_of(made: list[Block]) -> Lru:
    """An order that may hold these blocks, and holds none."""
    space = Namespace()
    for block in made:
        space.publish(block, space.root, block.name)
    return Lru(space.table)


def test_the_least_recently_used_block_leaves_first() -> None:
    a, b, c = blocks(3)
    order = order_of([a, b, c])
    for block in (a, b, c):
        order.add(block)
    order.use(a)
    assert list(order.leaving()) == [b, c, a]
    assert len(order) == 3


def test_using_a_block_that_the_tier_does_not_hold_changes_nothing() -> None:
    a, b = blocks(2)
    order = order_of([a, b])
    order.add(a)
    order.use(b)
    order.remove(b)
    assert list(order.leaving()) == [a]
    assert a in order
    assert b not in order


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove", "look", "glance"]), st.integers(0, 11)),
    max_size=80,
)


@given(STEPS, st.integers(1, 8), st.integers(0, 90))
def test_an_order_is_what_a_plain_list_would_be(
    steps: list[tuple[str, int]], at_once: int, turns_left: int
) -> None:
    made = blocks(12)
    model: list[Block] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "_CHOSEN_MIN", at_once)
        order = order_of(made)
        order._next_turn = 2**32 - turns_left
        for step, number in steps:
            block = made[number]
            held = block in model
            if step == "look":
                assert list(order.leaving()) == model
            elif step == "glance":
                first = list(itertools.islice(order.leaving(), number))
                assert first == model[:number]
            else:
                getattr(order, step)(block)
                if held:
                    model.remove(block)
                if step == "add" or (step == "use" and held):
                    model.append(block)
            assert len(order) == len(model)
            assert (block in order) == (block in model)
    assert list(order.leaving()) == model
    assert order.generations().tolist() == [block.generation for block in reversed(model)]


def test_many_blocks_join_an_order_at_once() -> None:
    made = blocks(5)
    order = order_of(made)
    order.add(made[4])
    order.add_all(np.array([made[2].row, made[0].row], np.uint32))
    order.add(made[1])
    assert list(order.leaving()) == [made[4], made[2], made[0], made[1]]
    assert len(order) == 4


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 500), st.sets(st.integers(0, 29)))
def test_just_enough_is_chosen_and_nothing_that_may_not_go(
    sizes: list[int], need: int, held: set[int]
) -> None:
    order = blocks(len(sizes))
    chosen = choose(order, need, lambda b: sizes[b.generation], lambda b: b.generation not in held)
    assert not {b.generation for b in chosen} & held
    freed = [sizes[b.generation] for b in chosen]
    free = sum(size for number, size in enumerate(sizes) if number not in held)
    assert sum(freed) >= min(need, free)
    if freed:
        assert sum(freed[:-1]) < need


def test_a_pin_lapses_by_itself() -> None:
    (block,) = blocks(1)
    assert not block.is_pinned(0)
    block.more().pin_until_ns = 100
    assert block.is_pinned(99)
    assert not block.is_pinned(100)
    block.more().pin_until_ns = PIN_FOREVER
    assert block.is_pinned(2**63)
