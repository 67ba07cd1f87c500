"""Filling an empty catalog with blocks as columns: a million in about a second.

No block becomes an object here, but for those that cannot stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ctxfs.core.block import NOT_HOT, Extras
from ctxfs.core.blockrow import ROW_COLUMNS
from ctxfs.core.columnops import Mask, key_starts, select, slices
from ctxfs.core.columns import I64, U32, BlockColumns
from ctxfs.core.key import KEY_BYTES_MAX, NAME_BYTES_MAX, split_key
from ctxfs.core.meta import PIN_FOREVER, PIN_NONE, Placement
from ctxfs.core.times import NEVER, Now
from ctxfs.errors import CtxfsError
from ctxfs.store.catalog import Catalog
from ctxfs.tiers.hot import FoundFile

log = logging.getLogger(__name__)

_NOWHERE = 0  # no directory has this number
_DOTS_MAX = 2  # names that are no names have at most so many bytes

Facts = NDArray[np.void]  # of ROW_COLUMNS

# Makes the directory of a path, b"" for the root, and returns its number in the table of blocks.
NumberOf = Callable[[bytes], int]


def load(
    catalog: Catalog,
    columns: BlockColumns,
    is_cold: Mask,
    files: dict[int, FoundFile],
    number_of: NumberOf,
) -> int:
    """Add blocks; no two have one key or generation. Takes from `files` what is claimed.

    `is_cold`: the cold tier holds them. Returns how many were in no tier, and are dropped.
    """
    homes, names_from = _places(columns, number_of)
    is_good = homes != _NOWHERE
    if not is_good.all():
        for row in np.flatnonzero(~is_good).tolist():
            log.warning("block %r cannot be found again", columns.meta(row).key)
        columns, is_cold = select(columns, is_good), is_cold[is_good]
        homes, names_from = _places(columns, number_of)
    now = catalog.clock()
    facts = _facts(columns, now)
    _claim(columns, files, facts)
    table = catalog.names.table
    spans = names_from, columns.key_end.astype(np.int64)
    first = table.load(columns.generation, homes, columns.keys, spans, facts)
    catalog.block_count += len(columns)
    for row, extras in _extras(columns, now).items():
        table.extras[first + row] = extras
    there = _without_shadowed(catalog, first, len(columns))
    return _into_orders(catalog, first, facts, is_cold, there)


def _places(columns: BlockColumns, number_of: NumberOf) -> tuple[U32, I64]:
    """Return for each row the number of its directory, and where in `keys` its name begins."""
    ends, starts = columns.key_end.astype(np.int64), key_starts(columns)
    slashes = np.flatnonzero(np.frombuffer(columns.keys, np.uint8) == ord("/"))
    last = np.searchsorted(slashes, ends) - 1
    found = np.full(len(columns), -1, np.int64)
    found[last >= 0] = slashes[last[last >= 0]]
    nested = found >= starts
    names_from = np.where(nested, found + 1, starts)
    is_good = np.ones(len(columns), np.bool_)
    for row in _doubtful(columns, starts, ends, names_from).tolist():
        is_good[row] = _is_key(columns.keys[starts[row] : ends[row]])
    homes = np.full(len(columns), _NOWHERE, np.uint32)
    if len(rows := np.flatnonzero(is_good & ~nested)):
        homes[rows] = number_of(b"")
    numbers = {b"": _NOWHERE}  # what begins with a slash is no key
    rows = np.flatnonzero(is_good & nested)
    at = 0
    for paths in slices(columns.keys, starts[rows], found[rows]):
        for path in paths:
            if path not in numbers:
                numbers[path] = _number(path, number_of)
        homes[rows[at : at + len(paths)]] = [numbers[path] for path in paths]
        at += len(paths)
    return homes, names_from


def _is_key(key: bytes) -> bool:
    try:
        split_key(key)
    except CtxfsError:
        return False
    return True


def _number(path: bytes, number_of: NumberOf) -> int:
    try:
        return number_of(path)
    except CtxfsError as error:
        log.warning("directory %r cannot be made again: %s", path, error)
        return _NOWHERE


def _doubtful(columns: BlockColumns, starts: I64, ends: I64, names_from: I64) -> I64:
    """Return the rows whose key may be none."""
    lengths = ends - names_from
    doubtful = (lengths <= _DOTS_MAX) | (lengths > NAME_BYTES_MAX) | (ends - starts > KEY_BYTES_MAX)
    zeros = np.flatnonzero(np.frombuffer(columns.keys, np.uint8) == 0)
    doubtful[np.searchsorted(ends, zeros, side="right")] = True
    return np.flatnonzero(doubtful)


def _facts(columns: BlockColumns, now: Now) -> Facts:
    """Return what is kept of each block in its row of the table; none has a hot copy."""
    facts = np.zeros(len(columns), ROW_COLUMNS)
    for name in (
        "stamp",
        "origin",
        "size",
        "created_ns",
        "mtime_ns",
        "atime_ns",
        "uid",
        "gid",
        "mode",
    ):
        facts[name] = getattr(columns, name)
    facts["ctime_ns"] = columns.mtime_ns
    facts["digest"] = columns.digest
    facts["hot_bytes"] = NOT_HOT
    booted_ns = now.wall_ns - now.boot_ns
    used = np.minimum(np.maximum(columns.atime_ns, booted_ns + 1) - booted_ns, now.boot_ns)
    facts["used_ns"] = np.where(columns.atime_ns == NEVER, NEVER, used)
    expires = np.maximum(columns.expires_ns, np.uint64(booted_ns + 1)) - np.uint64(booted_ns)
    facts["expires_ns"] = np.where(columns.expires_ns == NEVER, np.uint64(NEVER), expires)
    return facts


def _claim(columns: BlockColumns, files: dict[int, FoundFile], facts: Facts) -> None:
    """Give hot files to their blocks; one of another size was not sealed."""
    generations = np.fromiter(files, np.uint64, len(files))
    for row in np.flatnonzero(np.isin(columns.generation, generations)).tolist():
        generation = int(columns.generation[row])
        if files[generation].size == columns.size[row]:
            facts["hot_bytes"][row] = files.pop(generation).physical_bytes


def _extras(columns: BlockColumns, now: Now) -> dict[int, Extras]:
    """Return, by row, what few blocks have."""
    pinned = np.flatnonzero(columns.pin_until_ns != PIN_NONE)
    placed = np.flatnonzero(columns.placement != Placement.AUTO)
    changed = np.flatnonzero((columns.revision != 0) | (columns.replicas != 0))
    made = {}
    for row in {*pinned.tolist(), *placed.tolist(), *changed.tolist(), *columns.extras}:
        pin = int(columns.pin_until_ns[row])
        parent, dtype, attributes = columns.extras.get(row, (b"", b"", ()))
        made[row] = Extras(
            pin if pin in (PIN_NONE, PIN_FOREVER) else now.to_boot(pin),
            Placement(int(columns.placement[row])),
            parent,
            dtype,
            dict(attributes),
            int(columns.revision[row]),
            int(columns.replicas[row]),
        )
    return made


def _without_shadowed(catalog: Catalog, first: int, count: int) -> Mask:
    """Take away the blocks that have a directory's name; returns which of the rows are left."""
    there = np.ones(count, np.bool_)
    names = catalog.names
    for directory in names.by_inode.directories.values():
        parent = directory.parent
        block = names.block_beside(directory) if parent is not None else None
        if block is not None:
            log.warning("block %r gives way to a directory of that name", names.key_of(block))
            there[block.row - first] = False
            names.unname(block)
            names.bury(block)
            names.forget(block)
            catalog.block_count -= 1
    return there


def _into_orders(
    catalog: Catalog,
    first: int,
    facts: Facts,
    is_cold: Mask,
    there: Mask,
) -> int:
    """Put blocks in the orders in which they leave and expire. Returns how many are in no tier."""
    order = np.lexsort((facts["stamp"], facts["used_ns"]))
    order = order[there[order]]
    is_hot = facts["hot_bytes"] != NOT_HOT
    is_warm = _are_warm(catalog, first, len(facts))
    rows = (order + first).astype(np.uint32)
    catalog.hot_order.add_all(rows[is_hot[order]])
    catalog.warm_order.add_all(rows[is_warm[order]])
    catalog.warm_content_bytes += int(facts["size"][there & is_warm].sum())
    catalog.cold_order.add_all(rows[is_cold[order]])
    catalog.expiry.look_again()
    lost = np.flatnonzero(there & ~is_hot & ~is_warm & ~is_cold).tolist()
    for row in lost:
        catalog.drop(catalog.names.table.at(first + row))
    return len(lost)


def _are_warm(catalog: Catalog, first: int, count: int) -> Mask:
    if catalog.warm is None:
        return np.zeros(count, np.bool_)
    generations = catalog.names.table.generations[first : first + count]
    return np.fromiter(map(catalog.warm.__contains__, generations), np.bool_, count)
