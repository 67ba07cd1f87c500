"""What is done with blocks as columns: some of them, two lots of them, those that come too late."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxfs.core.columns import I64, U64, BlockColumns

Mask = NDArray[np.bool_]

CHUNK_ROWS = 1 << 16  # of which there are objects at a time
_FINGERPRINT_BYTES = 8
_NOT_BY_ROW = ("keys", "key_end", "extras")


def key_starts(columns: BlockColumns) -> I64:
    """Return the offset of each row's key."""
    ends = columns.key_end.astype(np.int64)
    return np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]


def slices(data: bytes, starts: I64, ends: I64) -> Iterator[list[bytes]]:
    """Yield pieces of `data`, some thousands at a time."""
    for at in range(0, len(starts), CHUNK_ROWS):
        chunk = slice(at, at + CHUNK_ROWS)
        pairs = zip(starts[chunk].tolist(), ends[chunk].tolist(), strict=True)
        yield [data[start:end] for start, end in pairs]


def select(columns: BlockColumns, keep: Mask) -> BlockColumns:
    """Return the rows to be kept, in their order."""
    if keep.all():
        return columns
    lengths = columns.key_end.astype(np.int64) - key_starts(columns)
    keys = np.frombuffer(columns.keys, np.uint8)[np.repeat(keep, lengths)]
    new_rows = np.cumsum(keep) - 1
    return BlockColumns(
        **{name: getattr(columns, name)[keep] for name in _by_row()},
        keys=keys.tobytes(),
        key_end=np.cumsum(lengths[keep], dtype=np.uint64),
        extras={int(new_rows[row]): kept for row, kept in columns.extras.items() if keep[row]},
    )


def join(first: BlockColumns, second: BlockColumns) -> BlockColumns:
    """Return the rows of both, one lot after the other."""
    if not len(second):
        return first
    ends = (first.key_end, second.key_end + np.uint64(len(first.keys)))
    more = {len(first) + row: extras for row, extras in second.extras.items()}
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in _by_row()}
    return BlockColumns(
        **{name: np.concatenate(pair) for name, pair in pairs.items()},
        keys=first.keys + second.keys,
        key_end=np.concatenate(ends),
        extras={**first.extras, **more},
    )


def superseded(columns: BlockColumns, first_new: int) -> list[int]:
    """Return the rows whose key another row has that is right: the one of the highest stamp.

    Of rows before `first_new` no two have one key.
    """
    starts, ends = key_starts(columns), columns.key_end.astype(np.int64)
    prints = _fingerprints(columns, starts, ends)
    doubtful = np.flatnonzero(np.isin(prints, prints[first_new:]))
    winners: dict[bytes, int] = {}
    losers: list[int] = []
    for row in doubtful[np.argsort(columns.stamp[doubtful], kind="stable")].tolist():
        key = columns.keys[starts[row] : ends[row]]
        if key in winners:
            losers.append(winners[key])
        winners[key] = row
    return losers


def _fingerprints(columns: BlockColumns, starts: I64, ends: I64) -> U64:
    """Return a number for each key, of its length and last bytes; few keys share one."""
    keys = np.frombuffer(columns.keys + bytes(1), np.uint8)
    prints = (ends - starts).astype(np.uint64)
    for back in range(1, _FINGERPRINT_BYTES + 1):
        prints = prints * np.uint64(257) + keys[np.maximum(ends - back, starts)]
    return prints


def rows_of(columns: BlockColumns, generations: list[int]) -> dict[int, int]:
    """Return the rows of those of the generations that there are, by generation."""
    if not generations:
        return {}
    asked = np.array(generations, np.uint64)
    rows = np.flatnonzero(np.isin(columns.generation, asked))
    return dict(zip(columns.generation[rows].tolist(), rows.tolist(), strict=True))


def _by_row() -> list[str]:
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(BlockColumns)
    return [field.name for field in fields if field.name not in _NOT_BY_ROW]
