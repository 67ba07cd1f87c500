"""What is done with columns is what would be done with a list of blocks."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.columnops import join, rows_of, select, superseded
from ctxfs.core.columns import BlockColumns
from ctxfs.core.meta import BlockMeta

PLAIN = BlockMeta(
    generation=0,
    stamp=0,
    key=b"",
    size=5,
    digest=bytes(16),
    mode=0o600,
    uid=1,
    gid=2,
    created_ns=3,
    mtime_ns=4,
    atime_ns=5,
)
KEYS = st.sampled_from([b"a", b"b", b"ab", b"long/12345678", b"other/12345678", b"b" * 40])
LISTS = st.lists(st.tuples(KEYS, st.booleans()), max_size=8)


def metas(found: list[tuple[bytes, bool]], first: int = 1) -> list[BlockMeta]:
    return [
        replace(PLAIN, generation=n, stamp=100 - n, key=key, parent=b"p" if more else b"")
        for n, (key, more) in enumerate(found, first)
    ]


def as_list(columns: BlockColumns) -> list[BlockMeta]:
    return [columns.meta(row) for row in range(len(columns))]


@given(LISTS, st.sets(st.integers(0, 7)))
def test_the_rows_to_be_kept_are_kept(found: list[tuple[bytes, bool]], kept: set[int]) -> None:
    all_metas = metas(found)
    keep = np.array([row in kept for row in range(len(all_metas))], np.bool_)
    columns = select(BlockColumns.from_metas(all_metas), keep)
    assert as_list(columns) == [meta for row, meta in enumerate(all_metas) if row in kept]


@given(LISTS, LISTS)
def test_two_lots_are_one_after_the_other(
    first: list[tuple[bytes, bool]], second: list[tuple[bytes, bool]]
) -> None:
    lots = metas(first), metas(second, 50)
    columns = join(*map(BlockColumns.from_metas, lots))
    assert as_list(columns) == [*lots[0], *lots[1]]


@given(st.lists(KEYS, unique=True), st.lists(KEYS), st.randoms())
def test_of_those_with_one_key_the_highest_stamp_is_right(
    settled: list[bytes], new: list[bytes], random: np.random.RandomState
) -> None:
    stamps = list(range(1, len(settled) + len(new) + 1))
    random.shuffle(stamps)
    all_metas = [
        replace(PLAIN, generation=stamp, stamp=stamp, key=key)
        for stamp, key in zip(stamps, [*settled, *new], strict=True)
    ]
    right: dict[bytes, int] = {}
    for meta in all_metas:
        right[meta.key] = max(meta.stamp, right.get(meta.key, 0))
    losers = superseded(BlockColumns.from_metas(all_metas), len(settled))
    assert {all_metas[row].stamp for row in losers} == set(stamps) - set(right.values())


def test_rows_are_found_by_generation() -> None:
    columns = BlockColumns.from_metas(metas([(b"a", False), (b"b", True)], 7))
    assert rows_of(columns, [8, 9]) == {8: 1}
    assert rows_of(columns, []) == {}
