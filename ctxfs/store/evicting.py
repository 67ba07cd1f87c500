"""Out: what leaves for room or for age, with all that it must not be parted from."""

from __future__ import annotations

from ctxfs.core.block import Block, Directory
from ctxfs.store.catalog import Catalog


class Evictor:
    """Drops blocks whole."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def may_evict(self, block: Block, now_ns: int) -> bool:
        """Whether nothing that would go with this block is pinned."""
        if block.is_pinned(now_ns):
            return False
        root = self._catalog.names.together_root(block)
        if root is None:
            return True
        return not self._catalog.names.is_pinned_beneath(root, now_ns)

    def evict(self, block: Block) -> None:
        """Drop a block for room, with those it must not be parted from."""
        for gone in self.drop_together(block):
            self._catalog.counters.evicted += 1
            self._catalog.counters.evicted_bytes += gone.size
            self._catalog.tell("evicted", gone)

    def drop_together(self, block: Block) -> list[Block]:
        """Drop a block; in a `together` directory all that is in there, and the directory."""
        root = self._catalog.names.together_root(block)
        if root is None:
            self._catalog.drop(block)
            return [block]
        blocks = list(self._catalog.names.blocks_beneath(root))
        for each in blocks:
            self._catalog.drop(each)
        self._remove_tree(root)
        return blocks

    def _remove_tree(self, directory: Directory) -> None:
        for node in list(directory.entries.values()):
            assert isinstance(node, Directory)
            self._remove_tree(node)
        if directory.parent is not None:
            self._catalog.remove_directory(directory)
