"""The storage code of real frameworks, unmodified, against the mount.

The scripts lie beside the checkout, in ../shared/clients, and most of them need a virtual
environment of several gigabytes that `setup.sh` there makes: CTXFS_CLIENTS_VENV names it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.harness import Daemon

CLIENTS = Path(__file__).resolve().parents[3] / "shared" / "clients"
VENV = os.environ.get("CTXFS_CLIENTS_VENV", "")
FRAMEWORKS = [
    "lmcache_fs_connector",
    "lmcache_l2_fs",
    "lmcache_local_disk",
    "lmcache_nixl_file",
    "nixl_posix",
    "sglang_hicache_file",
    "tensor_files",
    "vllm_example_connector",
    "vllm_fs_tier",
]

pytestmark = [
    pytest.mark.mount,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CLIENTS.is_dir(), reason="../shared/clients is not here"),
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse cannot be opened"
    ),
]


def run_client(python: str, name: str, base: Path) -> None:
    with Daemon(base, hot="256MiB", cold="1GiB") as daemon:
        done = subprocess.run(
            [python, f"{name}.py", str(daemon.mount), "--n", "3", "--rounds", "2", "--ops", "4"],
            cwd=CLIENTS,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout or done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["ok"]
        counters = daemon.stats()["counters"]
        assert (counters["corrupt"], counters["trouble"], counters["no_space"]) == (0, 0, 0)
        assert daemon.stop() == 0


def test_a_plain_program_puts_gets_replaces_and_removes(tmp_path: Path) -> None:
    run_client(sys.executable, "plain_posix", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.skipif(not VENV, reason="CTXFS_CLIENTS_VENV names no virtual environment")
def test_a_framework_uses_the_mount_unmodified(name: str, tmp_path: Path) -> None:
    run_client(f"{VENV}/bin/python", name, tmp_path)
