"""Several daemons that share their blocks, on real mounts and real sockets."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from tests.certificates import Authority
from tests.mount.harness import MIB, Daemon, noise, read_or_none, wait_until

NAMES = ("a", "b", "c")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def trust(authority: Authority, name: str) -> str:
    """What a member with a certificate has in its configuration."""
    files = authority.issue(name)
    return f'ca = "{authority.cert}"\ncert = "{files.cert}"\nkey = "{files.key}"\n'


class Cluster:
    """Daemons of one fixed list, by name; started when asked for."""

    def __init__(
        self,
        base: Path,
        channel: str,
        names: tuple[str, ...],
        replicas: int,
        authority: Authority | None = None,
        more: str = "",
    ) -> None:
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        members = ", ".join(f'"{name}=127.0.0.1:{port}"' for name, port in ports.items())
        self._stack = ExitStack()
        self.daemons: dict[str, Daemon] = {}
        for name, port in ports.items():
            room = base / name
            room.mkdir()
            config = (
                f'[cluster]\nid = "test"\nname = "{name}"\nlisten = "127.0.0.1:{port}"\n'
                f"replicas = {replicas}\nmembers = [{members}]\n{more}"
            )
            config += "insecure = true\n" if authority is None else trust(authority, name)
            self.daemons[name] = Daemon(
                room, config=config, channel=channel, hot="64MiB", cold="64MiB"
            )

    def __getitem__(self, name: str) -> Daemon:
        return self.daemons[name]

    def start(self) -> Cluster:
        for daemon in self.daemons.values():
            self._stack.enter_context(daemon)
        wait_until(lambda: all(self.healthy(name) == self.others(name) for name in self.daemons))
        return self

    def others(self, name: str) -> set[str]:
        return set(self.daemons) - {name}

    def healthy(self, name: str) -> set[str]:
        told = json.loads((self[name].mount / ".ctx/peers").read_text())
        peers = {each["name"]: each["peer"] for each in told["members"] if each["peer"]}
        return {name for name, peer in peers.items() if peer["health"] == "healthy"}

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def cluster(channel: str, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as stack:

        def make(
            names: tuple[str, ...] = NAMES,
            *,
            replicas: int = 2,
            authority: Authority | None = None,
            more: str = "",
        ) -> Cluster:
            made = Cluster(tmp_path, channel, names, replicas, authority, more)
            stack.callback(made.close)
            return made.start()

        yield make


def exists(daemon: Daemon, key: str) -> bool:
    return (daemon.mount / key).exists()


def is_gone(daemon: Daemon, key: str) -> bool:
    return not exists(daemon, key)


def reads(daemon: Daemon, key: str, content: bytes) -> bool:
    path = daemon.mount / key
    return path.exists() and path.read_bytes() == content


def replicated(daemon: Daemon, key: str) -> bool:
    reached, _, wanted = daemon.get(key, "replicas").partition("/")
    return reached == wanted


def test_a_block_that_one_host_wrote_is_read_on_all(cluster: Callable[..., Cluster]) -> None:
    made = cluster()
    content = noise(1, 3 * MIB + 17)
    made["a"].put("dir-less", content)
    made["a"].set("dir-less", "parent", "before")
    for name in NAMES:
        wait_until(partial(exists, made[name], "dir-less"))
        assert (made[name].mount / "dir-less").read_bytes() == content
        assert os.stat(made[name].mount / "dir-less").st_mode & 0o777 == 0o644


def test_a_block_in_directories_is_found_by_its_path(cluster: Callable[..., Cluster]) -> None:
    made = cluster()
    (made["a"].mount / "model/layer").mkdir(parents=True)
    made["a"].put("model/layer/k", b"deep")
    for name in NAMES:
        wait_until(partial(exists, made[name], "model/layer/k"))
        assert (made[name].mount / "model/layer/k").read_bytes() == b"deep"


def test_what_is_unlinked_on_one_host_is_gone_on_all(cluster: Callable[..., Cluster]) -> None:
    made = cluster()
    made["a"].put("k", b"content")
    for name in NAMES:
        wait_until(partial(exists, made[name], "k"))
        assert (made[name].mount / "k").read_bytes() == b"content"
    (made["b"].mount / "k").unlink()
    for name in NAMES:
        wait_until(partial(is_gone, made[name], "k"))


def test_the_newest_content_of_a_key_wins_everywhere(cluster: Callable[..., Cluster]) -> None:
    made = cluster()
    for number, name in enumerate(NAMES):
        content = b"%d" % number * 100_000
        made[name].put("k", content)
        for other in NAMES:
            wait_until(partial(reads, made[other], "k", content))


def test_a_replica_outlives_the_host_that_wrote(cluster: Callable[..., Cluster]) -> None:
    made = cluster()
    contents = {f"k{number}": noise(number, 100_000) for number in range(12)}
    for key, content in contents.items():
        made["a"].put(key, content)
    for key in contents:
        wait_until(partial(replicated, made["a"], key))
    made["a"].kill()
    for key, content in contents.items():
        for name in ("b", "c"):
            assert (made[name].mount / key).read_bytes() == content


@pytest.mark.channel("direct")
def test_a_block_whose_only_holder_cannot_be_reached_is_a_miss(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"), replicas=1)
    keys = [f"k{number}" for number in range(8)]
    for key in keys:
        made["a"].put(key, noise(1, 50_000))
    for key in keys:
        wait_until(partial(replicated, made["a"], key))
        wait_until(partial(exists, made["b"], key))
    made["a"].kill()
    found = [read_or_none(made["b"].mount / key) for key in keys]
    assert None in found
    assert set(found) <= {None, noise(1, 50_000)}, "b is home to some"


def test_a_host_that_was_away_does_not_bring_back_what_was_deleted(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster()
    made["a"].put("k", noise(1, 50_000))
    made["a"].set("k", "tier", "cold")
    for name in NAMES:
        wait_until(partial(exists, made[name], "k"))
    made["a"].kill()
    (made["b"].mount / "k").unlink()
    made["a"].start()
    assert not exists(made["a"], "k")
    for name in ("b", "c"):
        assert not exists(made[name], "k")


@pytest.mark.channel("direct")
def test_members_with_certificates_share_and_one_with_anothers_does_not(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    made = cluster(("a", "b"), authority=authority)
    content = noise(1, 3 * MIB)
    made["a"].put("k", content)
    wait_until(partial(reads, made["b"], "k", content))
    made["b"].stop()
    toml = made["b"].mount.parent / "ctxfs.toml"
    toml.write_text(toml.read_text().replace("/b.pem", "/c.pem").replace("/b.key", "/c.key"))
    authority.issue("c")
    made["b"].start()
    made["b"].put("mine", b"content")
    wait_until(lambda: made["b"].get("mine", "state") == "sealed")
    assert not exists(made["a"], "mine")
    assert made.healthy("b") == set()


@pytest.mark.channel("direct")
def test_blocks_of_a_host_that_was_alone_are_read_by_one_that_joins(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"))
    both = (made["a"].mount.parent / "ctxfs.toml").read_text()
    made["a"].stop()
    made["b"].stop()
    (made["a"].mount.parent / "ctxfs.toml").write_text("")
    made["a"].start()
    contents = {f"old{number}": noise(number, 50_000) for number in range(5)}
    for key, content in contents.items():
        made["a"].put(key, content)
    assert made["a"].stop() == 0
    (made["a"].mount.parent / "ctxfs.toml").write_text(both)
    made["a"].start()
    made["b"].start()
    for key, content in contents.items():
        wait_until(partial(reads, made["b"], key, content))


def test_a_block_that_lies_elsewhere_is_renamed_without_being_lost(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"), replicas=1)
    contents = {f"k{number}": noise(number, 60_000) for number in range(8)}
    for key, content in contents.items():
        made["a"].put(key, content)
    for key, content in contents.items():
        wait_until(partial(exists, made["b"], key))
        os.rename(made["b"].mount / key, made["b"].mount / f"{key}-new")
        assert (made["b"].mount / f"{key}-new").read_bytes() == content
    for key, content in contents.items():
        wait_until(partial(reads, made["a"], f"{key}-new", content))
        wait_until(partial(is_gone, made["a"], key))


def write_synced(path: Path, content: bytes) -> int:
    """Open, write, sync; returns the descriptor, which is not closed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    assert os.write(fd, content) == len(content)
    os.fsync(fd)
    return fd


def received(daemon: Daemon) -> int:
    return int(daemon.stats()["cluster"]["counters"]["received"])


def test_what_was_synced_is_on_another_host_once_it_was_closed_or_got_its_name(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"), more='fsync = "replicas"\n')
    here = made["a"].mount
    content = noise(1, 2 * MIB)
    os.close(write_synced(here / "closed", content))
    assert received(made["b"]) == 1
    os.close(write_synced(here / "new.tmp", content))
    assert received(made["b"]) == 1, "a name that is about to change is nobody else's business"
    os.rename(here / "new.tmp", here / "renamed")
    assert received(made["b"]) == 2
    fd = write_synced(here / "open.tmp", content)
    os.rename(here / "open.tmp", here / "renamed-open")
    assert os.pwrite(fd, b"more", len(content)) == 4
    os.close(fd)
    assert received(made["b"]) == 3
    made["a"].put("later", content)
    fd = os.open(here / "later", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert received(made["b"]) == 4
    made["a"].kill()
    there = made["b"].mount
    for name in ("closed", "renamed", "later"):
        assert (there / name).read_bytes() == content
    assert (there / "renamed-open").read_bytes() == content + b"more"
    assert not (there / "new.tmp").exists()


@pytest.mark.channel("direct")
def test_a_sync_with_too_few_hosts_fails_by_a_name_of_its_own_until_fewer_are_asked_for(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"), replicas=3, more='fsync = "replicas"\nfsync_deadline = "200ms"\n')
    here = made["a"]
    fd = write_synced(here.mount / "k", b"content")
    with pytest.raises(OSError, match="Remote I/O error") as caught:
        os.close(fd)
    assert caught.value.errno == errno.EREMOTEIO
    assert (here.mount / "k").read_bytes() == b"content"
    assert "k is not on others, which are too few, after 0.2 s" in here.log()
    toml = here.mount.parent / "ctxfs.toml"
    fewer = 'replicas = 2\nhedge = "1ms"\nconnections = 9\n'
    toml.write_text(toml.read_text().replace("replicas = 3\n", fewer))
    os.kill(here.pid, signal.SIGHUP)
    wait_until(lambda: "these take effect at the next start: cluster.connections" in here.log())
    wait_until(partial(can_sync, here.mount / "k"))
    assert here.get("k", "replicas") == "2/2"
    told = here.stats()["cluster"]
    assert (told["members"], told["members_healthy"], told["source"]) == (2, 2, "list")
    assert told["counters"]["fsync_missing"] >= 1
    metrics = (here.mount / ".ctx/metrics").read_text()
    assert "ctxfs_cluster_members 2\n" in metrics
    assert "ctxfs_cluster_sent_ahead_total 1\n" in metrics


def can_sync(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError:
            return False
        return True


@pytest.mark.channel("direct")
def test_attributes_that_change_later_change_on_all_hosts_and_outlive_them(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"))
    made["a"].put("k", b"content")
    wait_until(partial(replicated, made["a"], "k"))
    wait_until(partial(exists, made["b"], "k"))
    made["a"].set("k", "ttl", "1h")
    made["a"].set("k", "pin", "1")
    os.setxattr(made["a"].mount / "k", "user.mine", b"value")
    os.chmod(made["a"].mount / "k", 0o600)
    wait_until(lambda: os.stat(made["b"].mount / "k").st_mode & 0o777 == 0o600)
    assert 0 < float(made["b"].get("k", "ttl")) <= 3600
    assert made["b"].get("k", "pin") == "1"
    assert os.getxattr(made["b"].mount / "k", "user.mine") == b"value"
    made["b"].set("k", "tier", "cold")
    made["b"].kill()
    made["a"].set("k", "ttl", "2h")
    made["b"].start()
    assert os.getxattr(made["b"].mount / "k", "user.mine") == b"value"
    wait_until(lambda: float(made["b"].get("k", "ttl")) > 3600)
    made["b"].set("k", "ttl", "1s")
    for name in ("a", "b"):
        wait_until(partial(is_gone, made[name], "k"))


@pytest.mark.channel("direct")
def test_a_directory_says_how_many_hosts_hold_its_blocks_and_a_block_says_otherwise(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"))
    here = made["a"]
    (here.mount / "scratch").mkdir()
    here.set("scratch", "replicas", "1")
    assert here.get("scratch", "replicas") == "1"
    for number in range(4):
        here.put(f"scratch/{number}", b"%d" % number)
    keys = [f"scratch/{number}" for number in range(4)]
    for key in keys:
        wait_until(partial(replicated, here, key))
        assert here.get(key, "replicas") == "1/1"
        here.set(key, "replicas", "2")
    for key in keys:
        wait_until(partial(reaches, here, key, "2/2"))
    with pytest.raises(OSError, match="Invalid argument"):
        here.set("scratch", "replicas", "17")
    here.kill()
    for key in keys:
        assert (made["b"].mount / key).read_bytes() == key[-1].encode()


def reaches(daemon: Daemon, key: str, replicas: str) -> bool:
    return daemon.get(key, "replicas") == replicas


@pytest.mark.channel("direct")
def test_what_is_rewritten_is_to_have_as_many_copies_as_before(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(("a", "b"))
    here = made["a"]
    path = here.put("k", b"0" * 1000)
    here.set("k", "replicas", "3")
    wait_until(partial(reaches, made["b"], "k", "2/3"))
    fd = os.open(path, os.O_RDWR)
    os.write(fd, b"1")
    assert here.get("k", "replicas").endswith("/3")
    os.close(fd)
    path.write_bytes(b"2")
    for daemon in made.daemons.values():
        wait_until(partial(reads, daemon, "k", b"2"))
        wait_until(partial(reaches, daemon, "k", "2/3"))


def write_in_step(path: Path, content: bytes, step: Barrier) -> None:
    step.wait()
    path.write_bytes(content)


def agree(cluster: Cluster, keys: list[str]) -> bool:
    return all(
        len({read_or_none(daemon.mount / key) for daemon in cluster.daemons.values()}) == 1
        for key in keys
    )


@pytest.mark.channel("direct")
def test_a_key_that_several_hosts_make_at_the_same_time_has_one_content_in_the_end(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster()
    keys = [f"k{number}" for number in range(40)]
    step = Barrier(len(NAMES))
    with ThreadPoolExecutor(len(NAMES)) as hosts:
        for key in keys:
            writes = [
                hosts.submit(write_in_step, made[name].mount / key, name.encode() * 1000, step)
                for name in NAMES
            ]
            for write in writes:
                write.result()
    wait_until(partial(agree, made, keys))
