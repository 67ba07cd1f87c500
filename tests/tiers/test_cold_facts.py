"""Laying facts together, cutting them, and leaving out what is gone: plain functions."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.meta import Alias, Drop, MakeDirectory, Put, RemoveDirectory
from ctxfs.ondisk.columnar import Ragged, Table
from ctxfs.ondisk.facts import HOME_SHIFT, IN_DATA, NOWHERE, Facts, FactsBuilder
from ctxfs.ondisk.record import RecordHeader, RecordKind
from ctxfs.tiers import cold_facts
from ctxfs.tiers.cold_blobs import bytes_max, cut
from ctxfs.tiers.cold_parts import pack_part, part_segment
from tests.tiers.cold_rig import directory, meta

SEGMENTS = 4
_ALL = np.arange(1, SEGMENTS + 1, dtype=np.int64)  # the sequence of each


def _facts(seed: int, segment: int, stamp: int = 0) -> Facts:
    """A segment with data and notes about a few generations and inodes."""
    chance = random.Random(seed)
    builder = FactsBuilder(segment)
    position = 4096
    for _ in range(chance.randrange(12)):
        stamp += chance.randrange(3)
        number = chance.randrange(1, 12)
        match chance.randrange(7):
            case 0 | 1:
                part = pack_part(segment, position, 4096, 4096)
                header = RecordHeader(
                    kind=RecordKind.DATA, header_bytes=4096, stamp=stamp, part_length=100
                )
                builder.add_data(meta(number, stamp, 100), header, part)
                position += 8192
            case 2:
                builder.add_note(stamp, Put(meta(number, stamp, 100)), 90)
            case 3:
                builder.add_note(stamp, Alias(meta(number, stamp, 100), number + 1), 100)
            case 4:
                builder.add_note(stamp, Drop(number, stamp), 17)
            case 5:
                builder.add_note(stamp, MakeDirectory(directory(number, stamp)), 60)
            case _:
                builder.add_note(stamp, RemoveDirectory(number, stamp), 17)
    return builder.finish(segment + 1, position)


def _rows(table: Table) -> list[tuple[object, ...]]:
    columns = [
        [column.row(at) for at in range(len(column))]
        if isinstance(column, Ragged)
        else [bytes(value) if column.ndim > 1 else int(value) for value in column]
        for column in table.columns.values()
    ]
    return sorted(zip(*columns, strict=True))


def _content(facts: Facts) -> dict[str, list[tuple[object, ...]]]:
    return {name: _rows(getattr(facts, name)) for name in Facts.__slots__}


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=SEGMENTS), st.randoms())
def test_facts_of_several_segments_are_the_same_in_any_order(
    seeds: list[int], chance: random.Random
) -> None:
    several = [_facts(seed, segment, 5 * segment) for segment, seed in enumerate(seeds)]
    merged = cold_facts.merge(several)
    shuffled = [*several]
    chance.shuffle(shuffled)
    assert _content(cold_facts.merge(shuffled)) == _content(merged)
    halves = [cold_facts.merge(shuffled[:1]), *shuffled[1:]]
    assert _content(cold_facts.merge(halves)) == _content(merged)
    generations = merged.metas.array("generation").tolist()
    assert len(generations) == len(set(generations))


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=SEGMENTS), st.integers(100, 9000))
def test_pieces_make_the_whole_again(seeds: list[int], length: int) -> None:
    whole = cold_facts.merge([_facts(seed, segment) for segment, seed in enumerate(seeds)])
    pieces = cut(whole, 0, length)
    assert _content(cold_facts.merge([piece for _, piece in pieces])) == _content(whole)
    firsts = [first for first, _ in pieces]
    assert firsts == sorted(set(firsts))
    for (first, piece), end in zip(pieces, [*firsts[1:], None], strict=True):
        assert _content(cold_facts.between(piece, first, end))["metas"] == _rows(piece.metas)
        assert bytes_max(piece) <= length or cold_facts.middle(piece) is None


@given(st.lists(st.integers(0, 2**32), min_size=SEGMENTS, max_size=SEGMENTS), st.integers(0, 15))
def test_records_of_segments_that_are_gone_do_not_count(seeds: list[int], gone: int) -> None:
    several = [_facts(seed, segment) for segment, seed in enumerate(seeds)]
    present = _ALL.copy()
    for segment in range(SEGMENTS):
        if gone >> segment & 1:
            present[segment] = 99 if segment % 2 else -1  # begun anew, or erased
    left = cold_facts.restrict(cold_facts.merge(several), present)
    there = {segment for segment in range(SEGMENTS) if not gone >> segment & 1}
    assert set(left.covers.array("segment").tolist()) == there
    assert {part_segment(part) for part in left.parts.array("part").tolist()} <= there
    assert set(left.holders.array("segment").tolist()) <= there
    for table in (left.metas, left.drops, left.makes, left.removes):
        for home in table.array("home").tolist():
            assert home in (IN_DATA, NOWHERE) or home >> HOME_SHIFT in there
    expected = cold_facts.merge([several[segment] for segment in there] or [Facts()])
    assert _rows(left.parts) == _rows(expected.parts)
    assert _rows(left.holders) == _rows(expected.holders)


@given(st.lists(st.integers(0, 2**32), min_size=SEGMENTS, max_size=SEGMENTS), st.integers(0, 15))
def test_pruning_loses_no_note_that_is_there_and_no_attributes_of_a_record(
    seeds: list[int], gone: int
) -> None:
    several = [_facts(seed, segment) for segment, seed in enumerate(seeds)]
    present = np.where([gone >> segment & 1 for segment in range(SEGMENTS)], -1, _ALL)
    whole = cold_facts.restrict(cold_facts.merge(several), present)
    pruned = cold_facts.prune(whole)
    assert _rows(pruned.parts) == _rows(whole.parts)
    assert _rows(pruned.aliases) == _rows(whole.aliases)
    recorded = set(whole.parts.array("generation").tolist())
    recorded |= set(whole.aliases.array("generation").tolist())
    for before, after, column in (
        (whole.metas, pruned.metas, "generation"),
        (whole.drops, pruned.drops, "number"),
    ):
        kept = set(after.array(column).tolist())
        for number, home in zip(
            before.array(column).tolist(), before.array("home").tolist(), strict=True
        ):
            needed = number in recorded or home not in (IN_DATA, NOWHERE)
            assert (number in kept) == needed
    sorted_again = cold_facts.sort(pruned)
    assert _content(sorted_again) == _content(pruned)
    numbers = sorted_again.metas.array("generation")
    assert (numbers[1:] >= numbers[:-1]).all()


@given(st.integers(0, 2**32))
def test_facts_of_segments_that_the_device_does_not_have_are_nowhere(seed: int) -> None:
    good, wild = _facts(seed, 0), _facts(seed + 1, SEGMENTS + 3)
    mixed = Facts(
        covers=good.covers,
        seen=good.seen,
        parts=wild.parts,
        metas=wild.metas,
        drops=wild.drops,
        makes=wild.makes,
        holders=wild.holders,
        removes=wild.removes,
    )
    left = cold_facts.restrict(mixed, _ALL)
    assert not len(left.parts.array("part"))
    assert not len(left.holders.array("segment"))
    for table in (left.metas, left.drops, left.makes, left.removes):
        assert set(table.array("home").tolist()) <= {IN_DATA, NOWHERE}
