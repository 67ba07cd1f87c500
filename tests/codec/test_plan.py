"""What is found out about a source on a sample."""

import itertools
import json

import numpy as np
import pytest

from ctxfs.codec.offload import Effort
from ctxfs.codec.plan import layouts_of, sample_of
from ctxfs.codec.planes import PLAIN, Layout
from ctxfs.codec.stream import CodecSettings, encode, plan, stored_plan
from ctxfs.errors import ConfigError
from tests.codec.contents import (
    BF16,
    SETTINGS,
    bf16,
    decoded,
    encoded,
    floats,
    fp16,
    noise,
    page,
    plan_for,
    planned,
)

MANY = 200_000


@pytest.mark.parametrize("dtype", [b"bf16", b"BFloat16", b"", b"something"])
def test_bf16_is_recognised_with_and_without_a_hint(dtype: bytes) -> None:
    found = planned(bf16(MANY), dtype)
    assert (found.layout, found.phase) == (BF16, 0)
    assert found.efforts == (Effort.RAW, Effort.ENTROPY)


def test_bf16_of_a_normal_distribution_loses_a_third() -> None:
    content = bf16(MANY)
    found = planned(content, b"bf16")
    assert 1.45 < len(content) / len(encoded(content, found)) < 1.6
    assert found.ratio == pytest.approx(len(content) / len(encoded(content, found)), rel=0.02)


@pytest.mark.parametrize("dtype", [b"bf16", b""])
@pytest.mark.parametrize("header", [1, 7, 333])
def test_the_phase_is_found_behind_a_header_of_odd_length(dtype: bytes, header: int) -> None:
    content = bytes(header) + bf16(MANY)
    found = planned(content, dtype)
    assert (found.layout, found.phase) == (BF16, 1)
    in_phase, out = (encoded(content, plan_for(BF16, phase=phase)) for phase in (1, 0))
    assert len(in_phase) < len(out) * 0.995


@pytest.mark.parametrize("behind", range(4))
def test_the_phase_of_a_block_that_is_all_sample_is_found(behind: int) -> None:
    found = planned(bytes(1) + bf16(12_000) + bytes(behind), b"bf16")
    assert (found.layout, found.phase) == (BF16, 1)


def test_fp32_is_recognised_in_every_phase() -> None:
    content = floats(MANY).tobytes()
    aligned = planned(content)
    assert (aligned.layout, aligned.phase) == (Layout(4, True), 0)
    for phase in range(1, 4):
        found = planned(bytes(phase) + content)
        assert found.layout == aligned.layout
        # As good as aligned: the exponent is whole wherever in the word it lies.
        assert found.ratio == pytest.approx(aligned.ratio, rel=0.002)


def test_a_file_of_tensors_with_a_header_of_text_is_recognised() -> None:
    header = json.dumps({"layers.0.k": {"dtype": "BF16", "shape": [MANY]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bf16(MANY)
    found = planned(content)
    assert (found.layout, found.phase) == (BF16, (8 + len(header)) % 2)
    assert decoded(encoded(content, found), len(content)) == content


def test_fp16_and_eight_bit_numbers_are_worth_it_where_they_are() -> None:
    assert planned(fp16(MANY), b"fp16").ratio > 1.1
    scaled = (floats(MANY) * 30).clip(-127, 127).astype(np.int8).tobytes()
    found = planned(scaled, b"int8")
    assert (found.layout, found.efforts) == (PLAIN, (Effort.SEARCH,))
    assert found.ratio > 1.1


def test_text_is_searched_for_what_repeats() -> None:
    words = [noise(7, seed).hex() for seed in range(200)]
    order = np.random.default_rng(1).integers(len(words), size=40_000)
    found = planned(" ".join(words[number] for number in order).encode())
    assert (found.layout, found.efforts) == (PLAIN, (Effort.SEARCH,))
    assert found.ratio > 4


def test_zeros_nearly_vanish() -> None:
    content = bytes(1 << 20)
    assert len(encoded(content, planned(content))) < 2000


@pytest.mark.parametrize("dtype", [b"", b"bf16", b"fp8_e4m3", b"int32"])
def test_noise_is_kept_raw(dtype: bytes) -> None:
    assert plan(memoryview(noise(1 << 20)), dtype, SETTINGS) is None


def test_a_small_block_is_kept_raw() -> None:
    assert plan(memoryview(bytes(4096)), b"bf16", SETTINGS) is None


def test_the_least_gain_decides() -> None:
    content = memoryview(bf16(MANY))
    assert plan(content, b"bf16", CodecSettings(gain_min=0.3)) is not None
    assert plan(content, b"bf16", CodecSettings(gain_min=0.4)) is None


CONTENTS = {
    "bf16": bf16(MANY),
    "fp16": fp16(MANY),
    "fp32": floats(MANY).tobytes(),
    "zeros": bytes(99_999),
    "repeated": noise(99) * 1000,
}
HINTS = [b"int8", b"fp8", b"fp32", b"bf16", b"int64", b"double", b"\xff\xfe", b"bf16\0"]


@pytest.mark.parametrize("dtype", HINTS)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_wrong_hint_costs_size_and_no_bytes(name: str, dtype: bytes) -> None:
    content = CONTENTS[name]
    found = plan(memoryview(content), dtype, SETTINGS)
    if found is not None and encode(memoryview(content), found, page) is not None:
        assert decoded(encoded(content, found), len(content)) == content


def test_a_block_unlike_its_sample_turns_out_not_to_be_worth_it() -> None:
    plan_of_another = planned(bf16(MANY), b"bf16")
    assert encode(memoryview(noise(1 << 20)), plan_of_another, page) is None


def test_the_chosen_way_is_timed_where_there_is_a_clock() -> None:
    ticks = itertools.count(0, 1_000_000)
    content = memoryview(bf16(1 << 20))
    found = plan(content, b"bf16", SETTINGS, clock_ns=lambda: next(ticks))
    assert found is not None
    assert found.bytes_per_s == pytest.approx(len(sample_of(content)) / 0.001)


def test_the_sample_comes_from_all_over_and_keeps_the_phase() -> None:
    content = np.arange(1 << 20, dtype="<u8").tobytes()
    sample = np.frombuffer(sample_of(memoryview(content)), "<u8")
    assert len(sample) * 8 <= 128 << 10
    assert sample[0] == 0
    assert sample[-1] > (1 << 20) * 0.99
    assert np.count_nonzero(np.diff(sample) != 1) == 7


def test_what_is_only_to_be_encrypted_has_a_plan_too() -> None:
    assert stored_plan(SETTINGS).efforts == (Effort.RAW,)


def test_names_of_one_byte_types_leave_plain_bytes() -> None:
    assert layouts_of(b"fp8_e5m2") == layouts_of(b"float8_e4m3fn") == layouts_of(b"int8") == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": 0},
        {"level": 23},
        {"gain_min": 1.0},
        {"gain_min": -0.1},
        {"chunk_bytes": 1024},
        {"chunk_bytes": 4100},
        {"chunk_bytes": 32 << 20},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        CodecSettings(**wrong)  # type: ignore[arg-type]
