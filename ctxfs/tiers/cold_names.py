"""Names that blocks have left, while the medium may still show them there. Pure.

Where two live blocks have one key, a recovery drops the one with the lower stamp. So whoever takes
a name must not be on the medium before the block that left it is there under its new name, and that
one not before who had *its* new name, and so on: a tangle, which may go round. All of it is written
in one record, on each device that holds any of it: a note about a block that lies elsewhere is an
errand (see `ColdIndex.errands`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ctxfs.core.meta import BlockMeta, Put
from ctxfs.ondisk.record import header_bytes_for
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_requests import NoteRequest, note_request
from ctxfs.tiers.cold_space import FLOOR_WRITE


class LeftNames:
    """`describe`: what the store knows of a live generation now."""

    def __init__(self, describe: Callable[[int], BlockMeta | None]) -> None:
        self._describe = describe
        self._leavers: dict[bytes, set[int]] = {}  # by name
        self._names: dict[int, set[bytes]] = {}  # that a block has left
        # How often something was said of a leaver: it has settled where that is as it was before.
        self._said: dict[int, int] = {}
        self._bearers: dict[int, list[ColdIndex]] = {}  # of errands about it

    def leave(self, generation: int, name: bytes) -> None:
        """This block has, or is about to have, another name; the medium may not know it yet."""
        self._leavers.setdefault(name, set()).add(generation)
        self._names.setdefault(generation, set()).add(name)
        self.say(generation)

    def say(self, generation: int) -> None:
        """Its newest name has only now been noted."""
        if generation in self._names:
            self._said[generation] = self._said.get(generation, 0) + 1

    def bear(self, generation: int, index: ColdIndex) -> None:
        """A note about this leaver goes to a device on which it is not."""
        self._bearers.setdefault(generation, []).append(index)

    def leavers_in(self, index: ColdIndex) -> dict[int, int]:
        """Those that lie there: what a sync of it settles, unless more is said meanwhile."""
        return {each: said for each, said in self._said.items() if each in index}

    def settle(self, leavers: dict[int, int]) -> None:
        """All that was noted of these by then is on their own device's medium."""
        for generation, said in leavers.items():
            if self._said.get(generation) == said:
                self.forget(generation)

    def forget(self, generation: int) -> None:
        """The medium has its newest name, or it is gone."""
        self._said.pop(generation, None)
        for name in self._names.pop(generation, ()):
            self._leavers[name].discard(generation)
            if not self._leavers[name]:
                del self._leavers[name]
        for index in self._bearers.pop(generation, ()):
            index.end_errand(generation)

    def needed_before(self, meta: BlockMeta) -> list[BlockMeta]:
        """What must be on the medium no later than this block, which is not there yet."""
        (group,) = self.tangles([meta]) or [[]]
        return [each for each in group if each.generation != meta.generation]

    def tangles(self, metas: Iterable[BlockMeta]) -> list[list[BlockMeta]]:
        """Of these blocks those that take names others have left, with all that must not be on the
        medium later; together what has to do with each other."""
        groups: dict[int, dict[int, BlockMeta]] = {}  # by each generation in them
        if self._leavers:
            for meta in metas:
                if meta.generation not in groups and self._before(meta):
                    self._gather(meta, groups)
        distinct = {id(group): group for group in groups.values()}
        return [list(group.values()) for group in distinct.values()]

    def _gather(self, meta: BlockMeta, groups: dict[int, dict[int, BlockMeta]]) -> None:
        """Add this, and all that must come before it, to the groups that are met on the way, which
        become one. Those that must come first stand first, unless it goes round."""
        found, order, met = [meta], dict[int, BlockMeta](), list[dict[int, BlockMeta]]()
        while found:
            each = found.pop()
            if each.generation in groups:
                met.append(groups[each.generation])
            elif each.generation not in order:
                order[each.generation] = each
                found += self._before(each)
        group = max(met, key=len, default={})
        for other in met:
            if other is not group:
                group |= other
        group |= dict(reversed(order.items()))
        others = [generation for other in met if other is not group for generation in other]
        groups |= dict.fromkeys([*others, *order], group)

    def _before(self, meta: BlockMeta) -> list[BlockMeta]:
        leavers = self._leavers.get(meta.key, ())
        others = [self._describe(each) for each in leavers if each != meta.generation]
        return [each for each in others if each is not None and each.key != meta.key]


def tangle_requests(
    names: LeftNames,
    groups: Iterable[Sequence[BlockMeta]],
    index: ColdIndex,
    floor: int = FLOOR_WRITE,
) -> list[tuple[NoteRequest, bool]]:
    """What to write of each group, and whether it must be flushed before the next request.

    A group is one record, unless it is longer than a record can be.
    """
    requests: list[tuple[NoteRequest, bool]] = []
    for group in groups:
        for meta in group:
            if index.add_errand(meta):
                names.bear(meta.generation, index)
        pieces = list(_pieces(note_request([Put(meta) for meta in group], floor), index))
        requests += [(piece, piece is not pieces[-1]) for piece in pieces]
    return requests


def _pieces(request: NoteRequest, index: ColdIndex) -> Iterator[NoteRequest]:
    """Cut into requests of one record each."""
    start = length = 0
    for at, frame in enumerate([*request.frames, b""]):
        length += len(frame)
        is_last = at == len(request.frames)
        if is_last or header_bytes_for(length) > index.space.geometry.header_bytes_max:
            yield NoteRequest(
                entries=request.entries[start:at],
                frames=request.frames[start:at],
                floor=request.floor,
                whole=True,
            )
            start, length = at, len(frame)
