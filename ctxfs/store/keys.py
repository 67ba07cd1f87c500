"""What keys that other hosts name lead to here."""

from __future__ import annotations

from ctxfs.core.block import Block, Directory
from ctxfs.errors import CtxfsError
from ctxfs.store.catalog import Catalog


def block_at(catalog: Catalog, key: bytes) -> Block | None:
    """The published block of a key, in whatever state."""
    try:
        node = catalog.names.resolve(key)
    except CtxfsError:
        return None
    return node if isinstance(node, Block) else None


def directory_at(catalog: Catalog, path: bytes) -> Directory | None:
    """The directory of a path, but for the root."""
    try:
        node = catalog.names.resolve(path)
    except CtxfsError:
        return None
    return node if isinstance(node, Directory) and node.parent is not None else None
