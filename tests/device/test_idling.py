"""PM QoS: the real device where there is one, a file that looks like it elsewhere."""

import os
import struct
from pathlib import Path

import pytest

from ctxfs.device import idling
from ctxfs.device.idling import Idling


def open_descriptors_of(device: Path) -> int:
    links = (os.readlink(each.path) for each in os.scandir("/proc/self/fd") if each.is_symlink())
    return sum(link == str(device) for link in list(links))


def test_the_limit_holds_while_its_descriptor_is_open(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    limit = Idling(device)
    limit.limit()
    limit.limit()
    held = limit.is_limited, open_descriptors_of(device)
    assert held == (True, 1)
    (asked_us,) = struct.unpack("=i", device.read_bytes())
    assert asked_us == idling.limit_us(idling.driver())
    limit.free()
    limit.free()
    held = limit.is_limited, open_descriptors_of(device)
    assert held == (False, 0)


@pytest.mark.skipif(
    not os.access(idling.DEVICE, os.W_OK), reason="/dev/cpu_dma_latency is not ours to write"
)
def test_the_kernel_takes_the_limit() -> None:
    limit = Idling()
    limit.limit()
    try:
        # What is read is the tightest limit of all (Documentation/power/pm_qos_interface.rst).
        with idling.DEVICE.open("rb") as device:
            (us,) = struct.unpack("=i", device.read(4))
        assert us <= idling.limit_us(idling.driver())
    finally:
        limit.free()


def test_only_a_guest_that_halts_by_itself_is_kept_from_halting_at_all() -> None:
    assert idling.limit_us("haltpoll") == 0
    assert idling.limit_us("intel_idle") == idling.LIGHT_SLEEP_US


def test_a_machine_without_a_driver_has_none(tmp_path: Path) -> None:
    assert idling.driver(tmp_path / "missing") == idling.NONE
    (tmp_path / "driver").write_text("intel_idle\n")
    assert idling.driver(tmp_path / "driver") == "intel_idle"


def test_a_device_that_is_not_ours_is_an_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    limit = Idling(tmp_path / "missing")
    with pytest.raises(OSError, match="No such file"):
        limit.limit()
    assert not limit.is_limited
