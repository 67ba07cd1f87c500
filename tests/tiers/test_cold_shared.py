"""What counts where blocks share contents, against a model of a few lines: plain functions."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.meta import Alias, Drop
from ctxfs.ondisk.facts import FactsBuilder
from ctxfs.ondisk.layout import SEGMENTS_OFFSET, Geometry
from ctxfs.ondisk.record import UNNAMED, RecordHeader, RecordKind
from ctxfs.tiers import cold_facts
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_parts import pack_part
from ctxfs.tiers.cold_replay import settle
from ctxfs.tiers.cold_space import Space
from tests.tiers.cold_rig import SEGMENT, meta

COUNT = 4  # generations; two contents
SIZE = 5000
DATA_BYTES = 8192


def _number(at: int) -> int:
    """The first two are of different contents, the others have the same."""
    return at % 2 + 1 + (at // 2 << 40)


@dataclass
class Model:
    """One segment, by generation: stamps of what was written. All in the order of stamps."""

    data: dict[int, list[int]] = field(default_factory=dict)
    aliases: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # stamp and holder
    drops: dict[int, int] = field(default_factory=dict)

    def content_of(self, number: int) -> int | None:
        """By which records a block is live; None where it is not."""
        dropped_at = self.drops.get(number, UNNAMED)
        own = max((each for each in self.data.get(number, ()) if each > dropped_at), default=0)
        stamp, holder = max(
            (each for each in self.aliases.get(number, ()) if each[0] > dropped_at), default=(0, 0)
        )
        is_good = holder in self.data and (holder ^ number) & 3 == 0
        if is_good and stamp > own:
            return holder
        return number if own else None


_steps = st.lists(
    st.tuples(
        st.sampled_from(["data", "unnamed", "alias", "alias", "drop"]),
        st.integers(0, COUNT - 1),
        st.integers(0, COUNT - 1),
    ),
    max_size=14,
)


@given(_steps)
def test_a_block_is_live_by_its_newest_record_as_long_as_the_content_is_there(
    steps: list[tuple[str, int, int]],
) -> None:
    model, builder = Model(), FactsBuilder(0)
    position = 4096
    for stamp, (kind, at, other) in enumerate(steps, 1):
        number, holder = _number(at), _number(other)
        block = meta(number, stamp, SIZE)
        if kind in ("data", "unnamed"):
            written_at = stamp if kind == "data" else UNNAMED
            header = RecordHeader(
                kind=RecordKind.DATA, header_bytes=4096, stamp=written_at, part_length=SIZE
            )
            builder.add_data(block, header, pack_part(0, position, 4096, DATA_BYTES))
            position += 4096 + DATA_BYTES
            model.data.setdefault(number, []).append(written_at)
        elif kind == "alias":
            builder.add_note(stamp, Alias(block, holder), 200)
            model.aliases.setdefault(number, []).append((stamp, holder))
        else:
            builder.add_note(stamp, Drop(number, stamp), 17)
            model.drops[number] = stamp
    space = Space(Geometry(SEGMENTS_OFFSET + 8 * SEGMENT * 2, SEGMENT * 2, 8))
    space.adopt(0, 1, position)
    space.find_free()
    index = ColdIndex(space)
    facts = cold_facts.merge([builder.finish(1, position)])
    contents = settle(facts, index)
    expected = {
        number: content
        for number in map(_number, range(COUNT))
        if (content := model.content_of(number)) is not None
    }
    found = {number: index.content(number) for number in expected if number in index}
    assert found == expected
    assert sorted(contents.metas.array("generation").tolist()) == sorted(expected)
    assert len(index) == len(expected)
    assert set(index.contents().tolist()) == set(expected.values())
    assert space.live_bytes == sum(each.live_bytes for each in space.segments)
    for number in expected:
        assert index.bury(number, len(steps) + 1)
    graves = sum(each.home & 0xFFFF for each in index.graves.values() if each.is_noted)
    assert space.live_bytes == graves
    assert index.saved_bytes == 0
    assert not len(np.flatnonzero(index.contents()))
