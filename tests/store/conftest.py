"""Fixtures of the store's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.core import blocktable
from tests.fakes import MemoryEngine
from tests.store.world import MIB, World

# Bytes and waiting take their time there, and few blocks are about.
AWAKE_ONLY = {"tests.store.test_lending", "tests.store.test_warm_store"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test a second time with no block awake that nobody uses."""
    if "awake_max" not in metafunc.fixturenames:
        return
    counts = {"awake": blocktable.AWAKE_MAX, "folded": 0}
    if metafunc.module.__name__ in AWAKE_ONLY:
        del counts["folded"]
    metafunc.parametrize("awake_max", counts.values(), ids=counts, indirect=True)


@pytest.fixture(autouse=True)
def awake_max(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many blocks that nobody uses are objects; all that is true must be so without any."""
    count: int = request.param
    monkeypatch.setattr(blocktable, "AWAKE_MAX", count)
    return count


@pytest.fixture
def path() -> Iterator[Path]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def world(path: Path) -> World:
    """Hot 16 MiB over 64 MiB of cold."""
    return World(path, MemoryEngine(64 * MIB))


@pytest.fixture
def hot_world(path: Path) -> World:
    """Hot 16 MiB alone."""
    return World(path, None)
