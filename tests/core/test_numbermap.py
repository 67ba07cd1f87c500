"""A map of numbers is what a dict of them would be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.numbermap import NumberMap

NUMBERS = st.integers(1, 2**64 - 1)
FEW = st.integers(1, 90)


@given(
    st.dictionaries(st.one_of(NUMBERS, FEW), NUMBERS, max_size=80),
    st.lists(st.tuples(st.booleans(), FEW, NUMBERS), max_size=200),
)
def test_it_holds_what_a_dict_would(
    loaded: dict[int, int], steps: list[tuple[bool, int, int]]
) -> None:
    numbers = NumberMap()
    model = dict(loaded)
    numbers.load(np.array([*loaded], np.uint64), np.array([*loaded.values()], np.uint64))
    for sets, key, value in steps:
        if sets:
            numbers[key] = value
            model[key] = value
        elif key in model:
            numbers.remove(key)
            del model[key]
        else:
            with pytest.raises(KeyError):
                numbers.remove(key)
    assert len(numbers) == len(model)
    assert numbers.keys() == set(model)
    for key in {*model, *range(1, 91)}:
        assert numbers.get(key) == model.get(key)
        assert (key in numbers) == (key in model)


def test_many_that_come_one_by_one_are_all_found() -> None:
    numbers = NumberMap()
    for key in range(1, 2000):
        numbers[key] = 2 * key
    assert all(numbers.get(key) == 2 * key for key in range(1, 2000))
    for key in range(1, 2000, 2):
        numbers.remove(key)
    assert len(numbers) == 999
    assert all((key in numbers) == (not key % 2) for key in range(1, 2000))
