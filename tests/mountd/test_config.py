"""The configuration: read as people write it, every mistake named at once, written back whole."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.addresses import ListedMember
from ctxfs.config import (
    ClusterConfig,
    ColdConfig,
    Config,
    DefaultsConfig,
    HotConfig,
    Limits,
    LogConfig,
    MountConfig,
    Override,
    load,
    reread,
)
from ctxfs.errors import ConfigError
from ctxfs.units import GIB, KIB, MIB, SECOND_NS, TIB, parse_duration_ns

MEMORY = 64 * GIB
STATE = Path("/var/lib/ctxfs")

WHOLE = """
state = "state"
[mount]
path = "/ctx"
channel = "pyfuse3"
allow_other = false
fsname = "kv"
[hot]
size = "2GiB"
high = "90%"
low = 0.5
room_wait = "250ms"
huge = "never"
[warm]
size = "0"
[[cold]]
path = "/dev/nvme0n1"
[[cold]]
path = "cold1"
size = "100GB"
format = true
engine = "threads"
[defaults]
ttl = "72h"
on_trouble = "error"
root_mode = "0755"
temporary_wait = 5
[limits]
block_max = "1GiB"
attributes_max = 1024
events_kept = 10
read_deadline = "3s"
operation_deadline = "1m"
drain = "1m30s"
[cluster]
id = "prod"
name = "node1"
zone = "rack-1"
weight = "2TiB"
listen = "[::]:7000"
advertise = "10.0.0.1:7000"
etcd = ["https://10.0.1.1:2379", "https://10.0.1.2:2379"]
etcd_user = "ctxfs"
etcd_password_file = "password"
etcd_ca = "/etc/etcd.pem"
etcd_cert = "/etc/mine.pem"
etcd_key = "/etc/mine.key"
etcd_deadline = "1s"
lease = 5
absent_wait = "1m"
ca = "/etc/ca.pem"
cert = "/etc/node1.pem"
key = "/etc/node1.key"
insecure = false
replicas = 3
fsync = "replicas"
fsync_deadline = "20s"
connections = 8
peer_deadline = "500ms"
peer_rate = "1MiB"
hedge = "5ms"
missing_keep = "2s"
tombstone_keep = "2d"
repair_rate = "10MiB"
[log]
format = "json"
level = "debug"
file = "/var/log/ctxfs.log"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ctxfs.toml"
    path.write_text(text)
    return path


def loaded(path: Path | None, *overrides: Override, memory_bytes: int = MEMORY) -> Config:
    return load(path, overrides, state=STATE, memory_bytes=memory_bytes)


def problems(tmp_path: Path, text: str, *overrides: Override) -> list[str]:
    """What is wrong with this file, without its name in front of each line."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        loaded(path, *overrides)
    return [line.removeprefix(f"{path}: ") for line in str(caught.value).splitlines()]


def test_nothing_configured_gives_a_bounded_default() -> None:
    config = loaded(None)
    assert config == Config(
        state=STATE, hot=HotConfig(size_bytes=8 * GIB), limits=Limits(block_bytes_max=8 * GIB)
    )
    assert config.mount == MountConfig(path=None, channel="auto", allow_other=None)
    assert config.cold == ()
    assert config.warm.size_bytes == 0


@pytest.mark.parametrize(
    ("memory_bytes", "hot_bytes"), [(TIB, 8 * GIB), (4 * GIB, GIB), (16 * MIB, 8 * MIB)]
)
def test_default_hot_size_is_a_quarter_of_the_memory_at_most(
    memory_bytes: int, hot_bytes: int
) -> None:
    assert loaded(None, memory_bytes=memory_bytes).hot.size_bytes == hot_bytes


def test_every_key_is_read(tmp_path: Path) -> None:
    assert loaded(written(tmp_path, WHOLE)) == Config(
        state=tmp_path / "state",
        mount=MountConfig(path=Path("/ctx"), channel="pyfuse3", allow_other=False, fsname="kv"),
        hot=HotConfig(
            size_bytes=2 * GIB,
            high_ratio=0.9,
            low_ratio=0.5,
            room_wait_ns=SECOND_NS // 4,
            huge="never",
        ),
        cold=(
            ColdConfig(path=Path("/dev/nvme0n1")),
            ColdConfig(
                path=tmp_path / "cold1", size_bytes=100 * 10**9, format=True, engine="threads"
            ),
        ),
        defaults=DefaultsConfig(
            ttl_ns=parse_duration_ns("72h"),
            on_trouble="error",
            root_mode=0o755,
            temporary_wait_ns=5 * SECOND_NS,
        ),
        limits=Limits(
            block_bytes_max=GIB,
            attributes_bytes_max=1024,
            events_kept=10,
            read_deadline_ns=3 * SECOND_NS,
            operation_deadline_ns=60 * SECOND_NS,
            drain_ns=90 * SECOND_NS,
        ),
        cluster=ClusterConfig(
            id="prod",
            name="node1",
            zone="rack-1",
            weight_bytes=2 * TIB,
            listen="[::]:7000",
            advertise="10.0.0.1:7000",
            etcd=("https://10.0.1.1:2379", "https://10.0.1.2:2379"),
            etcd_user="ctxfs",
            etcd_password_file=tmp_path / "password",
            etcd_ca=Path("/etc/etcd.pem"),
            etcd_cert=Path("/etc/mine.pem"),
            etcd_key=Path("/etc/mine.key"),
            etcd_deadline_ns=SECOND_NS,
            lease_ns=5 * SECOND_NS,
            absent_wait_ns=60 * SECOND_NS,
            ca=Path("/etc/ca.pem"),
            cert=Path("/etc/node1.pem"),
            key=Path("/etc/node1.key"),
            replicas=3,
            fsync="replicas",
            fsync_deadline_ns=20 * SECOND_NS,
            connections=8,
            peer_deadline_ns=SECOND_NS // 2,
            peer_bytes_per_s=MIB,
            hedge_ns=SECOND_NS // 200,
            missing_keep_ns=2 * SECOND_NS,
            tombstone_keep_ns=48 * 3600 * SECOND_NS,
            repair_bytes_per_s=10 * MIB,
        ),
        log=LogConfig(format="json", level="debug", file=Path("/var/log/ctxfs.log")),
        source=tmp_path / "ctxfs.toml",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[hott]\nsize = 1", "hott: there is no such name; did you mean hot?"),
        ("[hot]\nsise = 1", "[hot] sise: there is no such name; did you mean size?"),
        ("stat = '/x'", "stat: there is no such name; did you mean state?"),
        ("[log]\nzzz = 1", "[log] zzz: there is no such name; known here: file, format, level"),
        (
            "[[cold]]\npath='/c'\nengin='x'",
            "[[cold]] engin: there is no such name; did you mean engine?",
        ),
        ("hot = '8G'", "hot: is a table: write [hot] on a line of its own"),
        ("[cold]\npath='/c'", "cold: is a list of tables: write [[cold]] before each device"),
        ("[[cold]]\nsize='1G'", "[[cold]] path: is missing from device 1"),
        ("[hot]\nhuge = 'yes'", "[hot] huge: 'yes' is not within_size, always or never"),
        ("[hot]\nlow = true", "[hot] low: true is not a ratio like 0.95 or 95%"),
        (
            "[hot]\nroom_wait = 'none'",
            "[hot] room_wait: 'none' is not a duration like 90 (seconds), 250ms, 15m, 1h30m, 30d",
        ),
        (
            "[mount]\nallow_other = 'yes'",
            "[mount] allow_other: 'yes' is not true, false or \"auto\"",
        ),
        (
            "[mount]\nfsname = 'a,b'",
            "[mount] fsname: 'a,b' is not a name without commas, spaces or backslashes",
        ),
        ("[mount]\npath = 3", "[mount] path: 3 is not a path"),
        (
            "[defaults]\nroot_mode = 1777",
            '[defaults] root_mode: 1777 is not permission bits as an octal string, like "1777"',
        ),
        ("[limits]\nevents_kept = 1.5", "[limits] events_kept: 1.5 is not a whole number"),
        ("[[cold]]\npath='/c'\nformat=1", "[[cold]] format: 1 is not true or false"),
        (
            "[cluster]\nlisten = 'here'",
            "[cluster] listen: 'here' is not an address like node1:7440, 10.0.0.1:7440 or "
            "[fd00::1]:7440",
        ),
        (
            "[cluster]\netcd = 'http://a'",
            "[cluster] etcd: 'http://a' is not a list, each of it the URL of an etcd, like "
            "http://10.0.0.1:2379",
        ),
        ("[log]\nlevel = 'trace'", "[log] level: 'trace' is not debug, info, warning or error"),
    ],
)
def test_a_slip_is_named_with_what_is_accepted(tmp_path: Path, text: str, complaint: str) -> None:
    assert problems(tmp_path, text) == [complaint]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[warm]\nsize='1M'", "[warm] size: must be 0, or at least"),
        ("[warm]\nsize='1T'", "[warm] size: together with hot.size is more than the memory"),
        (
            "[warm]\nsize='1G'\n[codec]\ncompress='never'",
            "[warm] size: nothing would come into it without compression",
        ),
        ("[codec]\nlevel=23", "[codec] level: must be from 1 to 19"),
        ("[codec]\nkey_file='/k'\nkeyring='k'", "[codec] key_file: keys come from one place"),
        ("[hot]\nsize='7MiB'", "[hot] size: must be at least 8.0 MiB"),
        ("[hot]\nsize='65GiB'", "[hot] size: is more than the memory, 64.0 GiB"),
        ("[hot]\nlow=0.95", "[hot] low: 0 < low < high <= 1"),
        ("[hot]\nhigh=1.01", "[hot] high: 0 < low < high <= 1"),
        ("[hot]\nlow=nan", "[hot] low: 0 < low < high <= 1"),
        ("[[cold]]\npath='/c'\nsize='1M'", "[[cold]] size: must be at least 16.0 MiB for /c"),
        ("[[cold]]\npath='/c'\n[[cold]]\npath='/x/../c'", "[[cold]] path: /c is named twice"),
        ("[defaults]\nttl=0", "[defaults] ttl: a block would expire at once"),
        ("[limits]\nblock_max='9GiB'", "[limits] block_max: no block can be larger than the hot"),
        ("[limits]\nblock_max=1", "[limits] block_max: must be at least 4.0 KiB"),
        ("[limits]\nattributes_max='1M'", "[limits] attributes_max: the kernel takes at most"),
        ("[limits]\nevents_kept=0", "[limits] events_kept: must be from 1 to"),
        ("[limits]\nread_deadline=0", "[limits] read_deadline: nothing answers in no time"),
        (
            "[limits]\noperation_deadline='30s'",
            "[limits] operation_deadline: must be longer than limits.read_deadline, 30s",
        ),
        (
            "[hot]\nroom_wait='10m'\n[limits]\noperation_deadline='9m'",
            "[limits] operation_deadline: must be longer than hot.room_wait, 10m",
        ),
        (
            "[cluster]\nid='c'\netcd=['http://a']\nmembers=['n1=h:1']\ninsecure=true",
            "[cluster] members: who is there is told by one of them only",
        ),
        ("[cluster]\nmembers=['n1=h:1']\ninsecure=true", "[cluster] members: needs cluster.id"),
        ("[cluster]\nid='c'\netcd=['http://a']", "[cluster] etcd: peers are checked by certif"),
        ("[cluster]\nid='c'\nca='a'", "[cluster] ca: needs cluster.cert and cluster.key too"),
        (
            "[cluster]\nid='c'\nca='a'\ncert='b'\nkey='c'\ninsecure=true",
            "[cluster] insecure: peers either show certificates, or they do not",
        ),
        (
            "[cluster]\nid='c'\nmembers=['n1=h:1','n1=h:2']\ninsecure=true",
            "[cluster] members: n1 is named twice",
        ),
        (
            "[cluster]\nid='c'\nmembers=['n1=h:1,slot=4','n2=h:2,slot=4']\ninsecure=true",
            "[cluster] members: n1 and n2 would both have slot 4: give one of them another",
        ),
        (
            "[cluster]\nid='c'\nname='n2'\nmembers=['n1=h:1']\ninsecure=true",
            "[cluster] members: n2 is not among them",
        ),
        ("[cluster]\netcd_user='u'", "[cluster] etcd_user: a user and the file with its"),
        ("[cluster]\netcd_cert='c'", "[cluster] etcd_cert: a certificate and its key"),
        (
            "[cluster]\nid='c'\netcd=['http://a']\netcd_user='u'\netcd_password_file='p'\n"
            "ca='a'\ncert='b'\nkey='c'",
            "[cluster] etcd_user: the password would go to http://a in the open",
        ),
        ("[cluster]\nreplicas=17", "[cluster] replicas: must be from 1 to 16"),
        ("[cluster]\nconnections=0", "[cluster] connections: must be from 1 to 64"),
        ("[cluster]\nweight=0", "[cluster] weight: would be home to nothing"),
        ("[cluster]\nlease='10ms'", "[cluster] lease: must be at least 1s"),
        ("[cluster]\npeer_deadline=0", "[cluster] peer_deadline: nothing answers in no time"),
        (
            "[cluster]\nhedge='1s'",
            "[cluster] hedge: must be above 0 and below cluster.peer_deadline",
        ),
        ("[cluster]\npeer_rate=1", "[cluster] peer_rate: must be at least 64.0 KiB"),
        (
            "[cluster]\nid='c'\nfsync='replicas'\nfsync_deadline='1h'",
            "[cluster] fsync_deadline: must be shorter than limits.operation_deadline, 2m",
        ),
        ("[cluster]\nrepair_rate=1", "[cluster] repair_rate: must be at least 1.0 MiB"),
        ("[cluster]\ntombstone_keep='1m'", "[cluster] tombstone_keep: must be longer than"),
        ("state='/ctx/s'\n[mount]\npath='/ctx'", "state: /ctx/s would lie beneath the mount"),
        ("[mount]\npath='/'", "[mount] path: /var/lib/ctxfs would lie beneath the mount"),
    ],
)
def test_values_that_cannot_go_together_are_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(complaint)


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    text = "[hot]\nsiez='1G'\nlow='x'\n[warm]\nsize='1M'\n[[cold]]\npath='/c'\nsize='1'"
    found = problems(tmp_path, text, Override("--log-level", "log", "level", "loud"))
    assert [line.partition(":")[0] for line in found] == [
        "[hot] siez",
        "[hot] low",
        "--log-level",
        "[warm] size",
        "[[cold]] size",
    ]


def test_a_value_that_cannot_be_read_is_complained_of_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "[hot]\nhigh='lots'\nlow=0.99")) == 1


@pytest.mark.parametrize(
    ("text", "deadline_s"),
    [
        ("", 120),
        ("[hot]\nroom_wait='10m'", 1200),
        ("[limits]\nread_deadline='2m'", 240),
        ("[hot]\nroom_wait='10m'\n[limits]\noperation_deadline='11m'", 660),
    ],
)
def test_the_default_deadline_is_longer_than_every_other_wait(
    tmp_path: Path, text: str, deadline_s: int
) -> None:
    limits = loaded(written(tmp_path, text)).limits
    assert limits.operation_deadline_ns == deadline_s * SECOND_NS


@pytest.mark.parametrize("content", [b"[hot\n", b"\xff", b"state = 1\nstate = 2\n"])
def test_what_is_not_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ctxfs.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: is not TOML: "):
        loaded(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: No such file or directory"):
        loaded(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "fifo", "directory"])
def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match=f"{name}: (is not a regular file|Is a directory)"):
        load(tmp_path / name, state=STATE, memory_bytes=MEMORY)


@pytest.mark.parametrize("extra", [0, 1])
def test_a_file_may_have_a_mebibyte(tmp_path: Path, extra: int) -> None:
    path = tmp_path / "ctxfs.toml"
    path.write_bytes(b"#" * (MIB + extra))
    if extra == 0:
        load(path, state=STATE, memory_bytes=MEMORY)
        return
    with pytest.raises(ConfigError, match=r"ctxfs\.toml: is larger than 1\.0 MiB"):
        load(path, state=STATE, memory_bytes=MEMORY)


def test_a_flag_beats_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    config = loaded(
        path,
        Override("--hot", "hot", "size", "1GiB"),
        Override("--state", "", "state", "/elsewhere"),
        Override("--cold", "cold", "", [{"path": "/c", "size": "1GiB"}]),
        Override("--format", "cold", "format", True),
    )
    assert config.hot.size_bytes == GIB
    assert config.hot.low_ratio == 0.5
    assert config.state == Path("/elsewhere")
    assert config.cold == (ColdConfig(path=Path("/c"), size_bytes=GIB, format=True),)


def test_a_flag_at_fault_is_named_by_its_own_name(tmp_path: Path) -> None:
    found = problems(tmp_path, "[hot]\nsize='1GiB'", Override("--hot", "hot", "size", "100GiB"))
    assert found == ["--hot: is more than the memory, 64.0 GiB"]


def test_a_flag_path_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = loaded(written(tmp_path, "state='a'"), Override("-o", "mount", "path", "b"))
    assert config.state == tmp_path / "a"
    assert config.mount.path == elsewhere / "b"


@given(
    config=st.builds(
        Config,
        state=st.just(STATE),
        mount=st.builds(
            MountConfig,
            path=st.none() | st.just(Path('/mnt/"odd" \\name\x7fé')),
            channel=st.sampled_from(["auto", "direct", "pyfuse3"]),
            allow_other=st.sampled_from([None, True, False]),
        ),
        hot=st.builds(
            HotConfig,
            size_bytes=st.integers(8 * MIB, MEMORY),
            high_ratio=st.floats(0.75, 1),
            low_ratio=st.floats(0.01, 0.7),
            room_wait_ns=st.integers(0, 10**12),
        ),
        cold=st.lists(
            st.builds(
                ColdConfig,
                path=st.integers(0, 999).map(lambda number: Path(f"/srv/c{number}")),
                size_bytes=st.none() | st.integers(16 * MIB, 2**50),
                format=st.booleans(),
            ),
            max_size=3,
            unique_by=lambda device: device.path,
        ).map(tuple),
        defaults=st.builds(
            DefaultsConfig,
            ttl_ns=st.none() | st.integers(1, 2**60),
            root_mode=st.integers(0, 0o7777),
        ),
        limits=st.builds(
            Limits,
            block_bytes_max=st.integers(4 * KIB, 8 * MIB),
            operation_deadline_ns=st.integers(10**12 + 1, 10**15),
        ),
        cluster=st.builds(
            ClusterConfig,
            id=st.just("prod"),
            weight_bytes=st.none() | st.integers(1, 2**50),
            members=st.lists(
                st.builds(
                    ListedMember,
                    st.integers(0, 99).map("n{}".format),
                    st.just("h:1"),
                    st.just("z"),
                    weight=st.integers(1, 2**50),
                    slot=st.integers(0, 1023),
                ),
                max_size=1,
            ).map(tuple),
            insecure=st.just(True),
        ),
        log=st.builds(LogConfig, file=st.none() | st.just(Path("/var/log/x"))),
    )
)
def test_a_written_configuration_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    path = written(tmp_path_factory.mktemp("toml"), config.as_toml())
    assert replace(loaded(path), source=None) == config


def test_the_dictionary_has_the_shape_of_the_file(tmp_path: Path) -> None:
    shown: dict[str, Any] = loaded(written(tmp_path, WHOLE)).as_dict()
    assert shown["hot"]["size"] == "2GiB"
    assert shown["hot"]["room_wait"] == "250ms"
    assert shown["defaults"]["root_mode"] == "0755"
    assert shown["cold"][0] == {"path": "/dev/nvme0n1", "format": False, "engine": "auto"}
    assert shown["limits"]["drain"] == "1m30s"


def test_rereading_takes_what_a_running_daemon_can_take(tmp_path: Path) -> None:
    path = written(tmp_path, "[hot]\nsize='1GiB'\n[defaults]\nttl='1h'")
    config = loaded(path, Override("--log-level", "log", "level", "error"))
    path.write_text(
        "state='/s'\n[hot]\nsize='2GiB'\nlow=0.5\n[defaults]\nttl='2h'\n"
        "[log]\nlevel='debug'\n[limits]\nblock_max='1GiB'"
    )
    fresh, waiting = reread(config, memory_bytes=MEMORY)
    assert fresh.defaults.ttl_ns == parse_duration_ns("2h")
    assert fresh.hot == replace(config.hot, low_ratio=0.5)
    assert fresh.log.level == "error"  # the flag still beats the file
    assert fresh.state == config.state
    assert waiting == ["state", "hot.size"]


def test_rereading_takes_how_others_are_asked_and_leaves_who_this_host_is(tmp_path: Path) -> None:
    config = loaded(written(tmp_path, "[cluster]\nid='c'\ninsecure=true"))
    path = written(
        tmp_path,
        "[cluster]\nid='c'\ninsecure=true\nname='other'\nlisten='h:1'\nconnections=8\n"
        "replicas=3\nfsync='replicas'\nfsync_deadline=1\nhedge='1ms'\npeer_deadline=2\n"
        "peer_rate='1MiB'\nmissing_keep=1\ntombstone_keep='2d'\nrepair_rate='1MiB'",
    )
    fresh, waiting = reread(replace(config, source=path), memory_bytes=MEMORY)
    assert waiting == ["cluster.name", "cluster.listen", "cluster.connections"]
    expected = replace(loaded(path).cluster, name=None, listen=config.cluster.listen, connections=4)
    assert fresh.cluster == expected


def test_rereading_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, "[defaults]\nttl='1h'")
    config = loaded(path)
    path.write_text("[defaults]\nttl='soon'")
    with pytest.raises(ConfigError, match="'soon' is not a duration"):
        reread(config, memory_bytes=MEMORY)
