"""Memory that is used again."""

from hypothesis import given
from hypothesis import strategies as st

from ctxfs.device.mapping import PAGE, bytes_at
from ctxfs.device.memorypool import MemoryPool


def test_memory_is_taken_again_by_the_next_of_about_that_size() -> None:
    pool = MemoryPool()
    with pool.memory(3 * PAGE) as first:
        address = first.address
    with pool.memory(2 * PAGE + 1) as second:
        assert second.address == address


def test_small_memory_does_not_take_a_large_piece() -> None:
    pool = MemoryPool()
    with pool.memory(100 * PAGE) as first:
        address = first.address
    with pool.memory(PAGE) as second:
        assert second.address != address


def test_two_users_at_once_have_memory_of_their_own() -> None:
    pool = MemoryPool()
    with pool.memory(PAGE) as one, pool.memory(PAGE) as other:
        assert one.address != other.address


def test_no_more_is_kept_than_agreed() -> None:
    pool = MemoryPool(kept_bytes_max=4 * PAGE)
    pieces = [pool.take(2 * PAGE) for _ in range(5)]
    for piece in pieces:
        piece.view[-1] = 1
        pool.give_back(piece)
    assert sum(pool.take(2 * PAGE).view[-1] for _ in range(5)) == 2


@given(st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=20))
def test_nothing_of_the_last_user_is_behind_the_end(sizes: list[int]) -> None:
    pool = MemoryPool()
    for size in sizes:
        with pool.memory(size) as memory:
            assert len(memory.view) == size
            whole = bytes_at(memory.span())
            assert not any(whole[size:])
            whole[:] = b"\xff" * len(whole)
