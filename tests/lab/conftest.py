"""What runs in the lab alone: a throw-away kernel with NVMe drives (`make test-lab`)."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from ctxfs.device.blockfile import OpenedDevice
from tests.device.places import opened
from tests.lab.drives import Drive, drive, why_not

# The lab says so. Elsewhere nothing here is even collected.
if "LAB_RANK" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

KINDS = {  # how the drive is reached, and the size of its blocks in bytes
    "loop-512": ("loop", 512),
    "loop-4096": ("loop", 4096),
    "tcp-4096": ("tcp", 4096),
}


@pytest.fixture(params=KINDS)
def any_drive(request: pytest.FixtureRequest) -> Iterator[Drive]:
    """Drives of every kind, 64 MiB each."""
    transport, block_bytes = KINDS[request.param]
    if transport != "loop" and (why := why_not(transport)):
        pytest.skip(why)
    with drive(block_bytes, transport=transport) as made:
        yield made


@pytest.fixture
def one_drive() -> Iterator[Drive]:
    """A drive of 64 MiB with blocks of 512 bytes."""
    with drive() as made:
        yield made


@pytest.fixture
async def device(any_drive: Drive) -> AsyncIterator[OpenedDevice]:
    """What the tests of all engines (tests/device/test_engines.py) are run on."""
    async with opened(any_drive.command, None) as found:
        assert found.engine.name == "nvme"
        yield found
