"""What ran the measurements: without it the figures mean nothing."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.daemon import mounts

DAEMON_FACTS = ("version", "channel", "blocks", "tiers", "counters", "memory")
PACKAGES = ("ctxfs", "trio", "pyfuse3", "liburing", "numpy")


def facts(local: Path) -> dict[str, Any]:
    """Kernel, processor, memory, load and versions; `local` is where the local files are."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "processor": _first_of("/proc/cpuinfo", "model name"),
        "processors": os.cpu_count(),
        "memory": _first_of("/proc/meminfo", "MemTotal"),
        "memory_available": _first_of("/proc/meminfo", "MemAvailable"),
        "load": os.getloadavg(),
        "user": os.geteuid(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "fio": _fio_version(),
        "local_file_system": file_system(local),
        "shmem_enabled": _text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    }


def daemon(mount_point: Path) -> dict[str, Any] | None:
    """What the daemon says of itself; None where there is none."""
    try:
        said: dict[str, Any] = json.loads((mount_point / ".ctx" / "stats").read_text())
    except (OSError, ValueError):
        return None
    return {key: value for key, value in said.items() if key in DAEMON_FACTS}


def file_system(path: Path) -> str:
    """The type of file system that `path` is on."""
    wanted = os.fsencode(path.resolve())
    best, kind = b"", "unknown"
    for point, found in mounts():
        inside = wanted == point or wanted.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def _first_of(path: str, label: str) -> str:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == label:
            return value.strip()
    return "unknown"


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fio_version() -> str | None:
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
