"""Tables of a cold device held against the records themselves. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ctxfs.ondisk.columnar import Array, Table
from ctxfs.ondisk.facts import HOME_SHIFT, IN_DATA, NOWHERE, Facts
from ctxfs.tiers.cold_facts import Mask, is_in, number_column
from ctxfs.tiers.cold_parts import part_position, part_segment, segments_of


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that one of both has. `part`: of the data record that it is about, if any."""

    unborne: bool  # else a record says it and the tables do not
    what: str
    number: int
    part: int | None = None

    @property
    def place(self) -> tuple[int, int] | None:
        """Segment and position."""
        return None if self.part is None else (part_segment(self.part), part_position(self.part))


def slim(facts: Facts) -> Facts:
    """What is needed of facts to compare them: without the long columns."""
    kept = ("generation", "stamp", "size", "digest", "key_hash", "home")
    metas = Table({name: facts.metas.array(name) for name in kept})
    makes = Table({name: facts.makes.array(name) for name in ("number", "stamp", "home")})
    return Facts(
        covers=facts.covers,
        parts=facts.parts,
        aliases=facts.aliases,
        metas=metas,
        drops=facts.drops,
        makes=makes,
        holders=facts.holders,
        removes=facts.removes,
    )


def within(facts: Facts, segment_count: int) -> Facts:
    """Without what is said of segments that the device does not have."""
    count = np.uint64(segment_count)

    def at_home(table: Table) -> Table:
        home = table.array("home")
        return table.where((home == np.uint64(IN_DATA)) | (home >> np.uint64(HOME_SHIFT) < count))

    return Facts(
        covers=facts.covers.where(facts.covers.array("segment") < count),
        seen=facts.seen,
        parts=facts.parts.where(segments_of(facts.parts.array("part")) < segment_count),
        aliases=at_home(facts.aliases),
        metas=at_home(facts.metas),
        drops=at_home(facts.drops),
        makes=at_home(facts.makes),
        holders=facts.holders.where(facts.holders.array("segment") < count),
        removes=at_home(facts.removes),
    )


def compare(told: Facts, found: Facts) -> Iterator[Difference]:
    """What tables tell of the segments that they cover against what is found in these, both
    merged."""
    yield from _parts(told.parts, found.parts)
    yield from _aliases(told.aliases, found.aliases)
    blocks = (found.parts.array("generation"), found.aliases.array("generation"))
    of_blocks = np.unique(np.concatenate(blocks))
    of_directories = np.unique(found.holders.array("number"))
    for name, what, relevant in (
        ("metas", "attributes", of_blocks),
        ("drops", "a drop", of_blocks),
        ("makes", "a directory", of_directories),
        ("removes", "a removal", of_directories),
    ):
        yield from _newest(getattr(told, name), getattr(found, name), name, what, relevant)


def _parts(told: Table, found: Table) -> Iterator[Difference]:
    """Rows of the one that the other does not have; each place holds one record."""
    for unborne, ours, others in ((True, told, found), (False, found, told)):
        at = np.argsort(others.array("part"), kind="stable")
        in_order = others.array("part")[at]
        same = is_in(ours.array("part"), in_order)
        if len(in_order):
            rows = at[np.minimum(np.searchsorted(in_order, ours.array("part")), len(at) - 1)]
            for name in ours.columns:
                same &= ours.array(name) == others.array(name)[rows]
        for row in np.flatnonzero(~same).tolist():
            yield Difference(
                unborne,
                "a record of a block",
                int(ours.array("generation")[row]),
                int(ours.array("part")[row]),
            )


def _aliases(told: Table, found: Table) -> Iterator[Difference]:
    """Rows of the one that the other does not have."""
    rows = [set(zip(*(each.array(name).tolist() for name in each.columns), strict=True))
            for each in (told, found)]  # fmt: skip
    for unborne, only in ((True, rows[0] - rows[1]), (False, rows[1] - rows[0])):
        for generation, *_ in sorted(only):
            yield Difference(unborne, "an alias", generation)


def _newest(
    told: Table, found: Table, name: str, what: str, relevant: Array
) -> Iterator[Difference]:
    """Of each number one row; what a note said that is gone since needs none to bear it out."""
    by = number_column(name)
    home = told.array("home")
    noted = (home != np.uint64(NOWHERE)) & (home != np.uint64(IN_DATA))
    for row in np.flatnonzero(noted & ~_known(told, found, by)).tolist():
        yield Difference(True, f"{what} in a note", int(told.array(by)[row]))
    needed = is_in(found.array(by), relevant)
    for row in np.flatnonzero(needed & ~_known(found, told, by)).tolist():
        yield Difference(False, what, int(found.array(by)[row]))


def _known(ours: Table, others: Table, by: str) -> Mask:
    """Which rows have one of the same number, as new, in the other table."""
    order = np.argsort(others.array(by), kind="stable")
    in_order = others.array(by)[order]
    known = is_in(ours.array(by), in_order)
    if not len(in_order):
        return known
    rows = order[np.minimum(np.searchsorted(in_order, ours.array(by)), len(order) - 1)]
    theirs = others.array("stamp")[rows]
    known &= theirs >= ours.array("stamp")
    for name in ("size", "key_hash", "digest"):
        if name in ours.columns:
            equal = ours.array(name) == others.array(name)[rows]
            equal = equal.all(axis=1) if equal.ndim > 1 else equal
            known &= equal | (theirs != ours.array("stamp"))
    return known
