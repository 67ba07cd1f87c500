"""Notes found on one device about blocks of another, and what they change there. Pure.

Such an errand is a Put: the newest attributes, or, with an expiry of GONE_NS, that the block is
gone. It was written where the block's own device was lost, or before a name was given on
(`cold_names`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ctxfs.core.meta import BlockMeta
from ctxfs.ondisk.columnar import Table
from ctxfs.ondisk.facts import IN_DATA, NOWHERE, Facts, block_columns, metas_table

# No block that lives expires in the first nanosecond of 1970.
GONE_NS: Final = 1


def gone_meta(generation: int, stamp: int) -> BlockMeta:
    """Attributes that say that this block is gone, whatever is found of it up to this stamp."""
    return BlockMeta(
        generation=generation,
        stamp=stamp,
        key=b"",
        size=0,
        digest=bytes(16),
        mode=0,
        uid=0,
        gid=0,
        created_ns=0,
        mtime_ns=0,
        atime_ns=0,
        expires_ns=GONE_NS,
    )


def gone_stamp_of(meta: BlockMeta) -> int:
    """The stamp, if they say so; else 0."""
    return meta.stamp if meta.expires_ns == GONE_NS else 0


@dataclass(frozen=True, slots=True)
class FoundErrand:
    """`home`: where its note lies on its device."""

    meta: BlockMeta
    home: int


@dataclass(slots=True)
class Done:
    """What errands have changed: newer attributes, and blocks that are gone, with the stamp."""

    changed: list[BlockMeta] = field(default_factory=list)
    gone: list[tuple[int, int]] = field(default_factory=list)


def find_errands(facts: Facts, live: Table) -> list[FoundErrand]:
    """Those among all facts of a device on which these blocks are `live`."""
    home = facts.metas.array("home")
    noted = (home != np.uint64(IN_DATA)) & (home != np.uint64(NOWHERE))
    notes = facts.metas.where(noted)
    notes = notes.where(~np.isin(notes.array("generation"), live.array("generation")))
    if not len(notes):
        return []
    drops = facts.drops.where(np.isin(facts.drops.array("number"), notes.array("generation")))
    dropped = dict(zip(drops.array("number").tolist(), drops.array("stamp").tolist(), strict=True))
    columns = block_columns(notes)
    found = [FoundErrand(columns.meta(row), int(at)) for row, at in enumerate(notes.array("home"))]
    # What was dropped here after its note lived here: the note is about that.
    return [each for each in found if each.meta.stamp >= dropped.get(each.meta.generation, 0)]


def run_errands(metas: Table, errands: Sequence[FoundErrand], done: Done) -> Table:
    """The live blocks of all devices as errands make them; `done` says of each what it was."""
    newest: dict[int, BlockMeta] = {}
    for each in errands:
        known = newest.get(each.meta.generation)
        if known is None or known.stamp < each.meta.stamp:
            newest[each.meta.generation] = each.meta
    numbers = np.fromiter(newest, np.uint64, len(newest))
    rows = np.flatnonzero(np.isin(metas.array("generation"), numbers))
    touched = metas.take(rows)
    generations, stamps = touched.array("generation").tolist(), touched.array("stamp").tolist()
    kept = np.ones(len(metas), bool)
    for row, generation, stamp in zip(rows.tolist(), generations, stamps, strict=True):
        meta = newest[generation]
        if meta.stamp > stamp:
            kept[row] = False
            if gone_stamp_of(meta):
                done.gone.append((generation, meta.stamp))
            else:
                done.changed.append(meta)
    return Table.concat([metas.where(kept), metas_table(done.changed)])
