"""Names are given back as they were put, whatever was dropped in between."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.namestore import NameStore

DIGITS = st.integers(14, 40).flatmap(lambda n: st.binary(min_size=n, max_size=n)).map(bytes.hex)
NAMES = st.one_of(
    st.binary(min_size=1, max_size=255),
    DIGITS.map(str.encode),
    DIGITS.map(str.upper).map(str.encode),
    DIGITS.map(lambda text: text[:-1].encode()),
)


@given(st.lists(NAMES), st.lists(st.tuples(NAMES, st.integers(0, 9))))
def test_a_name_is_the_same_until_it_is_dropped(
    many: list[bytes], steps: list[tuple[bytes, int]]
) -> None:
    store = NameStore()
    lengths = np.array([len(name) for name in many], np.uint8)
    kept = list(zip(many, store.put_all(many, lengths).tolist(), strict=True))
    for name, drops in steps:
        if drops < len(kept):
            gone, cell = kept.pop(drops)
            store.drop(cell, len(gone))
        kept.append((name, store.put(name)))
    assert [store.get(cell, len(name)) for name, cell in kept] == [name for name, _ in kept]
    assert all(store.is_at(cell, name) for name, cell in kept)
    for name, cell in kept:
        assert not store.is_at(cell, bytes([name[0] ^ 1]) + name[1:])


def test_the_room_of_a_dropped_name_is_used_again() -> None:
    store = NameStore()
    cell = store.put(b"a" * 30)
    store.drop(cell, 30)
    assert store.put(b"b" * 20) == cell


def test_a_digest_in_hexadecimal_takes_half_its_length() -> None:
    store = NameStore()
    digests = [b"%064x" % (number * 7919) for number in range(1000)]
    cells = [store.put(name) for name in digests[:500]]
    cells += store.put_all(digests[500:], np.full(500, 64, np.uint8)).tolist()
    assert [store.get(cell, 64) for cell in cells] == digests
    assert sum(map(len, store._cells)) == 32 * 1000
