"""Run these tests on the lab's kernel: `make test-lab`.

    python -m tests.lab LAB [PYTEST ARGUMENTS]

LAB is the program that boots that kernel and runs a command there. Where it is missing nothing is
tested, and that is said. Exits as pytest does.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 3600


def main(program: str, *arguments: str) -> int:
    """Return the exit status."""
    lab = Path(program)
    if not os.access(lab, os.X_OK):
        sys.stdout.write(f"tests/lab: skipped, there is no lab at {lab} (make test-lab LAB=...)\n")
        return 0
    command: list[str | Path] = [lab.resolve(), "run", "-v", "--timeout", str(DEADLINE_SECONDS)]
    # The drives are made by the tests. Nothing is written but in that kernel's memory.
    command += ["--nvme", "0", "--env", f"PYTHONPATH={ROOT}", "--", sys.executable, "-m", "pytest"]
    command += [*arguments, "tests/lab"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
