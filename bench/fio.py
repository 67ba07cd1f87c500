"""`fio` beside us: the same bytes in the same pieces on the same device, with nothing above it."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.samples import Sample

ENGINES = ("io_uring", "libaio")  # containers often refuse the first


class FioFailed(Exception):
    """fio is missing, or did not do what it was asked; the text says which."""


@dataclass(frozen=True, slots=True)
class Fio:
    """One file of `file_bytes`, laid out once, then read and written over."""

    file: Path
    file_bytes: int
    size: int
    engine: str

    def run(
        self, direction: Literal["read", "write"], *, bytes: int, depth: int, synced: bool = False
    ) -> Sample:
        """Move `bytes` in pieces of one block, `depth` of them under way at once.

        `synced`: each is followed by an `fsync`, so there is a job for each that is under way.
        """
        jobs = depth if synced else 1
        report = _fio(
            f"--filename={self.file}",
            f"--rw={direction}",
            f"--bs={self.size}",
            f"--size={self.file_bytes // jobs // self.size * self.size}",
            f"--offset_increment={self.file_bytes // jobs // self.size * self.size}",
            f"--numjobs={jobs}",
            "--group_reporting",
            f"--io_size={bytes // jobs}",
            f"--ioengine={self.engine}",
            f"--iodepth={depth // jobs}",
            f"--fsync={int(synced)}",
        )
        result = report["jobs"][0][direction]
        times = result["clat_ns"]["percentile"]
        return Sample(
            operations=result["total_ios"],
            bytes=result["io_bytes"],
            seconds=result["io_bytes"] / result["bw_bytes"],
            p50_us=times["50.000000"] / 1e3,
            p99_us=times["99.000000"] / 1e3,
            p999_us=times["99.900000"] / 1e3,
        )


def lay_out(folder: Path, *, file_bytes: int, size: int) -> Fio:
    """Write the whole file once, so that later writes find their blocks. Raises FioFailed."""
    if shutil.which("fio") is None:
        raise FioFailed("fio is not installed (apt install fio): its columns stay empty")
    whole = max(size, file_bytes - file_bytes % size)
    said: list[str] = []
    for engine in ENGINES:
        fio = Fio(folder / "fio", whole, size, engine)
        try:
            fio.run("write", bytes=whole, depth=4)
        except FioFailed as error:
            said.append(str(error))
        else:
            return fio
    raise FioFailed("; ".join(said))


def write_whole(file: Path, file_bytes: int) -> None:
    """Zeros, on the medium: the first write to what is merely reserved takes twice as long."""
    piece = bytes(min(file_bytes, 1 << 20))
    with file.open("wb", buffering=0) as out:
        for at in range(0, file_bytes, len(piece)):
            out.write(piece[: file_bytes - at])
        os.fsync(out.fileno())


def _fio(*options: str) -> dict[str, Any]:
    command = ["fio", "--name=bench", "--direct=1", "--output-format=json", *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr or answer.stdout).strip().splitlines()[-1:]
        raise FioFailed(f"fio ended with {answer.returncode}: {' '.join(last)}")
    # Warnings come before the report, on the same stream.
    report: dict[str, Any] = json.loads(answer.stdout[answer.stdout.index("{") :])
    return report
