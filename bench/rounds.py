"""Every measure in every place, round by round, so that noise meets all of them alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.coldmeasures import COLD, ColdMeasure
from bench.fio import Fio
from bench.measures import WARM, Measure, Workload, prepare
from bench.places import FIO, Place
from bench.samples import Sample

CLIENTS = (1, 4)  # of the cold measures; for fio this is the depth


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured where. `clients` is 1 for everything that is not about the medium."""

    measure: str
    clients: int
    place: str


@dataclass(slots=True)
class Results:
    """Samples of each row, one a round and in that order."""

    samples: dict[Row, list[Sample]] = field(default_factory=dict)

    def add(self, row: Row, sample: Sample) -> None:
        self.samples.setdefault(row, []).append(sample)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    warm: tuple[Measure, ...]
    cold: tuple[ColdMeasure, ...]
    rounds: int


def chosen(only: Iterable[str]) -> tuple[tuple[Measure, ...], tuple[ColdMeasure, ...]]:
    """The measures whose names begin with one of `only`; all of them where it is empty."""
    starts = tuple(only)
    if not starts:
        return WARM, COLD
    unknown = [start for start in starts if not any(n.startswith(start) for n in names())]
    if unknown:
        raise ValueError(f"no measure begins with {unknown[0]!r}; there are {', '.join(names())}")
    return (
        tuple(measure for measure in WARM if measure.name.startswith(starts)),
        tuple(measure for measure in COLD if measure.name.startswith(starts)),
    )


def names() -> list[str]:
    """All measures, by the names that `--only` takes."""
    return [measure.name for measure in (*WARM, *COLD)]


def run(
    plan: Plan,
    places: Sequence[Place],
    fio: Fio | None,
    work: Workload,
    progress: Callable[[str], None],
) -> Results:
    """All rounds; in each, a measure runs in one place right after the other: A B C, B C A, …

    The first place moves up by one every round. Whoever is first after a measure that freed much
    memory may get pages that the machine has never touched, and pays for them.
    """
    results = Results()
    for place in places:
        prepare(place, work)
    for number in range(1, plan.rounds + 1):
        for measure in plan.warm:
            progress(f"round {number} of {plan.rounds}: {measure.name}")
            for place in places:
                results.add(Row(measure.name, 1, place.name), measure.run(place, work))
        for cold in plan.cold:
            for clients in CLIENTS:
                progress(f"round {number} of {plan.rounds}: {cold.name}, {clients} at once")
                _cold(cold, clients, places, fio, work, results)
        places = [*places[1:], places[0]]
    return results


def _cold(
    measure: ColdMeasure,
    clients: int,
    places: Sequence[Place],
    fio: Fio | None,
    work: Workload,
    results: Results,
) -> None:
    for place in places:
        # What has no medium cannot be cold.
        if place.medium:
            row = Row(measure.name, clients, place.name)
            results.add(row, measure.run(place, work, clients))
    if fio is not None:
        sample = fio.run(
            measure.direction,
            bytes=work.size * work.blocks,
            depth=clients,
            synced=measure.synced,
        )
        results.add(Row(measure.name, clients, FIO), sample)
