"""What goes for room, as lists: no clock, no loop."""

from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.block import Block
from ctxfs.core.eviction import Lru, choose
from ctxfs.core.meta import PIN_FOREVER
from ctxfs.core.namespace import Namespace


def blocks(count: int) -> list[Block]:
    root = Namespace().root
    return [Block(number, root, b"%d" % number) for number in range(count)]


def test_the_least_recently_used_block_leaves_first() -> None:
    a, b, c = blocks(3)
    order = Lru()
    for block in (a, b, c):
        order.add(block)
    order.use(a)
    assert list(order.leaving()) == [b, c, a]


def test_using_a_block_that_the_tier_does_not_hold_changes_nothing() -> None:
    a, b = blocks(2)
    order = Lru()
    order.add(a)
    order.use(b)
    order.remove(b)
    assert list(order.leaving()) == [a]


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
