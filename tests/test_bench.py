"""The measurements run to their end, compare what they say they compare, and leave nothing."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
import pytest

import bench.daemon
from bench import memory, places, remote, report, rounds
from bench.__main__ import main
from bench.clients import Team, Work
from bench.contestants import HOSTS, RING, Daemons, Task
from bench.daemon import Daemon, DaemonFailed, NoFuse, check_fuse, is_mounted, mounts
from bench.measures import Measure, Workload
from bench.members import Cluster
from bench.network import Network, NoNetwork, check_network
from bench.places import CHANNELS, CTXFS, FIO, IPERF, LOCAL, REDIS, TMPFS, Place
from bench.rounds import Results, Row
from bench.samples import Sample, from_durations
from bench.servers import NotHere, iperf_servers, redis_pair
from bench.targets import TARGETS

ROOT = Path(__file__).parents[1]
SMALL = ["--size", "8KiB", "--blocks", "2", "--seconds", "0.001", "--rounds", "2", "--no-fio"]


@pytest.mark.parametrize(
    ("command", "names"), [([], rounds.names()), (["cluster"], remote.names())]
)
def test_help_names_every_measure(command: list[str], names: list[str]) -> None:
    whole = [sys.executable, "-m", "bench", *command, "--help"]
    answer = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0
    shown = "".join(answer.stdout.split())
    assert all(name in shown for name in names)


def test_every_target_is_a_measure_that_exists() -> None:
    assert {target.measure for target in TARGETS} <= {*rounds.names(), *remote.names()}


def test_a_run_measures_all_places_writes_json_and_leaves_nothing(tmp_path: Path) -> None:
    given, work = tmp_path / "given", tmp_path / "work"
    given.mkdir()
    work.mkdir()
    file = tmp_path / "out.json"
    where = ["--mount", str(given), "--dir", str(work), "--json", str(file)]
    assert main([*SMALL, *where]) == 0
    found = json.loads(file.read_text())
    assert {row["measure"] for row in found["rows"]} == set(rounds.names())
    assert {row["place"] for row in found["rows"]} == {"given", TMPFS, LOCAL}
    assert all(len(row["rounds"]) == 2 and row["rate"]["median"] > 0 for row in found["rows"])
    assert found["verdicts"] == []  # a plain directory is not judged as if it were a mount
    assert found["settings"]["blocks"] == 2
    assert found["machine"]["kernel"]
    assert list(given.iterdir()) == []
    assert list(work.iterdir()) == []


@pytest.mark.mount
def test_a_mount_of_its_own_is_judged_and_removed(tmp_path: Path) -> None:
    try:
        check_fuse()
    except NoFuse as error:
        pytest.skip(str(error))
    work, file = tmp_path / "work", tmp_path / "out.json"
    work.mkdir()
    assert main([*SMALL, "--cold", "256MiB", "--dir", str(work), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {row["place"] for row in found["rows"]} == {CTXFS, TMPFS, LOCAL}
    assert {row["measure"] for row in found["rows"] if row["place"] == CTXFS} == set(rounds.names())
    assert {verdict["target"]["over"] for verdict in found["verdicts"]} == {"", TMPFS, LOCAL}
    assert found["daemons"][CTXFS]["channel"]
    assert list(work.iterdir()) == []


@pytest.mark.mount
def test_both_channels_are_measured_beside_each_other(tmp_path: Path) -> None:
    try:
        check_fuse()
    except NoFuse as error:
        pytest.skip(str(error))
    work, file = tmp_path / "work", tmp_path / "out.json"
    work.mkdir()
    both = ["--channel", "direct", "pyfuse3", "--cold", "64MiB", "--only", "put,get,open,miss"]
    assert main([*SMALL, *both, "--dir", str(work), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {row["place"] for row in found["rows"]} == {*CHANNELS, TMPFS, LOCAL}
    assert {name: each["channel"] for name, each in found["daemons"].items()} == {
        name: name for name in CHANNELS
    }
    assert {verdict["place"] for verdict in found["verdicts"]} == set(CHANNELS)
    for row in found["rows"]:
        assert row["p50_us"]["median"] <= row["p99_us"]["median"] <= row["p999_us"]["median"]
        assert set(row["ratios"]) == {TMPFS, LOCAL} - {row["place"]}
    assert list(work.iterdir()) == []


@pytest.mark.mount
def test_a_profile_of_an_open_shows_the_requests_it_makes(tmp_path: Path) -> None:
    try:
        check_fuse()
    except NoFuse as error:
        pytest.skip(str(error))
    work, file = tmp_path / "work", tmp_path / "out.json"
    work.mkdir()
    few = ["--opens", "50", "--size", "4KiB"]
    assert main(["profile", *few, "--dir", str(work), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    kinds = {each["name"]: each for each in found["requests"]}
    assert 0.5 < kinds["OPEN"]["per_open"] <= 1
    assert {"read_us", "perform_us", "answer_us", "total_us"} <= set(kinds["RELEASE"])
    assert set(found["calls"]) == {"open", "close"}
    assert any("readv" in each["function"] for each in found["functions"])
    assert list(work.iterdir()) == []


def skip_without_hosts() -> None:
    try:
        check_network()
        check_fuse()
    except (NoNetwork, NoFuse) as error:
        pytest.skip(str(error))


@pytest.mark.mount
def test_blocks_of_other_hosts_are_measured_beside_others_who_send_them(tmp_path: Path) -> None:
    skip_without_hosts()
    work, file = tmp_path / "work", tmp_path / "out.json"
    work.mkdir()
    tiny = ["--size", "64KiB", "--blocks", "4", "--seconds", "0.001", "--rounds", "1"]
    chosen = ["--only", "remote-get", "--rivals", f"{IPERF},{REDIS}"]
    assert main(["cluster", *tiny, *chosen, "--dir", str(work), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = {(row["measure"], row["clients"], row["place"]) for row in found["rows"]}
    assert {("remote-get", 1, CTXFS), ("remote-get", 4, CTXFS), ("remote-get-4k", 1, CTXFS)} <= rows
    if shutil.which("iperf3"):
        assert [each["target"]["over"] for each in found["verdicts"]] == [IPERF, IPERF]
    assert list(work.iterdir()) == []
    assert f"ctb{os.getpid()}" not in subprocess.check_output(["ip", "link"], text=True)


@pytest.mark.mount
def test_blocks_are_put_on_two_hosts(tmp_path: Path) -> None:
    skip_without_hosts()
    file = tmp_path / "out.json"
    tiny = ["--size", "64KiB", "--blocks", "2", "--seconds", "0.001", "--rounds", "1"]
    chosen = ["--only", "remote-put", "--rivals", ""]
    assert main(["cluster", *tiny, *chosen, "--dir", str(tmp_path), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["clients"], row["place"]) for row in rows] == [(n, CTXFS) for n in (1, 4)]


class FakeTeam:
    """Notes what it is told to do, in `log`, and takes a second for all of it."""

    def __init__(self, host: str, log: list[tuple[str, str, str]]) -> None:
        self._host = host
        self._log = log
        self._told: list[str] = []

    def begin(self, what: str, names: list[str], size: int, clients: int = 1) -> None:
        self._log += [(self._host, what, name) for name in names]
        self._told = names

    def end(self, clients: int = 1) -> Work:
        return Work([10**9 for _ in self._told], 0, 10**9)

    def do(self, what: str, names: list[str], size: int, clients: int = 1) -> Work:
        self.begin(what, names, size, clients)
        return self.end(clients)


def test_members_read_what_another_one_alone_has(tmp_path: Path) -> None:
    log: list[tuple[str, str, str]] = []
    teams = {host: cast("Team", FakeTeam(host, log)) for host in HOSTS}
    daemons = Daemons(CTXFS, (Cluster(HOSTS, dict.fromkeys(HOSTS, tmp_path)), teams))
    found = daemons.read_on_members(Task(size=100, blocks=3, seconds=0.5, at_once=4))
    assert found is not None
    assert (found.operations, found.bytes, found.seconds) == (12, 1200, 1.0)
    made = {name: host for host, what, name in log if what == "prepare"}
    got = {name: host for host, what, name in log if what == "get"}
    assert made.keys() == got.keys()
    assert {(got[name], made[name]) for name in got} == set(RING)


def test_a_rival_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--rivals", "iperf3,floppy"]) == 1
    assert "no rival is 'floppy'" in capsys.readouterr().out


def test_what_is_not_installed_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    hosts = Network(["a", "b"])
    with pytest.raises(NotHere, match="apt-get install iperf3"), ExitStack() as stack:
        stack.enter_context(iperf_servers(hosts, hosts.names, tmp_path))
    with pytest.raises(NotHere, match="apt-get install redis-server"), ExitStack() as stack:
        stack.enter_context(redis_pair(hosts, "a", "b", tmp_path))


def test_only_the_chosen_measures_run() -> None:
    warm, cold = rounds.chosen(["put", "cold"])
    assert [measure.name for measure in warm] == ["put-rename", "put-close"]
    assert [measure.name for measure in cold] == ["cold-get"]


def test_a_measure_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "putt"]) == 1
    assert "no measure begins with 'putt'" in capsys.readouterr().out


def test_a_block_that_direct_io_cannot_take_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--size", "5000"])


def test_places_take_turns_in_being_first(tmp_path: Path) -> None:
    order: list[str] = []
    measure = Measure("order", "", lambda place, _: _note(order, place))
    three = [Place(name, tmp_path) for name in "ABC"]
    work = Workload(size=4096, blocks=1, seconds=0)
    rounds.run(rounds.Plan((measure,), (), 3), three, None, work, lambda _: None)
    assert "".join(order) == "ABCBCACAB"


def _note(order: list[str], place: Place) -> Sample:
    order.append(place.name)
    return Sample(operations=1, bytes=0, seconds=1.0)


def test_what_has_no_medium_has_no_cold_figures(tmp_path: Path) -> None:
    work = Workload(size=4096, blocks=1, seconds=0)
    where = [Place(LOCAL, tmp_path), Place(TMPFS, tmp_path, medium=False)]
    _, cold = rounds.chosen(["cold-get"])
    results = rounds.run(rounds.Plan((), cold, 1), where, None, work, lambda _: None)
    assert {(row.place, row.clients) for row in results.samples} == {(LOCAL, 1), (LOCAL, 4)}


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine halves its speed in the second round: the ratio does not notice.
    results = Results()
    for seconds in (1.0, 2.0, 1.0):
        results.add(Row("get-mmap", 1, CTXFS), Sample(1, 300, seconds))
        results.add(Row("get-mmap", 1, TMPFS), Sample(1, 120, seconds))
    (verdict,) = report.verdicts(results)
    assert (verdict.value.low, verdict.value.median, verdict.value.high) == (2.5, 2.5, 2.5)
    assert verdict.word == "ok"


def test_fewer_microseconds_are_better() -> None:
    results = Results()
    results.add(Row("open-close", 1, CTXFS), Sample(1, 0, 1.0, p50_us=31.0, p99_us=40.0))
    assert [verdict.word for verdict in report.verdicts(results)] == ["short"]


def test_without_fio_nothing_is_judged_by_it() -> None:
    results = Results()
    results.add(Row("cold-get", 4, CTXFS), Sample(1, 100, 1.0))
    assert report.verdicts(results) == []
    results.add(Row("cold-get", 4, FIO), Sample(1, 100, 1.0))
    assert [verdict.word for verdict in report.verdicts(results)] == ["aim"]


def test_percentiles_are_those_of_single_operations() -> None:
    sample = from_durations([1000 * number for number in range(1, 101)], size=10)
    assert sample.p50_us == 50.5
    assert sample.p99_us == 100.0
    assert sample.bytes == 1000
    assert sample.rate == pytest.approx(1000 / 5050e-6)


def test_memory_is_what_the_daemon_grew_by_for_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(
        [(5, 5, 1000), (9, 8, 1500), (15, 7, 3000)]
    )  # the last blocks are sealed a bit later
    monkeypatch.setattr(memory, "_read", lambda _: next(answers))
    monkeypatch.setattr(memory, "POLL_SECONDS", 0)
    found = memory.measure(tmp_path, tmp_path, blocks=10, size=1, each=4)
    assert (found.per_block, found.hot_blocks) == (200, 7)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 10
    assert len(list(tmp_path.iterdir())) == 3


def test_a_mount_without_statistics_is_said(tmp_path: Path) -> None:
    with pytest.raises(memory.NoStatistics, match="stats"):
        memory.measure(tmp_path, tmp_path, blocks=1, size=0, each=0)


def fake_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> Daemon:
    path = tmp_path / "ctx-mountd"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(bench.daemon, "program", lambda _: path)
    return Daemon(tmp_path / "ctx", tmp_path / "state", ["--hot", "64MiB"])


def test_a_daemon_is_waited_for_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'echo "$@" > {tmp_path}/arguments; echo $$ > {tmp_path}/pid\n'
    script += "sleep 60 & trap 'kill $!; exit 0' TERM; echo ctxfs: x is mounted y; wait"
    daemon = fake_daemon(monkeypatch, tmp_path, script)
    with daemon:
        process = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
        assert process.exists()
    assert not process.exists()
    said = (tmp_path / "arguments").read_text().split()
    assert said == ["--state", f"{tmp_path}/state", "--hot", "64MiB", f"{tmp_path}/ctx"]
    with daemon:  # as a restart does
        assert is_mounted(tmp_path / "ctx") is False


def test_a_daemon_that_ends_at_once_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = fake_daemon(monkeypatch, tmp_path, "echo no room left >&2; exit 4")
    with pytest.raises(DaemonFailed, match="no room left"), daemon:
        pass


def test_a_daemon_that_ends_too_early_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = fake_daemon(
        monkeypatch, tmp_path, "trap '' TERM; echo a bug >&2; echo x is mounted y; exit 1"
    )
    with pytest.raises(DaemonFailed, match=r"with 1:\s+a bug"), daemon:
        pass


def test_a_daemon_that_ignores_the_signal_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.daemon, "STOP_SECONDS_MAX", 0.2)
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; echo x is mounted y; exec sleep 60"
    daemon = fake_daemon(monkeypatch, tmp_path, script)
    with pytest.raises(DaemonFailed, match="ignored SIGTERM"), daemon:
        pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_mount_point_with_a_space_is_recognised(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        folder = tmp_path / "a b"
        folder.mkdir()
        place = stack.enter_context(places.tmpfs(folder))
        kinds = dict(mounts())
        if place.path.parent == folder:  # as root; otherwise it is in /dev/shm
            assert kinds[str(place.path).encode()] == "tmpfs"
            assert is_mounted(place.path)
    assert not is_mounted(folder / "tmpfs")


def test_the_codec_is_measured_on_given_blocks_beside_zstd(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    given = [tmp_path / "a.bf16", tmp_path / "b.bf16", tmp_path / "c.fp16"]
    for path in given:
        numbers = rng.standard_normal(50_000, dtype=np.float32)
        bits = numbers.view(np.uint32) >> 16 if path.suffix == ".bf16" else numbers
        path.write_bytes(bits.astype("<u2" if path.suffix == ".bf16" else "<f2").tobytes())
    file = tmp_path / "out.json"
    names = [str(path) for path in given]
    options = ["--rounds", "2", "--dir", str(tmp_path), "--json", str(file)]
    assert main(["codec", *names, *options]) == 0
    found = json.loads(file.read_text())
    rows = {(row["dtype"], row["way"]): row for row in found["rows"]}
    assert {dtype for dtype, _ in rows} == {"bf16", "fp16"}
    assert rows["bf16", "ctxfs"]["raw_bytes"] == 200_000
    assert rows["bf16", "ctxfs"]["ratio"] > rows["bf16", "zstd -1"]["ratio"]
    assert all(len(row["encode"]) == len(row["decode_cpu"]) == 2 for row in found["rows"])


def test_blocks_that_do_not_compress_are_said_to_leave_nothing_to_measure(tmp_path: Path) -> None:
    noise = tmp_path / "noise.bf16"
    noise.write_bytes(np.random.default_rng(1).bytes(100_000))
    assert main(["codec", str(noise), "--dir", str(tmp_path)]) == 1


@pytest.mark.mount
def test_mounts_of_a_made_cold_file_find_all_blocks(tmp_path: Path) -> None:
    try:
        check_fuse()
    except NoFuse as error:
        pytest.skip(str(error))
    work, file = tmp_path / "work", tmp_path / "out.json"
    work.mkdir()
    assert main(["mount", "--blocks", "300", "--dir", str(work), "--json", str(file)]) == 0
    found = json.loads(file.read_text())["mounts"]
    assert [each["name"] for each in found] == ["checkpoint", "records"]
    assert all(each["blocks"] == 300 and each["ready_seconds"] > 0 for each in found)
    assert list(work.iterdir()) == []
