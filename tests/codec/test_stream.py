"""Whole blocks to streams and back."""

import mmap
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfs.codec.header import FIXED_BYTES, Method, nonce
from ctxfs.codec.offload import (
    CPU,
    Buffer,
    Ciphering,
    Compression,
    CpuOffload,
    Decompression,
    Effort,
)
from ctxfs.codec.planes import ELEMENT_BYTES, PLAIN, Layout
from ctxfs.codec.spreading import TASKS_MAX
from ctxfs.codec.stream import (
    CodecSettings,
    Plan,
    decode_into,
    describe,
    encode,
    encoded_length_max,
    plan,
    read_header,
    stored_plan,
)
from ctxfs.errors import BadStream, BadTag, CopyCorrupt, UnknownKey
from tests.codec.contents import (
    BF16,
    KEY,
    OTHER_KEY,
    SETTINGS,
    SMALL,
    bf16,
    decoded,
    encoded,
    noise,
    page,
    plan_for,
    planned,
    ring,
)

layouts = st.builds(Layout, st.sampled_from(ELEMENT_BYTES), st.booleans())
patterns = st.one_of(
    st.binary(min_size=1, max_size=64),
    st.integers(1, 9).map(noise),
    st.integers(1, 2000).map(bf16),
)


@settings(deadline=None)
@given(
    layout=layouts,
    phase=st.integers(0, 7),
    pattern=patterns,
    length=st.integers(1, 20_000),
    encrypted=st.booleans(),
    chunk=st.sampled_from([4096, 4104, 8192]),
)
def test_what_comes_out_is_what_went_in(
    layout: Layout, phase: int, pattern: bytes, length: int, encrypted: bool, chunk: int
) -> None:
    content = (pattern * (length // len(pattern) + 1))[:length]
    keys = ring() if encrypted else None
    settings = CodecSettings(chunk_bytes=chunk, gain_min=0)
    how = plan_for(layout, phase=phase % layout.element_bytes, settings=settings)
    stream = encode(memoryview(content), how, page, keys=keys, context=b"c")
    if stream is None:
        assert not encrypted
    else:
        assert decoded(bytes(stream), length, keys=keys, context=b"c") == content


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 8192, 8193, 100_001])
@pytest.mark.parametrize("layout", [PLAIN, BF16, Layout(8, True)], ids=repr)
def test_lengths_around_the_chunk_come_back_encrypted(length: int, layout: Layout) -> None:
    content, keys = bf16(50_001)[:length], ring()
    how = plan_for(layout, phase=layout.element_bytes - 1)
    assert decoded(encoded(content, how, keys=keys), length, keys=keys) == content


def test_no_stream_is_longer_than_is_said() -> None:
    for length in (1, 4096, 100_000):
        for how in (plan_for(BF16), stored_plan(SMALL)):
            asked: list[int] = []

            def allocate(wanted: int, asked: list[int] = asked) -> memoryview:
                asked.append(wanted)
                return page(wanted)

            stream = encoded(noise(length), how, keys=ring(), allocate=allocate)
            assert asked == [encoded_length_max(length, SMALL)]
            assert len(stream) <= asked[0]


def test_noise_that_is_only_encrypted_grows_by_header_and_tags_alone() -> None:
    content = noise(5 * 4096)
    assert len(encoded(content, stored_plan(SMALL), keys=ring())) == len(content) + 96 + 5 * 28


def test_what_does_not_shrink_by_the_least_gain_is_not_encoded() -> None:
    content = bf16(50_000)
    much = CodecSettings(gain_min=0.5, chunk_bytes=4096)
    assert encode(memoryview(content), plan_for(BF16, settings=much), page) is None
    assert encode(memoryview(b"x"), plan_for(BF16), page) is None


def test_nothing_has_no_stream() -> None:
    with pytest.raises(ValueError, match="nothing"):
        encode(memoryview(b""), plan_for(BF16), page)


def test_padding_behind_the_stream_is_ignored() -> None:
    content = bf16(10_000)
    stream = encoded(content, plan_for(BF16))
    assert decoded(stream + noise(4096), len(content)) == content


def test_a_stream_describes_itself() -> None:
    content = bf16(50_000)
    plain = read_header(encoded(content, planned(content)))
    assert describe(plain) == "zstd+planes2"
    assert (plain.raw_bytes, plain.method, plain.layout) == (len(content), Method.ZSTD, BF16)
    assert describe(read_header(encoded(bytes(99_999), plan_for(PLAIN)))) == "zstd"
    secret = encoded(content, planned(content), keys=ring())
    assert describe(read_header(secret[:FIXED_BYTES])) == "zstd+planes2+aes256gcm:first"
    stored = encoded(content, stored_plan(SETTINGS), keys=ring())
    assert describe(read_header(stored)) == "raw+aes256gcm:first"


def test_a_stream_belongs_to_what_its_context_says() -> None:
    content = bf16(10_000)
    for keys in (None, ring()):
        stream = encoded(content, plan_for(BF16), keys=keys, context=b"generation 7")
        with pytest.raises(CopyCorrupt):
            decoded(stream, len(content), keys=keys, context=b"generation 8")


def test_the_newest_key_encrypts_and_all_decrypt() -> None:
    content = bf16(10_000)
    old = encoded(content, plan_for(BF16), keys=ring(KEY))
    both = ring(KEY, OTHER_KEY)
    new = encoded(content, plan_for(BF16), keys=both)
    assert [read_header(each).key_id for each in (old, new)] == [b"first", b"second"]
    assert decoded(old, len(content), keys=both) == decoded(new, len(content), keys=both) == content
    for keys in (ring(KEY), None):
        with pytest.raises(UnknownKey, match="second"):
            decoded(new, len(content), keys=keys)


def test_another_key_of_the_same_name_is_a_bad_tag() -> None:
    content = bf16(10_000)
    stream = encoded(content, plan_for(BF16), keys=ring(KEY))
    impostor = ring(type(KEY)(KEY.id, OTHER_KEY.secret))
    with pytest.raises(BadTag):
        decoded(stream, len(content), keys=impostor)


def test_nothing_of_the_content_shows_through_encryption() -> None:
    content = b"secret text " * 3000
    for how in (plan_for(PLAIN), stored_plan(SMALL)):
        assert b"secret text" not in encoded(content, how, keys=ring())


class Listening(CpuOffload):
    """The CPU, and what was asked of it."""

    def __init__(self, batch_chunks: int = 1) -> None:
        super().__init__()
        self.batch_chunks = batch_chunks
        self.sealed: list[tuple[bytes, bytes]] = []
        self.batches: list[int] = []

    def compress(self, jobs: Sequence[Compression]) -> list[Buffer | None]:
        self.batches.append(len(jobs))
        return super().compress(jobs)

    def decompress(self, jobs: Sequence[Decompression]) -> None:
        self.batches.append(len(jobs))
        super().decompress(jobs)

    def encrypt(self, key: bytes, jobs: Sequence[Ciphering]) -> None:
        self.sealed += [(key, job.nonce) for job in jobs]
        super().encrypt(key, jobs)


def test_no_nonce_is_used_twice_with_a_key() -> None:
    listening, keys, content = Listening(), ring(), bf16(20_000)
    for _ in range(20):
        encoded(content, plan_for(BF16), keys=keys, offload=listening)
    assert len(listening.sealed) == 20 * 10
    assert len(set(listening.sealed)) == len(listening.sealed)
    assert len({key for key, _ in listening.sealed}) == 20
    assert KEY.secret not in {key for key, _ in listening.sealed}
    assert len({nonce(number) for number in (0, 1, 2**32, 2**63)}) == 4


def test_an_offload_gets_as_many_chunks_at_once_as_it_likes() -> None:
    listening, content = Listening(batch_chunks=4), bf16(5 * 2048)
    stream = encoded(content, plan_for(BF16), offload=listening)
    assert stream == encoded(content, plan_for(BF16))
    target = page(len(content))
    decode_into(memoryview(stream), target, offload=listening)
    assert target == content
    assert listening.batches[:2] == [8, 2]


def test_several_threads_write_the_same_stream_and_read_it_back() -> None:
    content = bf16(400_000)
    with ThreadPoolExecutor(4) as threads:
        for keys in (None, ring()):
            stream = encoded(content, plan_for(BF16), keys=keys, spread=threads.map)
            assert decoded(stream, len(content), keys=keys, spread=threads.map) == content
            if keys is None:
                assert stream == encoded(content, plan_for(BF16))


def test_many_blocks_at_once_do_not_mix() -> None:
    contents = [bf16(30_000 + seed, seed) for seed in range(24)]

    def there_and_back(content: bytes) -> bytes:
        return decoded(encoded(content, plan_for(BF16)), len(content))

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(there_and_back, contents)) == contents


def test_a_failure_is_raised_when_no_thread_writes_any_more() -> None:
    content = bf16(40 * 2048)
    stream = bytearray(encoded(content, plan_for(BF16)))
    stream[len(stream) // 40] ^= 1  # in the first chunk or the second
    running, lock = 0, threading.Lock()

    def spread(
        function: Callable[[Sequence[int]], Any], tasks: Sequence[Sequence[int]]
    ) -> list[Any]:
        def counted(task: Sequence[int]) -> Any:
            nonlocal running
            with lock:
                running += 1
            try:
                return function(task)
            finally:
                with lock:
                    running -= 1

        return threads.map(counted, tasks)  # type: ignore[return-value]

    with ThreadPoolExecutor(4) as threads:
        target = page(len(content))
        with pytest.raises(BadStream):
            decode_into(memoryview(stream), target, spread=spread)  # type: ignore[arg-type]
        assert running == 0
    target.release()


def test_memory_can_be_unmapped_at_once_though_threads_still_hold_their_tasks() -> None:
    content = bf16(40 * 2048)
    held: list[object] = []

    def spread(function: Any, tasks: Any) -> Any:
        held.append(function)
        return threads.map(function, tasks)

    source, target = mmap.mmap(-1, len(content)), mmap.mmap(-1, len(content))
    source[:] = content
    room = mmap.mmap(-1, encoded_length_max(len(content), SMALL))
    with ThreadPoolExecutor(3) as threads:
        with (
            memoryview(source) as plain,
            memoryview(target) as result,
            memoryview(room) as whole,
        ):
            stream = encode(plain, plan_for(BF16), lambda _: whole, keys=ring(), spread=spread)
            assert stream is not None
            with stream:
                decode_into(stream, result, keys=ring(), spread=spread)
        assert target[:] == content
        for each in (source, target, room):
            each.close()
    assert len(held) == 6


def test_memory_stays_bounded_whatever_the_block() -> None:
    settings = CodecSettings(chunk_bytes=64 << 10)
    how = plan_for(BF16, settings=settings)
    content = bf16(8 << 20)
    room, target = page(encoded_length_max(len(content), settings)), page(len(content))
    with ThreadPoolExecutor(2) as threads:
        tracemalloc.start()
        stream = encode(memoryview(content), how, lambda _: room, spread=threads.map)
        assert stream is not None
        decode_into(stream, target, spread=threads.map)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert target == content
    # The waiting results of a wave, and five chunks of scratch and a frame for each thread.
    assert most < (TASKS_MAX + 2 * 8) * settings.chunk_bytes * 1.25


def test_a_plan_can_be_used_again() -> None:
    how = planned(bf16(200_000), b"bf16")
    for seed in range(3):
        content = bf16(100_000, seed)
        assert decoded(encoded(content, how), len(content)) == content


def test_blocks_of_every_dtype_come_back_through_their_own_plan() -> None:
    for dtype in (b"bf16", b"fp16", b"fp32", b"fp8", b"int8", b""):
        content = bytes(3) + bf16(200_000)
        how = plan(memoryview(content), dtype, SETTINGS)
        assert isinstance(how, Plan)
        assert decoded(encoded(content, how), len(content)) == content


def test_a_plane_that_the_plan_takes_for_noise_is_stored_as_it_is() -> None:
    content = bf16(2048)
    how = Plan(
        settings=SMALL, layout=BF16, phase=0, efforts=(Effort.RAW, Effort.ENTROPY), ratio=1.4
    )
    stream = encoded(content, how)
    assert content[0:40:2] != stream  # and yet:
    low = bytes((content[n] << 1 | content[n + 1] >> 7) & 0xFF for n in range(0, len(content), 2))
    assert low in stream


def test_the_cpu_takes_over_by_default() -> None:
    assert (CPU.name, CPU.batch_chunks) == ("cpu", 1)
