"""What refuses io_uring, and how one is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxfs.device import uring
from ctxfs.device.uring import OP_NOP, Ring, UringUnavailable
from tests.device.fake_liburing import FakeLiburing
from tests.device.places import why_no_uring

ALL = "fpu avx2 avx512bw avx512f avx512vl bmi2 movbe sse"


def cpuinfo(*flags: str) -> str:
    return "".join(f"processor\t: {n}\nflags\t\t: {these}\n\n" for n, these in enumerate(flags))


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (cpuinfo(ALL, ALL), []),
        (cpuinfo(ALL.replace("avx512f ", "")), ["avx512f"]),
        (cpuinfo(ALL, "avx2 bmi2 movbe"), ["avx512bw", "avx512f", "avx512vl"]),
        (cpuinfo("avx512f_x"), sorted(uring.NEEDED_CPU_FLAGS)),
        ("processor : 0\nFeatures : fp asimd\n", sorted(uring.NEEDED_CPU_FLAGS)),
        ("", sorted(uring.NEEDED_CPU_FLAGS)),
    ],
)
def test_every_processor_must_have_what_the_binding_was_compiled_for(
    text: str, missing: list[str]
) -> None:
    assert uring.missing_cpu_flags(text) == missing


def test_nothing_is_imported_on_a_processor_without_the_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uring, "NEEDED_CPU_FLAGS", frozenset({"no_such_flag"}))
    monkeypatch.setitem(sys.modules, "liburing", None)  # an import would raise ImportError
    assert uring.probe() == "liburing needs a processor with no_such_flag"


def test_a_missing_binding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring, "NEEDED_CPU_FLAGS", frozenset())
    monkeypatch.setitem(sys.modules, "liburing", None)
    why = uring.probe()
    assert why is not None
    assert why.startswith("liburing cannot be imported")


def test_a_kernel_that_refuses_is_named_by_its_errno(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeLiburing):
        def io_uring_queue_init(self, entries: int, ring: object, flags: int, /) -> None:
            raise OSError(38, "Function not implemented")

    monkeypatch.setattr(uring, "load_binding", Refusing)
    assert uring.probe() == "the kernel has no io_uring, or a sandbox hides it"
    with pytest.raises(UringUnavailable, match="no io_uring"):
        Ring(Refusing())


def test_a_kernel_that_refuses_requests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeLiburing()
    monkeypatch.setattr(uring, "load_binding", lambda: kernel)
    assert uring.probe() == "io_uring did not answer a request"
    kernel.submit_errors.append(1)
    why = uring.probe()
    assert why is not None
    assert "refused" in why or "io_uring_disabled" in why


def test_the_probe_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    uring.probe()
    assert os.listdir("/proc/self/fd") == before


def test_a_real_ring_goes_round_many_times() -> None:
    if why := why_no_uring():
        pytest.skip(why)
    ring = Ring(uring.load_binding(), entries=4)
    for turn in range(50):
        for number in range(turn * 3, turn * 3 + 3):
            ring.put(OP_NOP, number)
        assert ring.submit() == 0
        assert os.eventfd_read(ring.eventfd) > 0
        assert ring.reap() == [(turn * 3 + n, 0) for n in range(3)]
        ring.clear_eventfd()
    ring.close()
    ring.close()


def test_more_entries_than_the_ring_holds_are_a_bug() -> None:
    ring = Ring(FakeLiburing(), entries=2)
    ring.put(OP_NOP, 1)
    ring.put(OP_NOP, 2)
    with pytest.raises(RuntimeError, match="full"):
        ring.put(OP_NOP, 3)
    ring.close()
    with pytest.raises(ValueError, match="power of two"):
        Ring(FakeLiburing(), entries=3)


def test_under_a_seccomp_filter_threads_do_the_work(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.device.refused_uring", str(tmp_path / "device")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    answer = json.loads(found.stdout)
    assert answer["engine"] == "threads"
    assert answer["same"] is True
    assert answer["why"] == answer["probe"]
    if why_no_uring() is None:
        assert "seccomp" in answer["why"]
