"""The other process: maps blocks and compares them, bit for bit. `python -m demo.check FILE`.

FILE is JSON: {"shelf": directory, "blocks": [{"key", "sha256", "copy", "shape"}, …]}. What was
found goes to standard output, as JSON too. Exit code 1 when any block is missing or differs.
"""

import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from demo.blocks import map_tensor


@dataclass(slots=True)
class Findings:
    """`seconds`: opening, mapping and touching every byte; the comparison comes after."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def check(shelf: Path, blocks: list[dict[str, Any]]) -> Findings:
    """Compare every block with its digest and with the copy kept outside the mount."""
    findings = Findings()
    for block in blocks:
        before = time.perf_counter()
        try:
            kv = map_tensor(shelf / block["key"], tuple(block["shape"]))
        except (OSError, ValueError) as error:
            findings.wrong.append(f"{block['key']}: {error}")
            continue
        kv.reshape(-1).view(np.uint64).sum()
        findings.seconds += time.perf_counter() - before
        findings.blocks += 1
        findings.bytes += kv.nbytes
        if hashlib.sha256(kv.data.cast("B")).hexdigest() != block["sha256"]:
            findings.wrong.append(f"{block['key']}: its digest is another one")
        elif not np.array_equal(kv, np.load(block["copy"])):
            findings.wrong.append(f"{block['key']}: it differs from the copy kept outside")
    return findings


def main(arguments: list[str]) -> int:
    manifest = json.loads(Path(arguments[0]).read_text())
    findings = check(Path(manifest["shelf"]), manifest["blocks"])
    print(json.dumps(asdict(findings)))
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
