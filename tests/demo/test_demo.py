"""`python -m demo` from the outside, with a mount and without one."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.daemon import NoFuse, check_fuse, mounts
from demo.transformer import ModelMissing, load

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_names_what_can_be_chosen() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    assert all(option in answer.stdout for option in ("--mount", "--hot", "--cold", "--keep"))


def test_on_a_plain_directory_blocks_are_written_compared_and_removed(tmp_path: Path) -> None:
    try:
        load()
    except ModelMissing as error:
        pytest.skip(str(error))
    answer = run("--mount", str(tmp_path), "--dir", str(tmp_path))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "19 blocks are equal, bit for bit" in answer.stdout
    assert "23 hits, 19 misses" in answer.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_missing_is_said_and_not_traced(tmp_path: Path) -> None:
    answer = run("--mount", str(tmp_path / "none"), "--dir", str(tmp_path))
    assert answer.returncode == 2
    assert "cannot go on" in answer.stdout
    assert "Traceback" not in answer.stderr


@pytest.mark.mount
def test_on_a_mount_of_its_own_every_step_succeeds_and_nothing_is_left(tmp_path: Path) -> None:
    try:
        check_fuse()
        load()
    except (NoFuse, ModelMissing) as error:
        pytest.skip(str(error))
    answer = run("--dir", str(tmp_path), "--cold", "256MiB")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "user.ctx.tier now reads: cold (19 blocks)" in answer.stdout
    assert "19 blocks are equal, bit for bit" in answer.stdout
    assert "the other 16 blocks are still there" in answer.stdout
    assert list(tmp_path.iterdir()) == []
    inside = str(tmp_path).encode() + b"/"
    assert [point for point, _ in mounts() if point.startswith(inside)] == []
