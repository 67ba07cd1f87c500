"""What goes when a tier needs room. Pure: the store carries it out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ctxfs.core.block import Block


class Policy(Protocol):
    """An order in which blocks leave a tier."""

    def add(self, block: Block) -> None: ...

    def use(self, block: Block) -> None: ...

    def remove(self, block: Block) -> None: ...

    def leaving(self) -> Iterator[Block]:
        """Yield blocks, the first to go first. Not to be changed while iterated."""
        ...

    def __len__(self) -> int: ...


class Lru:
    """Least recently used first. Use is `open`; looking is not use."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: Block) -> bool:
        return block.generation in self._order

    def add(self, block: Block) -> None:
        """A copy arrived in the tier; it counts as used now."""
        self._order[block.generation] = block
        self._order.move_to_end(block.generation)

    def use(self, block: Block) -> None:
        """The block was opened; harmless if this tier has no copy."""
        if block.generation in self._order:
            self._order.move_to_end(block.generation)

    def remove(self, block: Block) -> None:
        """The copy left the tier; harmless if there was none."""
        self._order.pop(block.generation, None)

    def leaving(self) -> Iterator[Block]:
        """Yield blocks, least recently used first."""
        return iter(self._order.values())


def choose(
    leaving: Iterable[Block],
    need_bytes: int,
    bytes_of: Callable[[Block], int],
    may_go: Callable[[Block], bool],
) -> list[Block]:
    """Return the first blocks that may go and together free `need_bytes`; fewer if there are not.

    Never names a block for which `may_go` says no: pinned, open, being written or moved.
    """
    chosen: list[Block] = []
    freed = 0
    if need_bytes <= 0:
        return chosen
    for block in leaving:
        if may_go(block):
            chosen.append(block)
            freed += bytes_of(block)
            if freed >= need_bytes:
                break
    return chosen
