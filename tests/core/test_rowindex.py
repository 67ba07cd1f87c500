"""An index of rows finds what a plain dict would."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.rowindex import NO_ROW, RowIndex, mixed, mixed_all

# Few tags, and some that begin at the last slots, so that runs grow long and go round.
TAGS = st.sampled_from([0, 1, 62, 63, 64, 127, 128, 2**32 - 1])


def found(index: RowIndex, tag: int) -> set[int]:
    rows = []
    row = index.first(tag)
    while row != NO_ROW:
        rows.append(row)
        row = index.next(row)
    assert len(rows) == len(set(rows))
    return set(rows)


@given(
    st.lists(TAGS, max_size=60),
    st.lists(st.tuples(st.booleans(), st.integers(1, 120), TAGS), max_size=120),
)
def test_rows_are_found_by_their_tag_until_they_are_taken_out(
    filled: list[int], steps: list[tuple[bool, int, int]]
) -> None:
    index = RowIndex()
    model = dict(enumerate(filled, 1))
    index.fill(np.array(filled, np.uint32), 1)
    for adds, row, tag in steps:
        if adds and row not in model:
            index.add(tag, row)
            model[row] = tag
        elif not adds and row in model:
            index.remove(row)
            del model[row]
    assert len(index) == len(model)
    for tag in {*filled, *(tag for _, _, tag in steps)}:
        assert found(index, tag) == {row for row, other in model.items() if other == tag}


def test_rows_that_come_all_at_once_lie_beside_those_that_were_there() -> None:
    index = RowIndex()
    for row in range(1, 1001):
        index.add(mixed(row), row)
    tags = mixed_all(np.arange(1001, 3001, dtype=np.uint64))
    index.fill(tags, 1001)
    assert len(index) == 3000
    assert all(row in found(index, mixed(row)) for row in range(1, 3001))


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_many_numbers_are_mixed_as_each_alone(numbers: list[int]) -> None:
    assert mixed_all(np.array(numbers, np.uint64)).tolist() == [mixed(each) for each in numbers]
