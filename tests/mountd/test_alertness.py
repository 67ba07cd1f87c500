"""When processors are kept awake: trio's clock is a mock, the device a file."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ctxfs.device import idling
from mountd import alertness
from mountd.alertness import Alertness


@pytest.fixture
def alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alertness:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    monkeypatch.setattr(idling, "driver", lambda: "intel_idle")
    made = Alertness(wanted=True)
    made.idling = idling.Idling(device)
    return made


async def watched(alert: Alertness, *bursts: int) -> list[bool]:
    """For each number of requests in one look's time: whether processors are kept awake after."""
    clock, seen = trio.lowlevel.current_clock(), []
    assert isinstance(clock, MockClock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alert.watch)
        await wait_all_tasks_blocked()
        for count in bursts:
            if count:
                alert.stir()
            await wait_all_tasks_blocked()
            alert.requests += count
            clock.jump(alertness.LOOK_S)
            await wait_all_tasks_blocked()
            seen.append(alert.idling.is_limited)
        nursery.cancel_scope.cancel()
    return seen


def run(alert: Alertness, *bursts: int) -> list[bool]:
    return trio.run(watched, alert, *bursts, clock=MockClock())


def test_many_requests_keep_processors_awake_until_they_cease(alert: Alertness) -> None:
    quiet = [0] * int(alertness.QUIET_S / alertness.LOOK_S + 1)
    seen = run(alert, alertness.BUSY, *quiet)
    assert seen[0]
    assert all(seen[:-2])
    assert not seen[-1]


def test_a_few_requests_let_them_sleep(alert: Alertness) -> None:
    assert run(alert, 1, alertness.BUSY - 1, 0) == [False, False, False]


def test_nothing_is_asked_of_the_kernel_where_that_is_not_wanted(alert: Alertness) -> None:
    alert.wanted = False
    assert run(alert, 100, 100) == [False, False]


def test_the_end_of_the_mount_lets_them_sleep(alert: Alertness) -> None:
    assert run(alert, 100) == [True]
    assert not alert.idling.is_limited


def test_a_device_that_is_not_ours_is_told_once_and_harms_nothing(
    alert: Alertness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alert.idling = idling.Idling(tmp_path / "missing")
    with caplog.at_level("INFO"):
        assert run(alert, 100, 100) == [False, False]
    assert len(caplog.records) == 1
