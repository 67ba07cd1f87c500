"""Laying facts together: of several places, of what is still there, cut by number. Pure."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ctxfs.core.columns import I64
from ctxfs.ondisk.columnar import Array, Table
from ctxfs.ondisk.facts import HOME_SHIFT, IN_DATA, NOWHERE, Facts
from ctxfs.tiers.cold_parts import segments_of

Mask = npt.NDArray[np.bool]
_NUMBERED = ("parts", "aliases", "metas", "drops", "makes", "holders", "removes")


def number_column(name: str) -> str:
    """The column by which a table of facts is cut: a generation or an inode."""
    return "generation" if name in ("parts", "aliases", "metas") else "number"


def restrict(facts: Facts, present: I64) -> Facts:
    """What is said of records that are there, `present` giving the sequence of each segment, or -1.

    Attributes and Drops stay, though their own note is gone: the newest word is the newest word.
    A record counts only where it is; one in a segment that this device does not have is nowhere.
    """
    segments = _within(facts.covers.array("segment"), present)
    now = np.append(present, -1)[segments]
    kept = (now >= 0) & (now.astype(np.uint64) == facts.covers.array("sequence"))
    there = np.zeros(len(present) + 1, bool)
    there[segments[kept]] = True
    in_segment = _within(segments_of(facts.parts.array("part")), present)
    aliased_in = _within(facts.aliases.array("home") >> np.uint64(HOME_SHIFT), present)
    return Facts(
        covers=facts.covers.where(kept),
        seen=facts.seen,
        parts=facts.parts.where(there[in_segment]),
        aliases=facts.aliases.where(there[aliased_in]),
        metas=_at_home(facts.metas, there),
        drops=_at_home(facts.drops, there),
        makes=_at_home(facts.makes, there),
        holders=facts.holders.where(there[_within(facts.holders.array("segment"), present)]),
        removes=_at_home(facts.removes, there),
    )


def _within(segments: Array, present: Array) -> Array:
    """Segments as indexes; what this device cannot have is one behind the last."""
    return np.asarray(np.minimum(segments, len(present)).astype(np.intp))


def _at_home(table: Table, there: Mask) -> Table:
    """Notes in segments that are gone are nowhere."""
    home = table.array("home")
    segment = _within(home >> np.uint64(HOME_SHIFT), there[:-1])
    gone = (home != np.uint64(IN_DATA)) & ~there[segment]
    if not gone.any():
        return table
    return table.with_array("home", np.where(gone, np.uint64(NOWHERE), home))


def merge(several: Sequence[Facts]) -> Facts:
    """All facts of these; of what is said twice, the newest word."""

    def all_of(name: str) -> Table:
        return Table.concat([getattr(facts, name) for facts in several])

    seen = all_of("seen")
    if len(seen):
        highest = {name: seen.array(name).max(keepdims=True) for name in ("number", "stamp")}
        seen = Table(dict(highest))
    return Facts(
        covers=all_of("covers"),
        seen=seen,
        parts=all_of("parts"),
        aliases=all_of("aliases"),
        metas=_newest(all_of("metas"), "generation"),
        drops=_newest(all_of("drops"), "number"),
        makes=_newest(all_of("makes"), "number"),
        holders=all_of("holders"),
        removes=_newest(all_of("removes"), "number"),
    )


def _newest(table: Table, by: str) -> Table:
    """Of the rows with one number that with the highest stamp, and of these the best home."""
    numbers = table.array(by)
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    same = in_order[1:] == in_order[:-1]
    if not same.any():
        return table
    several = np.zeros(len(numbers), bool)  # rows that are not the only one
    several[order[1:][same]] = several[order[:-1][same]] = True
    rivals = np.flatnonzero(several)
    keys = (table.array("home")[rivals], table.array("stamp")[rivals], numbers[rivals])
    ranked = rivals[np.lexsort(keys)]
    last = np.append(numbers[ranked][1:] != numbers[ranked][:-1], True)
    several[ranked[last]] = False  # the winners
    return table.where(~several)


def prune(facts: Facts) -> Facts:
    """Without what says nothing any more of records that are there.

    A note that is there stays, whatever it is about: that may be in segments that are not covered.
    """
    blocks = (facts.parts.array("generation"), facts.aliases.array("generation"))
    parts = np.unique(np.concatenate(blocks))
    held = np.unique(facts.holders.array("number"))
    metas_home = facts.metas.array("home")
    in_note = (metas_home != np.uint64(IN_DATA)) & (metas_home != np.uint64(NOWHERE))
    return Facts(
        covers=facts.covers,
        seen=facts.seen,
        parts=facts.parts,
        aliases=facts.aliases,
        metas=facts.metas.where(in_note | is_in(facts.metas.array("generation"), parts)),
        drops=facts.drops.where(_noted(facts.drops) | is_in(facts.drops.array("number"), parts)),
        makes=facts.makes.where(is_in(facts.makes.array("number"), held)),
        holders=facts.holders,
        removes=facts.removes.where(
            _noted(facts.removes) | is_in(facts.removes.array("number"), held)
        ),
    )


def _noted(table: Table) -> Mask:
    return np.asarray(table.array("home") != np.uint64(NOWHERE))


def is_in(numbers: Array, among: Array) -> Mask:
    """Which of `numbers` are in `among`, which is sorted."""
    if not len(among):
        return np.zeros(len(numbers), bool)
    at = np.minimum(np.searchsorted(among, numbers), len(among) - 1)
    return np.asarray(among[at] == numbers)


def between(facts: Facts, first: int, end: int | None) -> Facts:
    """What is said of numbers from `first` to before `end`; nothing of which segments it covers."""

    def cut(name: str) -> Table:
        table: Table = getattr(facts, name)
        numbers = table.array(number_column(name))
        mask = numbers >= np.uint64(first)
        if end is not None:
            mask &= numbers < np.uint64(end)
        return table.where(mask)

    return Facts(**{name: cut(name) for name in _NUMBERED})


def sort(facts: Facts) -> Facts:
    """By number, so that the next reader has less to do."""

    def sorted_table(name: str) -> Table:
        table: Table = getattr(facts, name)
        numbers = table.array(number_column(name))
        if (numbers[1:] >= numbers[:-1]).all():
            return table
        return table.take(np.argsort(numbers, kind="stable"))

    tables = {name: sorted_table(name) for name in _NUMBERED}
    return Facts(covers=facts.covers, seen=facts.seen, **tables)


def middle(facts: Facts) -> int | None:
    """A number that cuts the facts in about two halves; None where they are all of one."""
    tables = [getattr(facts, name).array(number_column(name)) for name in _NUMBERED]
    numbers = np.concatenate(tables) if tables else np.zeros(0, np.uint64)
    if not len(numbers):
        return None
    numbers.sort()
    found = int(numbers[len(numbers) // 2])
    if found > int(numbers[0]):
        return found
    above = numbers[numbers > np.uint64(found)]
    return int(above[0]) if len(above) else None


def end(facts: Facts) -> int:
    """A number above all that the facts are about."""
    tables = [getattr(facts, name).array(number_column(name)) for name in _NUMBERED]
    return max((int(numbers.max()) + 1 for numbers in tables if len(numbers)), default=0)


def runs(in_order: Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where the runs of equal values begin and end."""
    if not len(in_order):
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    changes = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    return np.concatenate(([0], changes)), np.concatenate((changes, [len(in_order)]))
