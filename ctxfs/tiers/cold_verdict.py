"""What was found on a cold device, added up as a start does it: what is live, what hurts it."""

import numpy as np
import trio

from ctxfs.ondisk.columnar import Table
from ctxfs.ondisk.facts import Facts
from ctxfs.ondisk.record import UNNAMED
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.tiers import cold_compare, cold_facts
from ctxfs.tiers.cold_errands import find_errands
from ctxfs.tiers.cold_examine import Examination
from ctxfs.tiers.cold_faults import FaultKind
from ctxfs.tiers.cold_health import Health
from ctxfs.tiers.cold_parts import part_position, part_segment
from ctxfs.tiers.cold_placing import Placer
from ctxfs.tiers.cold_replay import settle
from ctxfs.tiers.cold_space import SegmentState
from ctxfs.tiers.cold_tables import TablePolicy, Tables
from ctxfs.tiers.cold_walk import Chain, FoundRecord


class Verdict:
    """On a device that was walked. `settle`, then `count_live`."""

    def __init__(self, device: Examination, policy: TablePolicy) -> None:
        self._device = device
        self._policy = policy
        self._drops: Table

    async def settle(self) -> None:
        """Find out what is live, as a start does, and tell of all that hurts it."""
        told = await trio.to_thread.run_sync(
            cold_facts.merge, self._device.tables.said or [Facts()]
        )
        found = await trio.to_thread.run_sync(cold_facts.merge, self._device.covered or [Facts()])
        self._device.tables.said.clear()
        self._device.covered.clear()
        differences = cold_compare.compare(told, found)
        for difference in differences:
            self._tell_difference(difference, told)
        del found
        told = cold_compare.within(told, len(self._device.space.segments))
        facts = await trio.to_thread.run_sync(cold_facts.merge, [told, *self._device.others])
        del told
        self._device.others.clear()
        self._drops = facts.drops
        contents = await trio.to_thread.run_sync(settle, facts, self._device.index)
        self._device.live = contents.metas
        self._device.errands = find_errands(facts, contents.metas)
        for generation in contents.incomplete:
            self._tell_incomplete(generation, facts)
        for chain in sorted(self._device.chains, key=lambda each: each.index):
            self._tell_chain(chain)
        self._count()

    def _tell_difference(self, each: cold_compare.Difference, told: Facts) -> None:
        kind = FaultKind.UNBORNE if each.unborne else FaultKind.MISSED
        said = "is in a table, but no record says so" if each.unborne else "is missing in tables"
        offset = None if each.place is None else self._device.offset(*each.place)
        key = _key_of(told.metas, each.number)
        self._device.tell(kind, f"{each.what} {said}", offset, key=key, generation=each.number)

    def _tell_incomplete(self, generation: int, facts: Facts) -> None:
        rows = np.flatnonzero(facts.parts.array("generation") == np.uint64(generation))
        what, offset = "the content that the block shares is not there", None
        if len(rows):
            part = int(facts.parts.array("part")[rows[0]])
            what = "only pieces of the block are there"
            offset = self._device.offset(part_segment(part), part_position(part))
        self._device.tell(
            FaultKind.INCOMPLETE,
            what,
            offset,
            key=_key_of(facts.metas, generation),
            generation=generation,
            expected=not self._device.found.clean,
        )

    def _tell_chain(self, chain: Chain) -> None:
        trusted = chain.sequence < self._device.verify_from
        for each in chain.bad:
            if not trusted:
                self._tell_record(FaultKind.TORN, "the data of a record is torn", chain, each)
            elif self._is_live(chain, each):
                what = "the data of a record does not match its checksum"
                self._tell_record(FaultKind.DATA, what, chain, each)
            else:
                self._device.report.dead_corrupt += 1
        if not chain.damaged and not chain.behind:
            return
        end = self._device.offset(chain.index, chain.end)
        if not trusted:
            self._device.tell(FaultKind.TORN, "the header of a record is torn", end, expected=True)
            return
        lost = [each for each in chain.behind if self._is_lost(each)]
        count = f"; {len(chain.behind)} good records are behind it"
        if chain.damaged:
            self._device.tell(FaultKind.HEADER, f"the header of a record is damaged{count}", end)
        elif lost:
            # Behind a write that failed there may be others that did not, which nobody needs.
            self._device.tell(FaultKind.GAP, f"no record is where one should be{count}", end)
        for each in lost:
            self._tell_record(FaultKind.MISSED, "no chain leads to a record", chain, each)

    def _tell_record(self, kind: FaultKind, what: str, chain: Chain, each: FoundRecord) -> None:
        self._device.tell(
            kind,
            what,
            self._device.offset(chain.index, each.position),
            key=each.meta.key if each.meta is not None else None,
            generation=each.header.generation or None,
            expected=kind is FaultKind.TORN,
        )

    def _is_live(self, chain: Chain, each: FoundRecord) -> bool:
        """Whether this record is what a live block is read from."""
        places = {
            (part_segment(part), part_position(part))
            for part in self._device.index.own_parts(each.header.generation)
        }
        return (chain.index, each.position) in places

    def _is_lost(self, each: FoundRecord) -> bool:
        """Whether this record would be of a live block, if a chain led to it."""
        generation = each.header.generation
        if each.meta is None or generation in self._device.index:
            return False
        if each.header.stamp == UNNAMED:
            return False  # who shared it is told of
        rows = self._drops.array("number") == np.uint64(generation)
        stamps = self._drops.array("stamp")[rows]
        return not len(stamps) or int(stamps.max()) < each.header.stamp

    def _count(self) -> None:
        """Count room as the daemon does."""
        space, report = self._device.space, self._device.report
        tables = Tables(
            self._device.engine,
            Health(self._device.path),
            space,
            Placer(space, self._device.found.uuid),
            self._device.found.uuid,
            self._policy,
        )
        tables.adopt(self._device.tables, {})
        closed = [each for each in space.segments if each.state is SegmentState.CLOSED]
        for each in closed:
            if each.live_bytes > max(0, each.used_bytes - SEGMENT_HEADER_BYTES):
                what = f"{each.live_bytes} bytes of segment {each.index} would count as live, "
                what += f"more than the {each.used_bytes} that are written"
                self._device.tell(FaultKind.SPACE, what, self._device.offset(each.index))
        report.segments = len(space.segments)
        report.free_segments = len(space.free)
        report.table_segments = space.table_count
        report.capacity_bytes = space.capacity_bytes

    def count_live(self) -> None:
        """Put down what is live, once all that is there twice was dropped."""
        space, report = self._device.space, self._device.report
        closed = [each for each in space.segments if each.state is SegmentState.CLOSED]
        used = sum(max(0, each.used_bytes - SEGMENT_HEADER_BYTES) for each in closed)
        report.blocks = len(self._device.index)
        report.aliases = len(self._device.index.sharing)
        report.saved_bytes = self._device.index.saved_bytes
        report.live_bytes = space.live_bytes
        report.dead_bytes = max(0, used - space.live_bytes)
        report.room_bytes = space.room_bytes


def _key_of(metas: Table, generation: int) -> bytes | None:
    rows = np.flatnonzero(metas.array("generation") == np.uint64(generation))
    return metas.ragged("key").row(int(rows[0])) if len(rows) else None
