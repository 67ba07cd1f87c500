"""The steps of the demo. Each says in plain words what it does, and keeps what it took."""

import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.daemon import Daemon, program
from demo.blocks import TOKENS, Block, Shelf
from demo.documents import DOCUMENTS, SHARED_PREFIX
from demo.prefill import Prefill
from demo.transformer import Transformer
from demo.wordpiece import Tokenizer

TTL = "1h"
EXPIRY_SECONDS_MAX = 15.0
POLL_SECONDS = 0.02
MIB = 2**20


class DemoFailed(Exception):
    """A step did not find what it must find."""


@dataclass(frozen=True, slots=True)
class Took:
    """One line of the summary. `blocks` and `bytes` are 0 where they mean nothing."""

    what: str
    blocks: int
    bytes: int
    seconds: float


class Tour:
    """All steps over one shelf. `daemon` is None where the mount belongs to somebody else."""

    def __init__(self, shelf: Shelf, scratch: Path, daemon: Daemon | None, out: Console) -> None:
        self._shelf = shelf
        self._scratch = scratch
        self._daemon = daemon
        self._out = out
        self._took: list[Took] = []
        self._texts: dict[str, list[Block]] = {}
        self._prefill: Prefill | None = None

    def write(self, model: Transformer, tokenizer: Tokenizer) -> None:
        """Prefill all documents; blocks that an earlier one left are found and not computed."""
        self._say(
            f"Reading {len(DOCUMENTS)} documents that begin alike, in blocks of {TOKENS} tokens. "
            "For each block: is it in the mount? Then map it. If not, compute K and V and write "
            f"them, with a TTL of {TTL} and the block before as parent."
        )
        copies = self._scratch / "copies"
        copies.mkdir()
        prefill = self._prefill = Prefill(model, self._shelf, copies, ttl=TTL)
        for title, text in DOCUMENTS.items():
            tokens = _tokens(model, tokenizer, SHARED_PREFIX + text)
            done = prefill.run(tokens)
            self._texts[title] = [block for block, _ in done]
            marks = " ".join("hit" if hit else "new" for _, hit in done)
            self._out.print(f"  {title:<13} {len(tokens):>4} tokens   {marks}")
        self._out.print("  The same document once more, as when its reader asks a second question:")
        title, blocks = next(iter(self._texts.items()))
        before = time.perf_counter()
        done = prefill.run([token for block in blocks for token in block.tokens])
        again = time.perf_counter() - before
        hits = sum(hit for _, hit in done)
        self._out.print(f"  {title:<13} {hits} of {len(done)} blocks hit, {again * 1e3:.1f} ms")
        if hits != len(done):
            raise DemoFailed("a block that was just written was not found")
        ledger = prefill.ledger
        written = (ledger.misses, ledger.bytes_written)
        self._took += [
            Took("compute K and V", *written, ledger.seconds_computing),
            Took("write blocks", *written, ledger.seconds_writing),
            # Mapping moves no bytes, so it has no rate.
            Took("map blocks that hit", ledger.hits, 0, ledger.seconds_mapping),
        ]

    def force_cold(self) -> None:
        """Move every block to the cold tier by attribute, and see that it says so."""
        self._say("Moving every block to the cold tier: setfattr -n user.ctx.tier -v cold KEY")
        before = time.perf_counter()
        for key in self._keys():
            self._shelf.describe(self._shelf.file(key), "tier", "cold")
        self._note("move to cold", time.perf_counter() - before)
        tiers = Counter(self._shelf.attribute(key, "tier") for key in self._keys())
        self._out.print("  user.ctx.tier now reads: " + _counts(tiers))
        if set(tiers) != {"cold"}:
            raise DemoFailed("not every block went to the cold tier")

    def restart(self) -> None:
        """End the daemon and start it again on the same state and cold file."""
        if self._daemon is None:
            return
        self._say("Ending the daemon (SIGTERM), and starting it again on the same cold file.")
        before = time.perf_counter()
        self._daemon.stop()
        stopped = time.perf_counter()
        self._daemon.start()
        started = time.perf_counter()
        self._took += [
            Took("stop the daemon", 0, 0, stopped - before),
            Took("start it until the mount answers", 0, 0, started - stopped),
        ]
        missing = [key for key in self._keys() if not self._shelf.holds(key)]
        if missing:
            raise DemoFailed(f"{len(missing)} blocks did not survive the restart")
        self._out.print(f"  All {len(self._keys())} blocks are there.")

    def read_back(self) -> None:
        """Let another process map all blocks and compare them bit for bit."""
        self._say(
            "Another process maps every block and compares it with its SHA-256 and, number by "
            "number, with a copy kept outside the mount."
        )
        assert self._prefill is not None
        expected = [entry.as_json() for entry in self._prefill.ledger.expected.values()]
        manifest = self._scratch / "manifest.json"
        manifest.write_text(json.dumps({"shelf": str(self._shelf.path), "blocks": expected}))
        command = [sys.executable, "-m", "demo.check", str(manifest)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if not answer.stdout:
            raise DemoFailed("the other process did not come to an end")
        findings = json.loads(answer.stdout)
        self._took.append(
            Took("map and touch all bytes", *(findings[k] for k in ("blocks", "bytes", "seconds")))
        )
        for line in findings["wrong"]:
            self._out.print(f"  WRONG {line}", markup=False)
        if answer.returncode or findings["blocks"] != len(expected):
            raise DemoFailed(f"{len(findings['wrong'])} blocks are not what was written")
        self._out.print(f"  {findings['blocks']} blocks are equal, bit for bit.")

    def show(self) -> None:
        """What an operator sees."""
        self._say("What an operator sees:")
        last = str(self._shelf.file(self._keys()[-1]))
        for command in (
            [str(program("ctx")), "ls", "-l", str(self._shelf.path)],
            [str(program("ctx")), "stat", last],
            ["getfattr", "-d", "--absolute-names", last],
        ):
            self._run(command)

    def expire(self) -> None:
        """Give the last document's own blocks a second to live; the others must stay."""
        *others, last = self._texts.values()
        shared = {block.key for blocks in others for block in blocks}
        going = [block.key for block in last if block.key not in shared]
        self._say(f"Giving the {len(going)} blocks of the last document 1 s to live.")
        before = time.perf_counter()
        for key in going:
            self._shelf.describe(self._shelf.file(key), "ttl", "1s")
        while left := [key for key in going if self._shelf.holds(key)]:
            if time.perf_counter() - before > EXPIRY_SECONDS_MAX:
                raise DemoFailed(f"{len(left)} blocks outlived their TTL of 1 s")
            time.sleep(POLL_SECONDS)
        self._took.append(Took("expire (TTL 1 s)", len(going), 0, time.perf_counter() - before))
        if not all(self._shelf.holds(key) for key in shared):
            raise DemoFailed("a block that had an hour to live is gone")
        self._out.print(f"  They are gone; the other {len(shared)} blocks are still there.")

    def summary(self) -> None:
        """Bytes, hits and times of everything above."""
        table = Table(title="Summary", title_justify="left")
        for heading in ("step", "blocks", "MiB", "seconds", "GB/s"):
            table.add_column(heading, justify="left" if heading == "step" else "right")
        for took in self._took:
            table.add_row(
                took.what,
                f"{took.blocks or ''}",
                f"{took.bytes / MIB:.1f}" if took.bytes else "",
                f"{took.seconds:.3f}",
                f"{took.bytes / took.seconds / 1e9:.2f}" if took.bytes else "",
            )
        self._out.print()
        self._out.print(table)
        if self._prefill is not None:
            ledger = self._prefill.ledger
            asked = ledger.hits + ledger.misses
            self._out.print(
                f"{asked} blocks were asked for: {ledger.hits} hits, {ledger.misses} misses. "
                f"{ledger.bytes_written / MIB:.1f} MiB were written once, "
                f"{ledger.bytes_read / MIB:.1f} MiB need not be computed again."
            )

    def _keys(self) -> list[str]:
        assert self._prefill is not None
        return list(self._prefill.ledger.expected)

    def _note(self, what: str, seconds: float) -> None:
        assert self._prefill is not None
        ledger = self._prefill.ledger
        self._took.append(Took(what, ledger.misses, ledger.bytes_written, seconds))

    def _run(self, command: list[str]) -> None:
        self._out.print(f"\n  $ {shlex.join([Path(command[0]).name, *command[1:]])}", markup=False)
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        print(answer.stdout + answer.stderr, end="")
        if answer.returncode:
            raise DemoFailed(f"{command[0]} ended with {answer.returncode}")

    def _say(self, text: str) -> None:
        self._out.print(f"\n[bold]→ {text}[/bold]")


def _tokens(model: Transformer, tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.start(), *tokenizer.ids(text)][: model.positions_max]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{value} ({number} blocks)" for value, number in counter.items())
