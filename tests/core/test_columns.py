"""Blocks as columns are the blocks that went in."""

from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.columns import BlockColumns
from ctxfs.core.meta import BlockMeta
from tests.ondisk.strategies import blocks


@given(st.lists(blocks, max_size=5))
def test_every_row_gives_back_its_block(metas: list[BlockMeta]) -> None:
    columns = BlockColumns.from_metas(metas)
    assert len(columns) == len(metas)
    assert [columns.meta(row) for row in range(len(columns))] == metas
