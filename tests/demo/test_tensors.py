"""The files that `python -m bench codec` is given hold what the model computes."""

from pathlib import Path

import numpy as np
import pytest

from demo.documents import SHARED_PREFIX
from demo.tensors import BLOCK_TOKENS, Listening, write
from demo.transformer import ModelMissing, Transformer, from_bf16, parts, to_bf16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensors")
    try:
        assert write(folder, 512) == 2
    except ModelMissing as error:
        pytest.skip(str(error))
    return folder


def test_what_is_heard_is_what_the_model_stores() -> None:
    try:
        config, weights, tokenizer = parts()
    except ModelMissing as error:
        pytest.skip(str(error))
    tokens = tokenizer.ids(SHARED_PREFIX)[:64]
    plain = Transformer(config, weights)
    stored = plain.forward(tokens, plain.no_past()).kv
    assert np.array_equal(to_bf16(Listening(config, weights).tensors(tokens)), stored)


def test_each_block_is_written_in_both_dtypes_rounded_from_the_same_numbers(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["000.bf16", "000.fp16", "001.bf16", "001.fp16"]
    bf16 = from_bf16(np.fromfile(folder / "000.bf16", np.uint16))
    fp16 = np.fromfile(folder / "000.fp16", np.float16).astype(np.float32)
    assert len(bf16) == 6 * 2 * BLOCK_TOKENS * 384
    assert np.allclose(bf16, fp16, rtol=2**-7, atol=1e-6)
    # Eight bits and eleven: one is not made of the other.
    assert np.count_nonzero(bf16 != fp16) > len(bf16) / 2
