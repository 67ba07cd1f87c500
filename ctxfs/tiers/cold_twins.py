"""Contents on cold devices that new blocks may share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ctxfs.core.contentindex import ContentIndex
from ctxfs.device.engine import Span
from ctxfs.ondisk.columnar import Table
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_log import ColdLog
from ctxfs.tiers.cold_parts import part_data_bytes, part_method


@dataclass(frozen=True, slots=True)
class Twin:
    """A content that may be the same as a new block's, by the generation it was written for."""

    content: int
    log: ColdLog

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """It stays meanwhile, whoever drops it; False where it went already."""
        index = self.log.index
        if not index.claim(self.content):
            yield False
            return
        try:
            yield True
        finally:
            index.disclaim(self.content)

    @property
    def stored_bytes(self) -> int:
        """The length of what `read` gives: the content, or what a codec made of it, padded."""
        return sum(map(part_data_bytes, self.log.index.own_parts(self.content)))

    @property
    def method(self) -> int:
        """How a codec made what is stored; 0: the content itself."""
        parts = self.log.index.own_parts(self.content)
        return part_method(parts[0]) if parts else 0

    async def read(self, target: Span) -> None:
        """What is stored of it, while it is held. Raises DeviceError, BlockNotFound."""
        await self.log.reader.read_content(self.content, target)


def load_contents(contents: ContentIndex, found: Sequence[tuple[ColdIndex, Table]]) -> None:
    """Know all that a recovery found: of each device its index, and the rows of facts.METAS that
    are live."""
    digests, sizes, generations = [], [], []
    for index, metas in found:
        numbers = metas.array("generation").astype(np.uint64)  # a copy, to be changed
        if len(index.sharing):
            for row, generation in enumerate(numbers.tolist()):
                numbers[row] = index.content(generation)
        digests.append(metas.array("digest"))
        sizes.append(metas.array("size"))
        generations.append(numbers)
    if generations:
        contents.load(np.concatenate(digests), np.concatenate(sizes), np.concatenate(generations))
