"""Samples to medians, ratios and tables."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.places import IPERF, LOCAL, MOONCAKE, OURS, REDIS, TMPFS
from bench.rounds import Results, Row
from bench.samples import Sample
from bench.targets import TARGETS, Target


@dataclass(frozen=True, slots=True)
class Middle:
    """The median over the rounds, and the lowest and highest of them."""

    median: float
    low: float
    high: float


RIVALS = (
    TMPFS,
    LOCAL,
    IPERF,
    REDIS,
    MOONCAKE,
)  # what the figures of all places are shown as multiples of


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target, and what was measured against it."""

    target: Target
    place: str
    clients: int
    value: Middle
    ours: float  # rate, per second: bytes or operations
    theirs: float | None

    @property
    def word(self) -> str:
        if self.target.reached(self.value.median, self.target.aim):
            return "aim"
        return "ok" if self.target.reached(self.value.median, self.target.must) else "short"


def middle(values: list[float]) -> Middle:
    return Middle(statistics.median(values), min(values), max(values))


def verdicts(results: Results) -> list[Verdict]:
    """Every target for which there is something to compare."""
    found = []
    for target in TARGETS:
        for row, ours in results.samples.items():
            if row.measure != target.measure or row.place not in OURS:
                continue
            theirs = results.samples.get(Row(row.measure, row.clients, target.over))
            if target.over and theirs is None:
                continue
            value = middle(_values(target, ours, theirs or []))
            rival = _rate(theirs) if theirs else None
            found.append(Verdict(target, row.place, row.clients, value, _rate(ours), rival))
    return found


def _values(target: Target, ours: list[Sample], theirs: list[Sample]) -> list[float]:
    """A ratio is taken within each round, whose parts ran next to each other."""
    if target.figure == "p50_us":
        return [sample.p50_us for sample in ours if sample.p50_us is not None]
    if target.figure == "per_second":
        return [sample.rate for sample in ours]
    return ratios(ours, theirs)


def ratios(ours: list[Sample], theirs: list[Sample]) -> list[float]:
    """Our rate over theirs, round by round."""
    return [mine.rate / other.rate for mine, other in zip(ours, theirs, strict=True)]


def _rate(samples: list[Sample]) -> float:
    return statistics.median(sample.rate for sample in samples)


def print_verdicts(found: list[Verdict], out: Console) -> None:
    """The table of ratios, with what must be reached and what is aimed at."""
    table = Table(
        title="Against what must be reached",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    headings = ("what", "where", "at once", "rate", "against", "value", "spread", "must", "aim", "")
    for heading in headings:
        left = heading in ("what", "where", "against", "")
        table.add_column(heading, justify="left" if left else "right")
    for verdict in found:
        target = verdict.target
        sign = "≤" if target.figure == "p50_us" else "≥"
        is_bytes = target.figure == "ratio"
        against = target.over
        if verdict.theirs is not None:
            against = f"{against} {show_rate(verdict.theirs, is_bytes=is_bytes)}"
        table.add_row(
            target.measure,
            verdict.place,
            str(verdict.clients),
            show_rate(verdict.ours, is_bytes=is_bytes),
            against,
            _show(target, verdict.value.median),
            f"{_show(target, verdict.value.low)} - {_show(target, verdict.value.high)}",
            f"{sign} {_show(target, target.must)}",
            f"{sign} {_show(target, target.aim)}",
            verdict.word,
        )
    out.print(table)


def _show(target: Target, value: float) -> str:
    if target.figure == "ratio":
        return f"{value:.2f}"
    return f"{value:.0f} us" if target.figure == "p50_us" else f"{value / 1e3:,.0f} k/s"


def show_rate(rate: float, *, is_bytes: bool) -> str:
    return f"{rate / 1e9:.2f} GB/s" if is_bytes else f"{rate / 1e3:,.0f} k/s"


def print_figures(results: Results, out: Console) -> None:
    """The raw figures of every place, one line each."""
    table = Table(
        title="Figures (median of the rounds)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    percentiles = ("p50 us", "p99 us", "p99.9 us")
    rivals = [each for each in RIVALS if any(row.place == each for row in results.samples)]
    against = tuple(f"/ {rival}" for rival in rivals)
    for heading in ("what", "at once", "where", "rate", "spread", *percentiles, *against):
        left = heading in ("what", "where")
        table.add_column(heading, justify="left" if left else "right")
    last = None
    for row, samples in sorted(results.samples.items(), key=lambda item: _order(results, item[0])):
        group = (row.measure, row.clients)
        if last not in (None, group):
            table.add_section()
        last = group
        line = figures(samples)
        is_bytes = bool(samples[0].bytes)
        table.add_row(
            row.measure,
            str(row.clients),
            row.place,
            show_rate(line["rate"]["median"], is_bytes=is_bytes),
            f"{100 * (line['rate']['high'] - line['rate']['low']) / line['rate']['median']:.0f} %",
            *(_median(line[name]) for name in ("p50_us", "p99_us", "p999_us")),
            *(_multiple(results, row, rival) for rival in rivals),
        )
    out.print(table)


def _order(results: Results, row: Row) -> int:
    """Places of one measure next to each other, measures in the order they ran."""
    groups = list(dict.fromkeys((each.measure, each.clients) for each in results.samples))
    return groups.index((row.measure, row.clients))


def _median(value: dict[str, float] | None) -> str:
    return "" if value is None else microseconds(value["median"])


def microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _multiple(results: Results, row: Row, rival: str) -> str:
    found = against_rivals(results, row).get(rival)
    return "" if found is None else f"{found.median:.2f}"


def against_rivals(results: Results, row: Row) -> dict[str, Middle]:
    """The rate of `row` over that of each rival it was measured beside, by the rival's place."""
    beside = {
        rival: results.samples.get(Row(row.measure, row.clients, rival))
        for rival in RIVALS
        if rival != row.place
    }
    return {
        rival: middle(ratios(results.samples[row], theirs))
        for rival, theirs in beside.items()
        if theirs is not None
    }


def figures(samples: list[Sample]) -> dict[str, Any]:
    """Medians and extremes over the rounds of one row."""
    found: dict[str, Any] = {"rate": asdict(middle([sample.rate for sample in samples]))}
    for name in ("p50_us", "p99_us", "p999_us"):
        values = [value for each in samples if (value := getattr(each, name)) is not None]
        found[name] = asdict(middle(values)) if values else None
    return found


def as_json(results: Results) -> dict[str, Any]:
    """Everything, with the figures of every round."""
    return {
        "rows": [
            {
                **asdict(row),
                **figures(samples),
                "ratios": {
                    rival: asdict(found) for rival, found in against_rivals(results, row).items()
                },
                "unit": "bytes/s" if samples[0].bytes else "operations/s",
                "rounds": [asdict(sample) for sample in samples],
            }
            for row, samples in results.samples.items()
        ],
        "verdicts": [{**asdict(verdict), "word": verdict.word} for verdict in verdicts(results)],
    }
