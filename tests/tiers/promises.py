"""What a cold tier has promised at each moment of a trace, and what it may show after a cut.

A thing (a block by its generation, a directory by its inode) has versions: its attributes, or None
where it is not there. From the moment it is said, a version may be found after a cut; from the end
of a sync on, none that came before the version of the sync's beginning may be.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ctxfs.core.meta import BlockMeta, DirectoryMeta

Meta = TypeVar("Meta", BlockMeta, DirectoryMeta)


@dataclass(slots=True)
class History(Generic[Meta]):
    """`versions`: since when each may be found. `floors`: since when which is the earliest."""

    versions: list[tuple[int, Meta | None]]
    floors: list[tuple[int, int]] = field(default_factory=list)
    busy: int = 0  # puts on their way: a sync that begins now promises nothing of it

    @property
    def newest(self) -> Meta | None:
        return self.versions[-1][1]

    def allowed(self, at: int) -> list[Meta | None]:
        """What may be found after a cut at this moment."""
        first = max((floor for since, floor in self.floors if since <= at), default=0)
        return [
            version
            for number, (since, version) in enumerate(self.versions)
            if number >= first and since <= at
        ] or [None]


class Histories(Generic[Meta]):
    """All things of one kind."""

    def __init__(self, found: Iterable[tuple[int, Meta]] = ()) -> None:
        """`found` after a recovery: it is kept from now on."""
        self._histories: dict[int, History[Meta]] = {
            number: History([(0, meta)]) for number, meta in found
        }

    def say(self, number: int, version: Meta | None, now: int) -> None:
        self.of(number).versions.append((now, version))

    def of(self, number: int) -> History[Meta]:
        return self._histories.setdefault(number, History([(0, None)]))

    def newest(self) -> dict[int, Meta]:
        """What is there now, by number."""
        return {
            number: history.newest
            for number, history in self._histories.items()
            if history.newest is not None
        }

    def gone(self) -> list[int]:
        """What was there once, and is not there now."""
        return [
            number
            for number, history in self._histories.items()
            if history.newest is None and not history.busy
        ]

    def to_be_kept(self, only: int | None = None) -> dict[int, int]:
        """When a sync begins: which version of each it will promise."""
        return {
            number: len(history.versions) - 1
            for number, history in self._histories.items()
            if not history.busy and only in (None, number)
        }

    def keep(self, promised: dict[int, int], now: int) -> None:
        """The sync has returned."""
        for number, version in promised.items():
            self._histories[number].floors.append((now, version))

    def kept(self, at: int) -> set[int]:
        """What must be found after a cut at this moment."""
        return {
            number for number, history in self._histories.items() if None not in history.allowed(at)
        }

    def check(self, found: dict[int, Meta], at: int) -> None:
        """Raise AssertionError where this must not be what is found after a cut at `at`."""
        unknown = set(found) - set(self._histories)
        assert not unknown, f"never heard of {unknown}"
        for number, history in self._histories.items():
            allowed = history.allowed(at)
            version = found.get(number)
            assert version in allowed, f"{number}: found {version}, allowed {allowed}"

    def ever(self, number: int) -> list[Meta | None]:
        """All versions there ever were."""
        return [version for _, version in self._histories[number].versions]

    def __contains__(self, number: int) -> bool:
        return number in self._histories
