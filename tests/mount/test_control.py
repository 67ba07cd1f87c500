"""`.ctx`: what the daemon says of itself, to programs that parse it and to nobody's harm."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctxfs.config import load
from tests.mount.calls import RENAME_EXCHANGE, error_of, rename, wait_sealed
from tests.mount.harness import MIB, Actor, Daemon, elsewhere, noise, run_as, wait_until

FILES = ["config", "events", "events.recent", "metrics", "peers", "stats"]
ENDS_S = 3.0


@pytest.fixture(scope="module")
def shared(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """As elsewhere, but over a cold file."""
    base = tmp_path_factory.mktemp("shared")
    with Daemon(base, cold="256MiB", channel=channel) as one:
        yield one


@pytest.fixture
def control(shared: Daemon, place: Path) -> Path:
    """The directory, of a daemon that has some blocks."""
    (place / "block").write_bytes(noise(1, MIB))
    wait_sealed(place / "block")
    return shared.mount / ".ctx"


# -- the directory


def test_control_directory_is_found_by_name_and_listed_nowhere(
    shared: Daemon, control: Path
) -> None:
    assert ".ctx" not in os.listdir(shared.mount)
    assert control.is_dir()
    assert sorted(os.listdir(control)) == FILES
    found = subprocess.run(
        ["find", shared.mount], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert not [line for line in found if ".ctx" in line]


def test_ls_shows_the_control_directory(control: Path) -> None:
    done = subprocess.run(["ls", "-la", control], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    shown = {line[-1]: line[0] for line in lines if line[-1] not in (".", "..")}
    assert sorted(shown) == FILES
    assert shown["stats"] == shown["metrics"] == "-r--r--r--"
    assert shown["events"] == shown["events.recent"] == "-r--------"
    subprocess.run(["getfattr", "-d", control / "stats"], check=False)
    assert os.listxattr(control / "stats") == []


def attempts(control: Path, block: Path) -> dict[str, Callable[[], object]]:
    stats, root = control / "stats", control.parent
    return {
        "create": lambda: (control / "mine").write_bytes(b""),
        "mknod": lambda: os.mknod(control / "mine", 0o600 | stat.S_IFREG),
        "mkdir": (control / "mine").mkdir,
        "symlink": lambda: os.symlink("stats", control / "mine"),
        "link": lambda: os.link(stats, root / "mine"),
        "write": lambda: stats.write_bytes(b""),
        "open for both": lambda: os.open(stats, os.O_RDWR),
        "append": lambda: os.open(stats, os.O_WRONLY | os.O_APPEND),
        "truncate": lambda: os.truncate(stats, 0),
        "chmod": lambda: stats.chmod(0o600),
        "chown": lambda: os.chown(stats, 1, 1),
        "utime": lambda: os.utime(stats),
        "setxattr": lambda: os.setxattr(stats, "user.mine", b""),
        "ttl": lambda: os.setxattr(control, "user.ctx.ttl", b"1h"),
        "unlink": stats.unlink,
        "rmdir": control.rmdir,
        "rename into": lambda: os.rename(block, control / "mine"),
        "rename out": lambda: os.rename(stats, root / "mine"),
        "rename within": lambda: os.rename(stats, control / "mine"),
        "rename away": lambda: os.rename(control, root / "mine"),
        "rename over": lambda: os.rename(block, stats),
        "exchange": lambda: rename(block, stats, RENAME_EXCHANGE),
        "exchange the directory": lambda: rename(block, control, RENAME_EXCHANGE),
    }


def test_control_directory_can_only_be_read(control: Path, place: Path) -> None:
    for what, attempt in attempts(control, place / "block").items():
        assert error_of(attempt) in (errno.EPERM, errno.EACCES), what
    assert sorted(os.listdir(control)) == FILES
    assert (place / "block").read_bytes() == noise(1, MIB)


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (lambda control: control.mkdir(), errno.EEXIST),
        (lambda control: control.write_bytes(b""), errno.EISDIR),
        (lambda control: control.unlink(), errno.EISDIR),
        (lambda control: (control / "absent").read_bytes(), errno.ENOENT),
        (lambda control: (control / "stats/below").read_bytes(), errno.ENOTDIR),
        (lambda control: os.getxattr(control, "user.ctx.tier"), errno.ENODATA),
    ],
)
def test_other_mistakes_get_the_usual_errors(
    control: Path, attempt: Callable[[Path], object], expected: int
) -> None:
    assert error_of(lambda: attempt(control)) == expected


def test_a_directory_below_may_have_the_same_name(place: Path) -> None:
    below = place / ".ctx"
    below.mkdir()
    (below / "stats").write_bytes(b"mine")
    assert elsewhere((below / "stats").read_bytes) == b"mine"
    assert os.listdir(place) == [".ctx"]


def test_others_read_the_numbers_and_not_the_keys(control: Path) -> None:
    fd = os.open(control, os.O_RDONLY)  # the way here leads through private directories

    def readable() -> list[str]:
        def read(name: str) -> None:
            os.read(os.open(name, os.O_RDONLY, dir_fd=fd), 1)

        return [name for name in FILES if not error_of(partial(read, name))]

    assert readable() == FILES
    assert run_as(4321, readable) == [name for name in FILES if not name.startswith("events")]
    os.close(fd)


# -- stats, metrics


def test_stats_add_up(shared: Daemon, control: Path, place: Path, channel: str) -> None:
    before = shared.stats()
    (place / "more").write_bytes(noise(2, 3 * MIB))
    wait_sealed(place / "more")
    (place / "more").read_bytes()
    assert not (place / "absent").exists()
    after = shared.stats()
    assert after["pid"] == shared.pid
    assert after["mount"] == str(shared.mount)
    assert after["channel"] == channel
    assert after["blocks"]["total"] == before["blocks"]["total"] + 1
    assert after["blocks"]["total"] == after["blocks"]["sealed"] + after["blocks"]["writing"]
    changes = {name: count - before["counters"][name] for name, count in after["counters"].items()}
    assert (changes["creates"], changes["published"], changes["sealed"]) == (1, 1, 1)
    assert changes["sealed_bytes"] == changes["written_bytes"] == 3 * MIB
    assert changes["opens_lent"] == int(after["passthrough"])
    assert changes["read_bytes"] == (0 if changes["opens_lent"] else 3 * MIB)
    assert changes["opens"] == changes["hits_hot"] == 1
    assert changes["misses"] >= 1
    hot, cold = after["tiers"]["hot"], after["tiers"]["cold"]
    assert hot["used_bytes"] - before["tiers"]["hot"]["used_bytes"] >= 3 * MIB
    assert hot["used_bytes"] <= hot["capacity_bytes"] == 64 * MIB
    assert len(cold["devices"]) == 1
    os.setxattr(place / "more", "user.ctx.tier", b"cold")
    moved = shared.stats()
    assert moved["tiers"]["hot"]["blocks"] == hot["blocks"] - 1
    assert moved["tiers"]["cold"]["live_bytes"] - cold["live_bytes"] >= 3 * MIB


@pytest.mark.parametrize("words", ["df", "top --once", "ls -R", "events"])
def test_the_tool_understands_what_the_daemon_says(
    shared: Daemon, control: Path, words: str
) -> None:
    command = [sys.executable, "-m", "tools.ctx", *words.split(), "--mount", str(shared.mount)]
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    assert all(map(json.loads, told.splitlines() if words == "events" else [told]))
    assert subprocess.run(command, capture_output=True, check=True).stdout


NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
TYPE = re.compile(rf"# TYPE ({NAME}) (counter|gauge|histogram|summary|untyped)")


def parse_metrics(text: str) -> dict[tuple[str, str], float]:
    """Samples by (name, labels), by the grammar of Prometheus' text format 0.0.4.

    Stricter than Prometheus: each family has one TYPE line before its samples, which lie together.
    """
    assert text.endswith("\n")
    samples: dict[tuple[str, str], float] = {}
    family, families = "", set()
    for line in text.splitlines():
        if line.startswith("#"):
            match = TYPE.fullmatch(line)
            assert match, line
            family = match[1]
            assert family not in families, line
            families.add(family)
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == family, line
        place = match[1], match[2] or ""
        assert place not in samples, line
        samples[place] = float(match[3])
    assert families == {name for name, _ in samples}
    return samples


def test_metrics_are_what_prometheus_reads(shared: Daemon, control: Path) -> None:
    samples = parse_metrics((control / "metrics").read_text())
    stats = shared.stats()
    assert samples["ctxfs_sealed_bytes_total", ""] == stats["counters"]["sealed_bytes"]
    for tier in ("hot", "cold"):
        capacity = samples["ctxfs_tier_capacity_bytes", f'tier="{tier}"']
        assert capacity == stats["tiers"][tier]["capacity_bytes"]
    assert samples["ctxfs_cold_errors_total", f'path="{shared.cold_path}"'] == 0


def test_metrics_of_a_hot_tier_alone_are_complete_too(hot_only: Daemon) -> None:
    samples = parse_metrics((hot_only.mount / ".ctx/metrics").read_text())
    assert samples["ctxfs_tier_blocks", 'tier="hot"'] == 0
    assert not [name for name, labels in samples if "cold" in labels]


# -- config, peers


def test_config_is_a_configuration_that_says_the_same(
    shared: Daemon, control: Path, tmp_path: Path
) -> None:
    text = (control / "config").read_text()
    tables = tomllib.loads(text)
    assert tables["mount"]["path"] == str(shared.mount)
    assert tables["hot"]["size"] == "64MiB"
    assert tables["cold"][0]["path"] == str(shared.cold_path)
    again = tmp_path / "again.toml"
    again.write_text(text)
    config = load(again, state=tmp_path, memory_bytes=1 << 40)
    assert tomllib.loads(config.as_toml()) == tables


def test_config_shows_what_was_reread(start: Callable[..., Daemon]) -> None:
    daemon = start(config="[defaults]\nttl = '1h'\n")
    toml = Path(daemon.command[daemon.command.index("-c") + 1])

    def ttl() -> Any:
        text = (daemon.mount / ".ctx/config").read_text()
        return tomllib.loads(text)["defaults"]["ttl"]

    assert ttl() == "1h"
    toml.write_text("[defaults]\nttl = '2h'\n")
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: bool(ttl() == "2h"))
    toml.write_text("[defaults]\nttl = 'soon'\n")
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: "soon" in daemon.log())
    assert ttl() == "2h"


def test_a_mount_in_no_cluster_has_no_peers(control: Path) -> None:
    told = json.loads((control / "peers").read_text())
    assert (told["cluster"], told["self"], told["members"]) == (None, None, [])
    assert told["source"]["kind"] == "none"


def test_a_mount_in_a_cluster_shows_its_members(start: Callable[..., Daemon]) -> None:
    members = ["one=127.0.0.1:7440,slot=5", "two=127.0.0.1:7441,zone=b"]
    daemon = start(
        config=f"[cluster]\nid = 'c'\nname = 'one'\nmembers = {members}\ninsecure = true\n"
    )
    told = json.loads((daemon.mount / ".ctx/peers").read_text())
    assert (told["cluster"], told["self"], told["source"]["kind"]) == ("c", "one", "list")
    shown = [(each["name"], each["self"], each["zone"]) for each in told["members"]]
    assert shown == [("one", True, "default"), ("two", False, "b")]
    assert told["members"][0]["slot"] == 5
    assert "members.json" in os.listdir(daemon.state)


# -- events


def kinds_of(lines: bytes, key: str) -> list[str]:
    events = [json.loads(line) for line in lines.splitlines()]
    return [event["event"] for event in events if event["key"] == key]


def test_recent_events_tell_the_life_of_a_block(shared: Daemon, control: Path, place: Path) -> None:
    path = place / "told"
    key = str(path.relative_to(shared.mount))
    path.write_bytes(noise(3, 5000))
    wait_sealed(path)
    os.setxattr(path, "user.ctx.tier", b"cold")
    path.unlink()
    assert kinds_of((control / "events.recent").read_bytes(), key) == ["sealed", "moved", "removed"]
    for line in (control / "events.recent").read_bytes().splitlines():
        event = json.loads(line)
        assert {"time", "event", "key", "generation", "size_bytes"} <= event.keys()


def test_event_stream_gives_the_past_waits_and_goes_on(
    shared: Daemon, control: Path, place: Path
) -> None:
    with open(control / "events", "rb", buffering=0) as stream:
        past = b""
        while piece := stream.read(1000):  # b"": it waited for a second, and nothing came
            past += piece
        assert past == (control / "events.recent").read_bytes()
        elsewhere(lambda: (place / "new").write_bytes(b"new"))
        wait_sealed(place / "new")
        line = stream.read(100_000)
        assert line is not None
        assert kinds_of(line, str((place / "new").relative_to(shared.mount))) == ["sealed"]
        assert line not in past
        assert stream.read(1000) == b""


def test_waiting_reader_is_woken_by_an_event(control: Path, place: Path) -> None:
    def follow() -> Iterator[bytes]:
        with open(control / "events", "rb", buffering=0) as stream:
            while stream.read(1 << 20):
                pass
            yield b"ready"
            lines = b""
            while b"sealed" not in lines:
                lines += stream.read(1 << 20) or b""
            yield lines

    with Actor(follow) as actor:
        assert actor.step() == b"ready"
        actor.go()
        (place / "woken").write_bytes(b"")
        assert b"woken" in actor.answer()


def test_killed_reader_of_events_ends_soon(control: Path, shared: Daemon) -> None:
    def follow() -> Iterator[None]:
        yield None
        with open(control / "events", "rb", buffering=0) as stream:
            while True:
                stream.read(1 << 20)

    with Actor(follow) as actor:
        actor.step()
        actor.go()
        wait_until(lambda: is_waiting_for_fuse(actor.pid))
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: state_of(actor.pid) == "Z", ENDS_S)
        actor.end()
    assert shared.stats()["pid"] == shared.pid


def is_waiting_for_fuse(pid: int) -> bool:
    return "fuse" in Path(f"/proc/{pid}/wchan").read_text() or state_of(pid) in "SD"


def state_of(pid: int) -> str:
    """Return the letter of proc(5): Z when only its parent has not noticed the end yet."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_many_readers_of_events_hold_nobody_up(control: Path, place: Path) -> None:
    streams = [open(control / "events", "rb", buffering=0) for _ in range(50)]  # noqa: SIM115
    try:
        (place / "one").write_bytes(b"one")
        assert elsewhere((place / "one").read_bytes) == b"one"
        for stream in streams:
            assert stream.read(1 << 20)
    finally:
        for stream in streams:
            stream.close()
