"""How deep idle processors may sleep: /dev/cpu_dma_latency, the kernel's PM QoS.

A limit holds as long as its descriptor is open (Documentation/power/pm_qos_interface.rst), so one
of a process that dies is gone.
"""

import os
import struct
from pathlib import Path

DEVICE = Path("/dev/cpu_dma_latency")
DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
# A virtual machine whose idle processors ask the host for nothing before they halt: only where no
# latency is tolerated do they look for work instead (drivers/cpuidle/governors/haltpoll.c).
HALTPOLL = "haltpoll"
NONE = "none"
# The first halt of a real processor takes a microsecond or two to leave, the next ones 10 to 200.
LIGHT_SLEEP_US = 2
_LIMIT = struct.Struct("=i")  # microseconds


def driver(file: Path = DRIVER) -> str:
    """Return what puts idle processors to sleep; `none` where nobody can be told."""
    try:
        return file.read_text().strip() or NONE
    except OSError:
        return NONE


def limit_us(name: str) -> int:
    """Return the latency that is to be tolerated under this driver."""
    return 0 if name == HALTPOLL else LIGHT_SLEEP_US


class Idling:
    """The limit, in force or not."""

    def __init__(self, device: Path = DEVICE) -> None:
        self._device = device
        self._fd: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether processors are kept from sleeping deeply now."""
        return self._fd is not None

    def limit(self) -> None:
        """Keep idle processors awake enough. Raises OSError where that is not ours to say."""
        if self._fd is not None:
            return
        fd = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _LIMIT.pack(limit_us(driver())))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def free(self) -> None:
        """Let them sleep as the machine is set up."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
