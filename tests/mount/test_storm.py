"""Many processes at a few names of a store that is too small: nobody ever sees a wrong byte.

CTXFS_STRESS_SECONDS makes it last longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest

from tests.mount.harness import Daemon
from tests.mount.load import (
    Client,
    Crowd,
    Tally,
    Work,
    check_every_key,
    check_nothing_leaked,
    total,
)
from tests.mount.test_restart import check_accounting

SECONDS = float(os.environ.get("CTXFS_STRESS_SECONDS", "3"))
CLIENTS = 6
KEYS = 40  # of 0.5 MiB in the mean, and as much again while they are replaced

# A block may be held by everybody for a while; who finds no room then learns so soon.
IMPATIENT = '[hot]\nroom_wait = "50ms"\n'


def clients(daemon: Daemon, *, cold: bool) -> list[Work]:
    def client(number: int, stop: Callable[[], bool]) -> Tally:
        return Client(daemon.mount, number, keys=KEYS, cold=cold).go_on(stop)

    return [partial(client, number) for number in range(CLIENTS)]


@pytest.mark.timeout(300 + SECONDS)
@pytest.mark.parametrize("cold", [None, "192MiB"])
def test_in_a_storm_on_shared_names_every_byte_is_right_and_nothing_leaks(
    start: Callable[..., Daemon], cold: str | None
) -> None:
    daemon = start(hot="18MiB", cold=cold, config=IMPATIENT)
    with Crowd(daemon, clients(daemon, cold=cold is not None)) as crowd:
        crowd.wait(SECONDS)
        tally = total(crowd.stop())
    assert all(tally.done.values())
    counters = daemon.stats()["counters"]
    assert counters["demoted" if cold else "evicted"]
    assert counters["corrupt"] == 0
    check_every_key(daemon)
    check_nothing_leaked(daemon)
    check_accounting(daemon)
    for path in daemon.mount.iterdir():
        path.unlink()
    check_nothing_leaked(daemon)
    check_accounting(daemon)
    assert "Traceback" not in daemon.log()
