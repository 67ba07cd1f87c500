"""Blocks that several devices, or several generations, claim to be: one of them is right. Pure."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ctxfs.ondisk.columnar import Array, Table, make_table
from ctxfs.ondisk.facts import METAS

DropBlock = Callable[[int, int], None]  # generation, stamp


def drop_doubles(found: Sequence[tuple[Table, DropBlock]]) -> Table:
    """All rows of METAS of several devices, each with its `drop`; of each generation one.

    Of two copies the one whose attributes are older may be of a put that failed, and was revoked.
    Where they are as old, the first device's is as good as any.
    """
    metas = Table.concat([make_table(METAS), *(table for table, _ in found)])
    kept = np.ones(len(metas), bool)
    owners = np.repeat(np.arange(len(found)), [len(table) for table, _ in found])
    for rows in _groups(metas.array("generation")):
        stamps = metas.array("stamp")[rows].tolist()
        best = max(range(len(rows)), key=lambda at: (stamps[at], -at))
        for at, row in enumerate(rows):
            if at != best:
                kept[row] = False
                _, drop = found[int(owners[row])]
                drop(int(metas.array("generation")[row]), stamps[at])
    return metas.where(kept)


def drop_superseded(metas: Table, drop: DropBlock) -> tuple[Table, list[int]]:
    """The rows, of each key one, and the generations of the others.

    Where two generations claim one key, the higher stamp is right.
    """
    kept = np.ones(len(metas), bool)
    losers: list[int] = []
    keys, stamps = metas.ragged("key"), metas.array("stamp")
    for rows in _groups(metas.array("key_hash")):
        winners: dict[bytes, int] = {}
        for row in sorted(rows, key=lambda row: int(stamps[row]), reverse=True):
            if winners.setdefault(keys.row(row), row) != row:
                kept[row] = False
                losers.append(int(metas.array("generation")[row]))
                drop(losers[-1], int(stamps[row]))
    return metas.where(kept), losers


def _groups(values: Array) -> list[list[int]]:
    """Rows that have the same value as another, by value; in their order."""
    order: npt.NDArray[np.intp] = np.argsort(values, kind="stable")
    same = values[order][1:] == values[order][:-1]
    groups: list[list[int]] = []
    last = -2
    for at in np.flatnonzero(same).tolist():
        if at != last + 1:
            groups.append([int(order[at])])
        groups[-1].append(int(order[at + 1]))
        last = at
    return groups
