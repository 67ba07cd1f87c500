"""How answers look: escaped names, tables, JSON, progress. Nothing here knows what a block is."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxfs.units import DAY_NS, HOUR_NS, MINUTE_NS, SECOND_NS, format_duration, format_size

NS_PER_S = SECOND_NS
NS_PER_MS = 1_000_000
# From this length on, down to that unit.
PRECISION = (
    (DAY_NS, HOUR_NS),
    (HOUR_NS, MINUTE_NS),
    (SECOND_NS, SECOND_NS),
    (NS_PER_MS, NS_PER_MS),
)
GAP = "  "

# What a cell says decides its colour, so that tables carry plain words and nothing else.
STYLES = {
    "hot": "red",
    "warm": "yellow",
    "cold": "cyan",
    "ok": "green",
    "live": "green",
    "suspect": "yellow",
    "good": "green",
    "sealed": "green",
    "writing": "yellow",
    "warn": "yellow",
    "failing": "yellow",
    "draining": "yellow",
    "needs room": "bold red",
    "unreadable": "bold red",
    "drain failed": "bold red",
    "fail": "bold red",
    "corrupt": "bold red",
    "lost": "bold red",
}


def escape(name: str) -> str:
    """`name` fit for a terminal: what is not printable, and the backslash, as `\\xNN` bytes.

    `name` is as `os.fsdecode` gives it: bytes that are not UTF-8 are lone surrogates.
    """
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(_escape_character(character) for character in name)


def _escape_character(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def short_size(size_bytes: int | None) -> str:
    """A size as people read it, in one word, so that columns stay columns; `-` for None."""
    return "-" if size_bytes is None else format_size(size_bytes).replace(" ", "")


def short_duration(seconds: float | None, *, absent: str = "-") -> str:
    """A duration as people read it, cut to two units at most: `2d3h`, `5m10s`, `250ms`."""
    if seconds is None:
        return absent
    length_ns = int(seconds * NS_PER_S)
    for least_ns, unit_ns in PRECISION:
        if length_ns >= least_ns:
            return format_duration(length_ns - length_ns % unit_ns)
    return "0s"


def percent(part: float, whole: float) -> str:
    """`part` of `whole`, or `-` where there is no whole."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def is_terminal() -> bool:
    """True where a person is looking at standard output."""
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """One JSON document. Bytes that are not UTF-8 stay as `\\udcNN`, which loses nothing."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_json_line(value: Any) -> None:
    """One JSON document on a line of its own, flushed: somebody may be following."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def stream_json(values: Iterable[Any]) -> None:
    """A JSON list, written as the values come, so that a long one needs no memory."""
    separator = "[\n"
    for value in values:
        sys.stdout.write(separator + "  " + json.dumps(value))
        separator = ",\n"
    sys.stdout.write("[]\n" if separator == "[\n" else "\n]\n")


@dataclass(slots=True)
class Table:
    """Columns of text. A header that begins with `>` is aligned to the right.

    The last column is never padded or cut: names go there.
    """

    headers: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def lines(self, *, header: bool = True) -> list[str]:
        """Plain text, the same in a pipe, a file and a test."""
        names = [name.removeprefix(">") for name in self.headers]
        table = [names, *self.rows] if header else self.rows
        widths = [max((len(row[i]) for row in table), default=0) for i in range(len(names))]
        return [self._line(row, widths) for row in table]

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if self.headers[index].startswith(">"):
                cells.append(cell.rjust(width))
            else:
                cells.append(cell.ljust(width) if index + 1 < len(widths) else cell)
        return GAP.join(cells).rstrip()

    def renderable(self) -> Any:
        """The same for a terminal, as rich draws it."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for name in self.headers:
            right = name.startswith(">")
            drawn.add_column(
                name.removeprefix(">"), justify="right" if right else "left", overflow="fold"
            )
        for row in self.rows:
            drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        return drawn

    def print(self) -> None:
        """Drawn on a terminal, plain columns anywhere else."""
        if is_terminal():
            console().print(self.renderable())
        else:
            sys.stdout.writelines(line + "\n" for line in self.lines())


class OutputFailed(Exception):
    """Standard output takes no more. No OSError, so that nobody blames what is being read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class _Output(io.TextIOWrapper):
    # Not the raw file: a Ctrl-C would come between its write and the buffer's note of that, which
    # would then be written again.
    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputFailed(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputFailed(error) from error


def guard_output() -> None:
    """Have the process's own standard output raise OutputFailed, and write what it can."""
    own = sys.__stdout__
    if own is None or own is not sys.stdout:
        return  # closed, or somebody catches what is written
    sys.stdout = _Output(
        io.BufferedWriter(io.FileIO(own.fileno(), "wb", closefd=False)),
        encoding=own.encoding,
        # Whatever the terminal cannot write is shown by its number and ends nothing.
        errors="backslashreplace",
        line_buffering=own.isatty(),
    )


def console(*, stderr: bool = False) -> Any:
    """A rich console that takes text as it is: no markup, no guessed highlights."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def painter() -> Callable[[str, str], str]:
    """A function `(padded text, word) -> text`, coloured as `word` is where colours are wanted.

    For long listings: rich would cost more than asking the daemon does.
    """
    if not is_terminal() or console().color_system is None or "NO_COLOR" in os.environ:
        return lambda text, word: text
    from rich.color import ColorSystem
    from rich.style import Style

    styles = {word: Style.parse(style) for word, style in STYLES.items()}

    def paint(text: str, word: str) -> str:
        style = styles.get(word)
        return style.render(text, color_system=ColorSystem.STANDARD) if style else text

    return paint


@contextlib.contextmanager
def progress(what: str, total: int, *, sizes: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while a terminal is there; yields `advance(amount)`.

    `total` and amounts are bytes if `sizes`, else blocks. One step of one needs no bar.
    """
    if not sys.stderr.isatty() or total <= 1:
        yield lambda amount: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    done = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if sizes else (
        MofNCompleteColumn(),
    )  # fmt: skip
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *done,
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on standard error while a terminal is there."""
    if not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(what):
        yield
