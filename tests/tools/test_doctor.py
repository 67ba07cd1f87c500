"""`ctx doctor`: each check on a tree of files that looks like a machine."""

import copy
import errno
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Run
from tests.tools.fakemount import STATS
from tools import _drives, _machine, _mounts, doctor
from tools._machine import Check, Machine
from tools._mounts import Mounted

FLAGS = " ".join(_machine.LIBURING_FLAGS)
MOUNTED = Mounted("/ctx", "0:45", "rw")


def machine(root: Path, files: dict[str, str], *, uid: int = 0, release: str = "6.18") -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root=root, uid=uid, release=release)


def test_missing_fuse_device_makes_mounting_impossible(tmp_path: Path) -> None:
    check = _machine.check_fuse_device(machine(tmp_path, {}))
    assert check.state == "fail"
    assert "modprobe fuse" in check.remedy
    assert _machine.check_fuse_device(machine(tmp_path, {"dev/fuse": ""})).state == "ok"


def test_only_root_mounts_without_fusermount(tmp_path: Path) -> None:
    helper = tmp_path / "fusermount3"
    helper.touch()
    user = Machine(root=tmp_path, uid=1000)
    assert _machine.check_fusermount(Machine(root=tmp_path, uid=0), None).state == "ok"
    assert _machine.check_fusermount(user, None).remedy == "apt install fuse3"
    assert "not setuid" in _machine.check_fusermount(user, str(helper)).text
    helper.chmod(0o4755)
    assert _machine.check_fusermount(user, str(helper)).state == "ok"


@pytest.mark.parametrize(
    ("release", "uid", "state"),
    [("6.8.0-41", 0, "warn"), ("6.9.0", 0, "ok"), ("6.18.1", 1000, "warn"), ("7.1-rc2", 0, "ok")],
)
def test_passthrough_needs_its_kernel_and_root(
    tmp_path: Path, release: str, uid: int, state: str
) -> None:
    assert _machine.check_passthrough(Machine(tmp_path, uid, release)).state == state


def test_fuse_over_uring_is_told_and_never_needed(tmp_path: Path) -> None:
    switch = "sys/module/fuse/parameters/enable_uring"
    old = _machine.check_fuse_uring(Machine(tmp_path, 0, "6.13"))
    off = _machine.check_fuse_uring(machine(tmp_path, {switch: "N\n"}))
    on = _machine.check_fuse_uring(machine(tmp_path, {switch: "Y\n"}))
    assert {old.state, off.state, on.state} == {"ok"}
    assert "echo 1 >" in off.remedy
    assert on.text == "switched on"


@pytest.mark.parametrize(
    ("text", "uid", "state"),
    [
        ("", 1000, "warn"),
        ("# user_allow_other\n", 1000, "warn"),
        ("user_allow_other\n", 1000, "ok"),
        ("", 0, "ok"),
    ],
)
def test_allow_other_needs_its_line_except_for_root(
    tmp_path: Path, text: str, uid: int, state: str
) -> None:
    place = machine(tmp_path, {"etc/fuse.conf": text}, uid=uid)
    assert _machine.check_allow_other(place).state == state


@pytest.mark.parametrize(
    ("refusal", "switch", "state", "remedy"),
    [
        (errno.EFAULT, "0", "ok", ""),
        (errno.EINVAL, "0", "ok", ""),
        (errno.EPERM, "2", "warn", "sysctl kernel.io_uring_disabled=0"),
        (errno.EPERM, "0", "warn", "seccomp"),
        (errno.ENOSYS, "0", "warn", "5.1"),
    ],
)
def test_refused_io_uring_is_told_with_the_one_who_refuses(
    tmp_path: Path, refusal: int, switch: str, state: str, remedy: str
) -> None:
    place = machine(tmp_path, {"proc/sys/kernel/io_uring_disabled": switch})
    check = _machine.check_io_uring(place, refusal)
    assert check.state == state
    assert remedy in check.remedy


def test_asking_for_io_uring_makes_no_ring() -> None:
    refusals = (errno.EFAULT, errno.EINVAL, errno.EPERM, errno.ENOSYS)
    assert _machine.try_io_uring() in refusals


def test_processor_without_the_wheels_instructions_is_told(tmp_path: Path) -> None:
    good = machine(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: fpu {FLAGS}\n"})
    assert _machine.check_processor(good).state == "ok"
    poor = machine(tmp_path, {"proc/cpuinfo": "flags : fpu avx2 bmi2 movbe\n"})
    check = _machine.check_processor(poor)
    assert check.state == "warn"
    assert "avx512bw avx512f avx512vl" in check.text


@pytest.mark.parametrize(
    ("text", "state"),
    [("always [never] deny force", "ok"), ("always never [deny]", "warn"), (None, "warn")],
)
def test_huge_pages_work_unless_denied(tmp_path: Path, text: str | None, state: str) -> None:
    name = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    assert _machine.check_huge_pages(machine(tmp_path, {name: text} if text else {})).state == state


CGROUPS = [
    ({"proc/self/cgroup": "0::/\n"}, None),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "1048576\n"}, 1 << 20),
    (
        {
            "proc/self/cgroup": "4:memory:/x\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2097152\n",
        },
        2 << 20,
    ),
]


@pytest.mark.parametrize(
    ("files", "state", "told"),
    [
        ({}, "ok", "cannot be told"),
        ({"sys/devices/system/cpu/cpuidle/current_driver": "intel_idle\n"}, "warn", "not ours"),
        (
            {
                "sys/devices/system/cpu/cpuidle/current_driver": "intel_idle\n",
                "dev/cpu_dma_latency": "",
            },
            "ok",
            "kept awake",
        ),
    ],
)
def test_processors_that_sleep_deeply_are_told(
    tmp_path: Path, files: dict[str, str], state: str, told: str
) -> None:
    check = _machine.check_idling(machine(tmp_path, files))
    assert check.state == state
    assert told in check.text


@pytest.mark.parametrize(("files", "limit"), CGROUPS)
def test_tightest_control_group_limit_counts(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    assert _machine.memory_limit_bytes(machine(tmp_path, files)) == limit


def test_hot_tier_larger_than_the_memory_limit_is_told(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 512 kB\n"}
    assert _machine.check_memory(machine(tmp_path, files), 1 << 20).state == "ok"
    check = _machine.check_memory(machine(tmp_path, files), 2 << 20)
    assert check.state == "warn"
    assert "1.0MiB, 512.0KiB available" in check.text


@pytest.mark.parametrize(
    ("uid", "limit", "state"),
    [(0, 65536, "ok"), (1000, 65536, "warn"), (1000, resource.RLIM_INFINITY, "ok")],
)
def test_locked_memory_limit_concerns_users(
    tmp_path: Path, uid: int, limit: int, state: str
) -> None:
    assert _machine.check_locked_memory(Machine(tmp_path, uid), limit).state == state


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "ng0n1 can be sent commands"),
        ({"nvme0n1p1/partition": "1"}, "ng0n1 is partitioned (nvme0n1p1)"),
        ({"nvme0n1p1/partition": "1", "nvme0n1p1/dev": "259:1"}, "ng0n1 is mounted on /data"),
        ({"dev": "259:1"}, "ng0n1 is mounted on /data"),
        ({"holders/dm-0/dev": "253:0"}, "ng0n1 is used by dm-0"),
    ],
)
def test_nvme_drives_are_told_with_who_has_them(
    tmp_path: Path, files: dict[str, str], text: str
) -> None:
    block = "sys/class/block/nvme0n1"
    lines = "30 1 259:1 / /data rw - ext4 /dev/nvme0n1p1 rw\n"
    tree = {"dev/ng0n1": "", "proc/self/mountinfo": lines, f"{block}/size": "8"}
    tree |= {f"{block}/{name}": content for name, content in files.items()}
    check = _drives.check_nvme(machine(tmp_path, tree))
    assert (check.name, check.state, check.text) == ("nvme", "ok", text)


def test_an_old_kernel_sends_no_nvme_commands(tmp_path: Path) -> None:
    assert _drives.check_nvme(machine(tmp_path, {})).state == "ok"
    machine(tmp_path, {"dev/ng0n1": ""})
    check = _drives.check_nvme(Machine(tmp_path, 0, "5.15"))
    assert check.state == "warn"
    assert "5.19" in check.remedy


def told(place: Machine, stats: dict[str, Any] | None) -> list[Check]:
    """Without the last check, which is about requests that wait."""
    return list(doctor.mount_checks(place, MOUNTED, stats))[:-1]


def told_of_requests(
    root: Path, *counts: str, stats: dict[str, Any] | None = None
) -> tuple[Check, int]:
    """The check, and how often it paused, where `waiting` shows one count after the other."""
    left = list(counts)
    place = machine(root, {"sys/fs/fuse/connections/45/waiting": left.pop(0)})

    def pause(seconds: float) -> None:
        machine(root, {"sys/fs/fuse/connections/45/waiting": left.pop(0)})

    (*_, check) = doctor.mount_checks(place, MOUNTED, stats or STATS, pause)
    assert check.name == "requests /ctx"
    return check, len(counts) - len(left) - 1


def test_mount_that_answers_is_told_with_its_devices(tmp_path: Path) -> None:
    mount, channel, device = told(machine(tmp_path, {}), STATS)
    assert (mount.state, channel.state, device.state) == ("ok", "ok", "warn")
    assert "pyfuse3 (not root)" in channel.text
    assert "the processor lacks avx512f" in device.remedy


def test_a_mount_with_passthrough_needs_no_advice(tmp_path: Path) -> None:
    stats = {**STATS, "channel": "direct", "channel_why": "root", "passthrough": True}
    channel = told(machine(tmp_path, {}), stats)[1]
    assert channel.text == "direct (root); the kernel reads sealed hot blocks itself"
    assert not channel.remedy


@pytest.mark.parametrize(("state", "expected"), [("lost", "fail"), ("failing", "warn")])
def test_device_in_trouble_is_told(tmp_path: Path, state: str, expected: str) -> None:
    stats = copy.deepcopy(STATS)
    stats["tiers"]["cold"]["devices"][0]["state"] = state
    assert told(machine(tmp_path, {}), stats)[-1].state == expected


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (None, "fail", "hangs"),
        ("Transport endpoint is not connected", "fail", "stale"),
        ("Permission denied", "warn", "not yours"),
        ("Input/output error", "fail", "Input/output error"),
    ],
)
def test_silent_mount_is_told_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str | None,
    state: str,
    words: str,
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda point: answer)
    (check,) = told(machine(tmp_path, {}), None)
    assert check.state == state
    assert words in check.text


def test_waiting_requests_are_told_with_how_to_end_them(tmp_path: Path) -> None:
    check, _ = told_of_requests(tmp_path, "3\n", "4\n")
    assert (check.state, check.text) == ("warn", "3 wait for the daemon")
    assert "echo 1 > /sys/fs/fuse/connections/45/abort" in check.remedy
    assert "ctx umount --force /ctx" in check.remedy


def test_requests_that_wait_for_long_are_told_with_the_time(tmp_path: Path) -> None:
    stats = {**STATS, "requests": {"waiting": 2, "longest_s": 61.2}}
    check, _ = told_of_requests(tmp_path, "2", "2", stats=stats)
    assert (check.state, check.text) == ("warn", "2 wait for the daemon, the longest for 61 s")


@pytest.mark.parametrize(
    ("counts", "paused", "text"),
    [
        (("0",), 0, "none has to wait"),
        (("5", "0"), 1, "none has to wait"),
        (("1", "1"), 1, "1 at the daemon, none of them for long"),
    ],
)
def test_requests_that_are_being_answered_are_no_trouble(
    tmp_path: Path, counts: tuple[str, ...], paused: int, text: str
) -> None:
    stats = {**STATS, "requests": {"waiting": 1, "longest_s": 0.1}}
    check, pauses = told_of_requests(tmp_path, *counts, stats=stats)
    assert (check.state, check.text, pauses) == ("ok", text, paused)


def test_without_fusectl_it_says_how_to_mount_it(tmp_path: Path) -> None:
    (*_, check) = doctor.mount_checks(machine(tmp_path, {}), MOUNTED, STATS)
    assert check.state == "ok"
    assert check.remedy.startswith("mount -t fusectl none /sys/fs/fuse/connections")


def test_a_count_that_may_not_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    check, _ = told_of_requests(tmp_path, "")
    assert (check.state, check.text) == ("ok", "not yours to count")


def test_requests_that_were_ended_are_told(tmp_path: Path) -> None:
    stats = {**STATS, "counters": {**STATS["counters"], "overdue": 7}}
    check = told(machine(tmp_path, {}), stats)[1]
    assert (check.name, check.state) == ("overdue /ctx", "warn")
    assert "7 requests" in check.text


def test_probe_tells_why_statistics_cannot_be_had(tmp_path: Path) -> None:
    assert doctor.probe(str(tmp_path)) == "No such file or directory"


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_is_1_only_if_something_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    monkeypatch.setattr(_machine, "checks", lambda machine, hot: [Check("x", state, "t", "do it")])
    monkeypatch.setattr(_mounts, "mounted", list)
    answer = run("doctor", "--json")
    assert answer.code == code
    assert answer.json[0] == {"name": "x", "state": state, "text": "t", "remedy": "do it"}
    assert "→ do it" in run("doctor").out


def test_report_on_this_machine_has_every_check(run: Run) -> None:
    names = [check["name"] for check in run("doctor", "--json").json]
    assert names[:3] == ["fuse device", "fusermount3", "passthrough"]
    assert {"io_uring", "processor", "memory", "nvme"} <= set(names)


def test_a_daemon_that_was_followed_by_another_is_told_with_its_parent(tmp_path: Path) -> None:
    stats = {**STATS, "parent_pid": 4000, "restarts": 3}
    first, second, *_ = told(machine(tmp_path, {}), stats)
    assert "pid 4242 (parent 4000)" in first.text
    assert (second.state, second.name) == (_machine.WARN, "restarts /ctx")
    assert "died 3 times" in second.text
