"""`ctx device`, against a daemon that is played by files."""

import copy
import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from ctxfs import xattrs
from tests.tools.conftest import Run
from tests.tools.fakemount import STATS, FakeMount
from tools import ctx, device

COLD = "/var/lib/ctxfs/cold0"


def stats(state: str = "ok", *, work: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """What the daemon says with its device in this state, and of the last work."""
    told = copy.deepcopy(STATS)
    told["tiers"]["cold"]["devices"][0] |= {"state": state, "why": None, **facts}
    told["tiers"]["cold"]["device_work"] = [work] if work else []
    return told


def work(what: str, state: str = "done", error: str | None = None) -> dict[str, Any]:
    return {"what": what, "path": COLD, "state": state, "error": error}


def asked(mount: FakeMount, name: bytes) -> bytes | None:
    return mount.attribute(".ctx", name)


def play(monkeypatch: pytest.MonkeyPatch, mount: FakeMount, scenes: list[dict[str, Any]]) -> None:
    """Show the first scene now, and one more each time the tool waits."""
    rest: Iterator[dict[str, Any]] = iter(scenes)
    mount.write_stats(next(rest))
    monkeypatch.setattr(device, "pause", lambda: mount.write_stats(next(rest)))


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def setxattr(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "setxattr", setxattr)


def test_list_shows_each_device(mount: FakeMount, run: Run) -> None:
    mount.write_stats(stats("draining", left_blocks=3, left_bytes=5 << 30))
    answer = run("device", "list")
    assert answer.code == 0
    header, line = (" ".join(each.split()) for each in answer.out.splitlines())
    assert header == "STATE CAPACITY LIVE FREE LEFT ERRORS ENGINE DEVICE"
    assert line == f"draining 100.0GiB 10.0GiB 75.0GiB 5.0GiB 0 threads {COLD}"
    assert run("device", "list", "--json").json[0]["path"] == COLD


def test_mount_without_a_cold_tier_is_told_what_to_do(mount: FakeMount, run: Run) -> None:
    told = copy.deepcopy(STATS)
    del told["tiers"]["cold"]
    mount.write_stats(told)
    answer = run("device", "list")
    assert answer.code == 1
    assert "[[cold]]" in answer.err


def test_add_asks_with_an_absolute_path_and_says_what_is_left_to_do(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, mount, [stats(work=work("add", "running")), stats(work=work("add"))])
    answer = run("device", "add", "new:64MiB")
    assert answer.code == 0
    assert asked(mount, xattrs.DEVICE_ADD) == os.path.abspath("new:64MiB").encode()
    assert answer.out.startswith(f"{COLD}: added, 75.0GiB free; put it into the configuration file")


def test_grow_says_how_large_it_is(mount: FakeMount, run: Run) -> None:
    mount.write_stats(stats(work=work("grow")))
    answer = run("device", "grow", f"{COLD}:100GiB")
    assert asked(mount, xattrs.DEVICE_GROW) == f"{COLD}:100GiB".encode()
    assert (answer.code, "100.0GiB now" in answer.out) == (0, True)
    assert run("device", "grow", COLD, "--json").json["path"] == COLD


def test_drain_waits_until_nothing_is_left(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = [
        stats("draining", left_blocks=left, left_bytes=left << 20, work=work("drain", "running"))
        for left in (3, 2, 1)
    ]
    play(monkeypatch, mount, [*scenes, stats("drained", left_blocks=0, left_bytes=0)])
    answer = run("device", "drain", COLD)
    assert asked(mount, xattrs.DEVICE_DRAIN) == COLD.encode()
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"{COLD}: drained; take it out of the configuration file")


@pytest.mark.parametrize(
    ("state", "code", "remedy"),
    [
        ("needs room", 4, "add a device"),
        ("unreadable", 5, "ctx verify --all"),
        ("drain failed", 5, "the daemon's log"),
        ("lost", 5, "bring it back"),
        ("ok", 1, "takes blocks again"),
    ],
)
def test_drain_that_stops_says_why_what_is_left_and_what_to_do(
    mount: FakeMount,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    code: int,
    remedy: str,
) -> None:
    left: dict[str, Any] = {"left_blocks": 2, "left_bytes": 3 << 20, "work": work("drain")}
    play(monkeypatch, mount, [stats("draining", **left), stats(state, **left | {"why": "so"})])
    answer = run("device", "drain", COLD)
    assert answer.code == code
    assert answer.err.startswith(f"ctx: {COLD}: 2 blocks (3.0MiB) are left: so (")
    assert remedy in answer.err


def test_interrupted_wait_leaves_the_drain_going_and_says_so(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    mount.write_stats(stats("draining", left_blocks=2, left_bytes=1, work=work("drain")))
    monkeypatch.setattr(device, "pause", interrupt)
    answer = run("device", "drain", COLD)
    assert answer.code == 130
    assert "the drain goes on without you" in answer.err


def test_refusal_is_told_in_the_daemons_words(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount.write_stats(stats(work=work("add", "failed", "/dev/x holds an XFS file system")))
    refuse(monkeypatch, errno.EINVAL)
    answer = run("device", "add", "/dev/x")
    assert (answer.code, answer.err) == (2, "ctx: /dev/x holds an XFS file system\n")


def test_work_that_fails_later_is_told_too(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = [work("add", "running"), work("add", "failed", "the device is gone")]
    play(monkeypatch, mount, [stats(work=each) for each in scenes])
    answer = run("device", "add", "/dev/x")
    assert (answer.code, answer.err) == (1, "ctx: the device is gone\n")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES])
def test_others_are_told_who_may(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse(monkeypatch, code)
    answer = run("device", "drain", COLD)
    assert (answer.code, "root and the daemon's own user" in answer.err) == (1, True)


@pytest.mark.parametrize("words", [("list", "x"), ("add",), ("drain",), ("shrink", "x"), ()])
def test_words_that_make_no_sense_are_usage_errors(run: Run, words: tuple[str, ...]) -> None:
    assert run("device", *words).code == 2


def test_devices_are_completed_from_the_mount_and_files_for_a_new_one(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = ctx.parser().parse_args
    there = device.complete_device("/var", parse(["device", "drain"]))
    assert there == [COLD]
    monkeypatch.chdir(mount.path)
    (mount.path / "fresh").touch()
    assert device.complete_device("fr", parse(["device", "add"])) == ["fresh"]
    assert device.complete_device("no/such", parse(["device", "add"])) == []
