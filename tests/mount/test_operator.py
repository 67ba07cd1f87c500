"""An operator at a shell: the real `ctx` against a real mount."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import MIB, Daemon, is_mounted, noise, wait_until

CTX = shutil.which("ctx", path=os.path.dirname(sys.executable)) or "ctx"
HELPER = "mount.ctxfs"
LONGEST_S = 60
ODD = (
    b"\xff\xfe raw", b"two\nlines", b"-rf", b"it's \"quoted\"", "grün·键".encode(), b"*",
    b"\x1b[31m",
)  # fmt: skip


@pytest.fixture(scope="module")
def one(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with both tiers for all tests that leave it as it is."""
    base = tmp_path_factory.mktemp("operator")
    with Daemon(base, hot="64MiB", cold="256MiB", channel=channel) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log(), daemon.log()


@pytest.fixture
def folder(one: Daemon, request: pytest.FixtureRequest) -> Iterator[str]:
    """A directory for one test."""
    name = request.node.name[:100]
    (one.mount / name).mkdir()
    yield name
    shutil.rmtree(one.mount / name, ignore_errors=True)


def ctx(
    daemon: Daemon | Path, *words: str | bytes | Path, code: int = 0, quiet: bool = True
) -> str:
    """Run `ctx` for a mount; returns its output, or its errors where it is to fail."""
    mount = daemon.mount if isinstance(daemon, Daemon) else daemon
    done = subprocess.run(
        [CTX, *words],
        capture_output=True,
        env={**os.environ, "CTXFS_MOUNT": str(mount), "COLUMNS": "120"},
        cwd="/",
        timeout=LONGEST_S,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, f"{words}: {done.returncode}\n{out}\n{err}"
    assert code or not quiet or not err, err
    return err if code else out


def ctx_json(daemon: Daemon | Path, *words: str | bytes) -> Any:
    return json.loads(ctx(daemon, *words, "--json"))


def ctx_json_lines(daemon: Daemon, *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ctx(daemon, *words, "--json").splitlines()]


def test_ls_shows_where_blocks_are_in_the_order_asked_for(one: Daemon, folder: str) -> None:
    for number, key in enumerate(("c", "a", "b")):
        one.put(f"{folder}/{key}", noise(number, (number + 1) * MIB))
        one.wait_sealed(f"{folder}/{key}")
    (one.mount / folder / "sub").mkdir()
    one.set(f"{folder}/a", "tier", "cold")
    one.set(f"{folder}/b", "ttl", "1h")
    one.set(f"{folder}/c", "pin", "1")
    for _ in range(2):
        (one.mount / folder / "b").read_bytes()
    lines = [line.split() for line in ctx(one, "ls", "-l", folder).splitlines()]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("cold", "--f", f"{folder}/a"),
        ("hot", "---", f"{folder}/b"),
        ("hot", "-p-", f"{folder}/c"),
        ("-", "-", f"{folder}/sub/"),
    ]
    for order, keys in (("size", "bac"), ("ttl", "bac"), ("hits", "bac"), ("tier", "bca")):
        told = ctx(one, "ls", "--sort", order, folder).split()
        assert "".join(key[-1] for key in told if not key.endswith("/")) == keys, order
    rows = {row["key"].rpartition("/")[2]: row for row in ctx_json(one, "ls", folder)}
    assert (rows["a"]["tier"], rows["a"]["size_bytes"]) == ("cold", 2 * MIB)
    assert 3000 < rows["b"]["ttl_s"] <= 3600
    assert ctx(one, "ls", "--tier", "cold", folder).split() == [f"{folder}/a"]


def test_stat_and_df_say_what_the_daemon_knows(one: Daemon, folder: str) -> None:
    key = f"{folder}/k"
    one.put(key, noise(1, MIB))
    one.set(key, "tier", "cold")
    one.set(key, "dtype", "bf16")
    os.setxattr(one.mount / key, "user.vendor", b"\xff\0")
    (row,) = ctx_json(one, "stat", key)
    assert (row["tier"], row["copies"], row["placement"]) == ("cold", ["cold"], "cold")
    assert row["digest"] == one.get(key, "digest")
    assert row["generation"] == (one.mount / key).stat().st_ino
    assert set(row["attributes"]) == {"user.vendor"}
    text = ctx(one, "stat", key, folder)
    assert "bf16" in text
    assert "inherited" in text
    ctx(one, "stat", f"{folder}/missing", code=3)
    # Notes reach the cold tier within a second, and take room there.
    wait_until(lambda: ctx_json(one, "df")["tiers"] == one.stats()["tiers"])
    assert str(one.cold_path) in ctx(one, "df")


def test_tier_ttl_and_pin_steer_blocks(one: Daemon, folder: str) -> None:
    keys = [f"{folder}/{number}" for number in range(3)]
    for key in keys:
        one.put(key, noise(2, MIB))
    ctx(one, "tier", "cold", *keys)
    assert {one.get(key, "copies") for key in keys} == {"cold"}
    ctx(one, "tier", "auto", *keys)
    ctx(one, "prefetch", keys[0])
    wait_until(lambda: one.get(keys[0], "tier") == "hot")
    for key, parent in ((keys[1], keys[0]), (keys[2], keys[1])):
        one.set(key, "parent", parent)
    ctx(one, "prefetch", "--chain", keys[0])
    wait_until(lambda: {one.get(key, "tier") for key in keys} == {"hot"})
    ctx(one, "ttl", "1h30m", *keys)
    assert all(5000 < float(one.get(key, "ttl")) <= 5400 for key in keys)
    assert "1h" in ctx(one, "ttl", keys[0])
    ctx(one, "ttl", "none", *keys)
    assert ctx_json(one, "ttl", keys[0])[0]["ttl_s"] is None
    ctx(one, "ttl", "2d", folder)
    assert float(one.get(folder, "ttl")) == 172_800
    ctx(one, "pin", keys[0])
    ctx(one, "pin", "--for", "1h", keys[1])
    assert one.get(keys[0], "pin") == "1"
    assert 3000 < float(one.get(keys[1], "pin")) <= 3600
    ctx(one, "unpin", *keys)
    assert {one.get(key, "pin") for key in keys} == {"0"}
    assert "no such block" in ctx(one, "pin", keys[0], f"{folder}/missing", code=3)
    assert one.get(keys[0], "pin") == "1"  # one bad key does not stop the rest


def test_rm_removes_blocks_and_trees(one: Daemon, folder: str) -> None:
    for key in ("a", "tree/b", "tree/deep/c", "tree/.hidden"):
        (one.mount / folder / key).parent.mkdir(parents=True, exist_ok=True)
        one.put(f"{folder}/{key}", b"x")
    one.set(f"{folder}/a", "pin", "1")
    ctx(one, "rm", f"{folder}/a")
    ctx(one, "rm", f"{folder}/a", code=3)
    ctx(one, "rm", "-f", f"{folder}/a")
    assert "-r" in ctx(one, "rm", f"{folder}/tree", code=1)
    assert ctx_json(one, "rm", "-r", f"{folder}/tree")[0]["removed"] == 3
    assert os.listdir(one.mount / folder) == []


def test_keys_of_odd_bytes_are_named_shown_and_removed(one: Daemon, folder: str) -> None:
    names = [os.fsencode(folder) + b"/" + name for name in ODD]
    for name in names:
        (one.mount / os.fsdecode(name)).write_bytes(name)
    listed = ctx(one, "ls", folder)
    assert len(listed.splitlines()) == len(ODD)
    assert "\x1b" not in listed
    rows = ctx_json(one, "ls", folder)
    assert {os.fsencode(row["key"]) for row in rows} == set(names)
    for name in names:
        ctx(one, "ttl", "1h", "--", name)
        (row,) = json.loads(ctx(one, "stat", "--json", "--", name))
        assert os.fsencode(row["key"]) == name
        assert row["ttl_s"] > 3000
    ctx(one, "tier", "cold", "--", *names)
    ctx(one, "verify", "--", *names)
    ctx(one, "rm", "--", *names)
    assert os.listdir(one.mount / folder) == []


# -- looking after it


def damage(daemon: Daemon, content: bytes) -> None:
    """Change one byte of a cold copy behind the daemon's back, as a failing drive would."""
    place = daemon.cold_path.read_bytes().index(content[:4096])
    fd = os.open(daemon.cold_path, os.O_RDWR)
    byte = os.pread(fd, 1, place + 1000)
    os.pwrite(fd, bytes([byte[0] ^ 1]), place + 1000)
    os.fsync(fd)
    os.close(fd)


def test_verify_finds_a_damaged_cold_copy_and_the_block_is_gone(daemon: Daemon) -> None:
    # LMCache#4385, vllm#54363: bytes from a disk that nobody checks
    for key, number in (("good", 1), ("bad", 2), ("both", 3)):
        daemon.put(key, noise(number, MIB))
        daemon.set(key, "tier", "cold")
    daemon.set("both", "tier", "hot")
    assert "3 good" in ctx(daemon, "verify", "--all", "--read")
    for number in (2, 3):
        damage(daemon, noise(number, MIB))
    told = ctx(daemon, "verify", "good", "bad", code=1)
    assert "bad: its copy was bad and is dropped" in told
    assert not (daemon.mount / "bad").exists()
    assert daemon.stats()["counters"]["corrupt"] == 1
    (event,) = daemon.events("corrupt")
    assert (event["key"], event["tier"]) == ("bad", "cold")
    assert "both" in ctx(daemon, "verify", "--all", code=1)
    assert daemon.stats()["counters"]["corrupt"] == 2
    assert "1 good" in ctx(daemon, "verify", "--all")
    assert (daemon.mount / "good").read_bytes() == noise(1, MIB)
    corrupt = ctx_json_lines(daemon, "events", "--kind", "corrupt")
    assert [event["key"] for event in corrupt] == ["bad", "both"]


def test_damaged_cold_copy_is_a_miss_to_readers_and_counted(daemon: Daemon) -> None:
    path = daemon.put("k", noise(4, MIB))
    daemon.set("k", "tier", "cold")
    damage(daemon, noise(4, MIB))
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    assert not path.exists()
    counters = daemon.stats()["counters"]
    assert (counters["corrupt"], counters["trouble"]) == (1, 1)


def test_events_and_top_show_what_happens(one: Daemon, folder: str) -> None:
    key = f"{folder}/k"
    one.put(key, noise(5, MIB))
    one.set(key, "tier", "cold")
    (one.mount / key).unlink()
    mine = [event for event in ctx_json_lines(one, "events") if event["key"] == key]
    assert [event["event"] for event in mine] == ["sealed", "moved", "removed"]
    assert (mine[1]["from"], mine[1]["to"]) == ("hot", "cold")
    assert "hot→cold" in ctx(one, "events", "--kind", "moved")
    one.put(key, noise(6, MIB))
    for _ in range(50):
        (one.mount / key).read_bytes()
    view = ctx_json(one, "top", "--once")
    assert view["mount"] == str(one.mount)
    assert key in {block["key"] for block in view["hottest"]}
    assert f"{one.channel} channel" in ctx(one, "top", "--once")


def test_doctor_has_nothing_against_a_healthy_mount(one: Daemon) -> None:
    checks = {check["name"]: check for check in ctx_json(one, "--mount", str(one.mount), "doctor")}
    assert checks[f"mount {one.mount}"]["state"] == "ok"
    assert str(one.pid) in checks[f"mount {one.mount}"]["text"]
    assert f"device {one.cold_path}" in checks
    assert "fail" not in {check["state"] for check in checks.values()}


# -- another mount


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Path]:
    """A configuration of a mount that nobody has started; what it mounts is ended."""
    (tmp_path / "second").mkdir()
    config = tmp_path / "second.toml"
    config.write_text(f'state = "{tmp_path}/state2"\n[hot]\nsize = "16MiB"\n')
    yield config
    for path in (tmp_path / "second", tmp_path / "state2/hot"):
        if is_mounted(path):
            subprocess.run(["umount", "-l", path], check=True)


def test_second_mount_is_started_and_ended_beside_the_first(one: Daemon, second: Path) -> None:
    point = second.with_suffix("")
    told = json.loads(ctx(one, "mount", "--json", second, point, quiet=False))
    assert is_mounted(point)
    assert told["pid"] == int((second.parent / "state2/daemon.pid").read_text())
    (point / "k").write_bytes(b"content")
    assert [row["key"] for row in ctx_json(point, "ls")] == ["k"]
    assert not (one.mount / "k").exists()
    with open(point / "k", "rb"):
        assert "use" in ctx(point, "umount", point, code=1)
    ctx(point, "umount", point)
    assert not is_mounted(point)
    assert not is_mounted(second.parent / "state2/hot")
    wait_until(lambda: not os.path.exists(f"/proc/{told['pid']}"))
    assert one.stats()["pid"] == one.pid


@pytest.fixture
def helper() -> Iterator[None]:
    """mount(8) finds its helper, which `make install` would have put there."""
    path = Path("/sbin") / HELPER
    if os.getuid() != 0:
        pytest.skip("only root may mount with mount(8)")
    installed = path.exists()
    if not installed:
        path.symlink_to(Path(CTX).with_name(HELPER))
    yield
    if not installed:
        path.unlink()


def call(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("helper")
def test_mount_and_umount_of_the_system_work(second: Path) -> None:
    point = second.with_suffix("")
    call("mount", "-t", "ctxfs", second, point)
    assert is_mounted(point)
    (point / "k").write_bytes(b"content")
    assert [row["key"] for row in ctx_json(point, "ls")] == ["k"]
    pid = int((second.parent / "state2/daemon.pid").read_text())
    call("umount", point)
    assert not is_mounted(point)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    wait_until(lambda: not is_mounted(second.parent / "state2/hot"))
