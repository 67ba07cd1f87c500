"""Engines on real devices."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ctxfs.device.blockfile import OpenedDevice
from tests.device.places import loop_device, opened, why_no_loop_devices, why_no_uring


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A loop device of 64 MiB."""
    if why := why_no_loop_devices():
        pytest.skip(why)
    with loop_device(tmp_path / "backing") as device:
        yield device


@pytest.fixture(params=["io_uring", "threads"])
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "io_uring" and (why := why_no_uring()):
        pytest.skip(why)
    return name


@pytest.fixture(params=["file", "loop"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where a device of 64 MiB is, or can be made."""
    if request.param == "file":
        return tmp_path / "device"
    found: Path = request.getfixturevalue("loop")
    return found


@pytest.fixture
async def device(place: Path, engine_name: str) -> AsyncIterator[OpenedDevice]:
    async with opened(place, engine=engine_name) as found:
        yield found
