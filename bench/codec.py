"""Size and speed of the codec on real K and V, beside plain zstd and, where installed, zipnn."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.rivals import Rival, rivals
from ctxfs.units import MIB

ROOT = Path(__file__).parents[1]


@dataclass(slots=True)
class Found:
    """One way on the blocks of one dtype. One value for each round.

    `encode`, `decode`: GB of uncompressed bytes a second by the clock. `…_cpu`: and by the time
    that processors worked for us, which a busy machine changes less.
    """

    dtype: str
    way: str
    raw_bytes: int = 0
    encoded_bytes: int = 0
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    encode_cpu: list[float] = field(default_factory=list)
    decode_cpu: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.encoded_bytes


def codec(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Every way, on every dtype, side by side in each round."""
    with tempfile.TemporaryDirectory(prefix="ctxfs-bench-", dir=options.dir) as scratch:
        files = options.files or _made(Path(scratch), options.tokens, out)
        blocks: dict[str, list[bytes]] = {}
        for path in files:
            blocks.setdefault(path.suffix.removeprefix("."), []).append(path.read_bytes())
        facts = machine.facts(Path(scratch))
    found: list[Found] = []
    for dtype, contents in sorted(blocks.items()):
        total = sum(map(len, contents))
        out.print(f"{len(contents)} blocks of {dtype or 'no dtype'}, {total / MIB:.0f} MiB.")
        found += _side_by_side(dtype, contents, options)
    _print(found, out)
    rows = [{**asdict(each), "ratio": each.ratio} for each in found]
    return {"machine": facts, "rows": rows}


def _made(folder: Path, tokens: int, out: Console) -> list[Path]:
    out.print("Computing K and V with the demo's model.")
    command = [sys.executable, "-m", "demo.tensors", str(folder), "--tokens", str(tokens)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return sorted(folder.iterdir())


def _side_by_side(dtype: str, contents: list[bytes], options: argparse.Namespace) -> list[Found]:
    with rivals(dtype, max(map(len, contents)), options.threads) as ways:
        found = [Found(dtype, way.name) for way in ways]
        for round_number in range(options.rounds):
            for way, row in zip(ways, found, strict=True):
                _measure(way, row, contents, is_first=round_number == 0)
    return found


def _clocks() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([time.perf_counter_ns(), time.process_time_ns()])


def _measure(way: Rival, row: Found, contents: list[bytes], *, is_first: bool) -> None:
    encoding, decoding = np.zeros((2, 2))
    for content in contents:
        begun = _clocks()
        encoded = way.encode(content)
        between = _clocks()
        decoded = way.decode(encoded)
        decoding += _clocks() - between
        encoding += between - begun
        if decoded != content:
            raise ValueError(f"{row.way} gave back other bytes")
        if is_first:
            row.raw_bytes += len(content)
            row.encoded_bytes += len(encoded[0] if isinstance(encoded, tuple) else encoded)
    for rates, spent in (
        ((row.encode, row.encode_cpu), encoding),
        ((row.decode, row.decode_cpu), decoding),
    ):
        for rate, nanoseconds in zip(rates, spent, strict=True):
            rate.append(row.raw_bytes / float(nanoseconds))


def _print(found: list[Found], out: Console) -> None:
    title = "GB/s of uncompressed bytes: medians, by the clock and by processor time"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    names = ("dtype", "way", "ratio", "encode", "decode", "encode, CPU", "decode, CPU")
    for name in (*names, "encode, × zstd -1", "decode, ×"):
        table.add_column(name, justify="left" if name in ("dtype", "way") else "right")
    for row in found:
        rival = next(each for each in found if (each.dtype, each.way) == (row.dtype, "zstd -1"))
        mine = (row.encode, row.decode, row.encode_cpu, row.decode_cpu)
        figures = [statistics.median(each) for each in mine]
        figures += [
            statistics.median(ours / theirs for ours, theirs in zip(*pair, strict=True))
            for pair in (
                (row.encode_cpu, rival.encode_cpu),
                (row.decode_cpu, rival.decode_cpu),
            )
        ]
        table.add_row(row.dtype, row.way, f"{row.ratio:.3f}", *(f"{x:.2f}" for x in figures))
    out.print(table)
