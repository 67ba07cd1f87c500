"""Fixtures of the tests that mount. They need FUSE and say so where it is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import Daemon

CHANNEL = os.environ.get("CTXFS_TEST_CHANNEL")  # only through this one


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if CHANNEL is None:
        slow = [item for item in items if _is_slow_twice(item)]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)
    here = Path(__file__).parent
    missing = None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "/dev/fuse cannot be opened"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.mount)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


def _is_slow_twice(item: pytest.Item) -> bool:
    """Slow tests run through the direct channel alone."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("slow") is None:
        return False
    return hasattr(item, "callspec") and item.callspec.params.get("channel") == "pyfuse3"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that mounts through both channels."""
    if "channel" not in metafunc.fixturenames:
        return
    about = metafunc.definition.get_closest_marker("channel")
    both = ("direct", "pyfuse3") if CHANNEL is None else (CHANNEL,)
    metafunc.parametrize("channel", both if about is None else about.args, scope="module")


@pytest.fixture
def start(channel: str, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons with other settings than the usual; all are ended with the test."""
    with ExitStack() as stack:
        count = 0

        def start_daemon(**settings: Any) -> Daemon:
            nonlocal count
            count += 1
            base = tmp_path / f"daemon{count}"
            base.mkdir()
            return stack.enter_context(Daemon(base, **{"channel": channel, **settings}))

        yield start_daemon


@pytest.fixture
def hot_only(start: Callable[..., Daemon]) -> Daemon:
    """A daemon with 64 MiB of hot tier alone."""
    return start()


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    """A daemon with 64 MiB of hot tier over a cold file of 256 MiB."""
    return start(cold="256MiB")


@pytest.fixture(scope="module")
def shared(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with 256 MiB of hot tier alone, for all tests of a file."""
    base = tmp_path_factory.mktemp("shared")
    with Daemon(base, hot="256MiB", channel=channel) as one:
        yield one


@pytest.fixture
def place(shared: Daemon, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the shared mount for one test, which leaves the daemon alive."""
    path = shared.mount / f"{request.node.name[:100]}.{os.urandom(4).hex()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)
    assert "Traceback" not in shared.log(), shared.log()
