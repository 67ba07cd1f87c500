"""The numpy transformer is the model it claims to be, and its K and V can be shared."""

import math

import numpy as np
import pytest

from demo.blocks import TOKENS
from demo.transformer import (
    Floats,
    ModelMissing,
    Transformer,
    from_bf16,
    gelu,
    load,
    to_bf16,
)
from demo.wordpiece import Tokenizer

Model = tuple[Transformer, Tokenizer]


@pytest.fixture(scope="module")
def model() -> Model:
    try:
        return load()
    except ModelMissing as error:
        pytest.skip(str(error))


def embedding(model: Model, sentence: str) -> Floats:
    """As the model was trained: all tokens see all tokens, their mean is the sentence."""
    transformer, tokenizer = model
    tokens = [tokenizer.start(), *tokenizer.ids(sentence), tokenizer.end()]
    mean = transformer.forward(tokens, transformer.no_past(), causal=False).hidden.mean(axis=0)
    unit: Floats = mean / np.linalg.norm(mean)
    return unit


def test_sentence_embeddings_are_those_the_model_is_published_with(model: Model) -> None:
    # First numbers of the usage example on the model's page; K and V rounded to bf16 cost 1e-3.
    got = embedding(model, "This is an example sentence")[:6]
    assert np.allclose(got, [0.0677, 0.0635, 0.0487, 0.0793, 0.0374, 0.0027], atol=1e-3)


def test_paraphrases_are_nearer_than_unrelated_sentences(model: Model) -> None:
    one = embedding(model, "The children are playing football in the park.")
    same = embedding(model, "Kids play soccer on a green outside.")
    other = embedding(model, "Interest rates were raised by the central bank.")
    assert one @ same > 0.5
    assert one @ other < 0.2


def test_kv_has_one_row_per_layer_token_and_k_or_v(model: Model) -> None:
    transformer, tokenizer = model
    tokens = tokenizer.ids("sixteen ribbons at a time")
    output = transformer.forward(tokens, transformer.no_past())
    assert output.kv.shape == (6, 2, len(tokens), 384)
    assert output.kv.dtype == np.uint16
    assert np.isfinite(output.hidden).all()
    assert np.isfinite(from_bf16(output.kv)).all()


def test_a_token_does_not_depend_on_those_after_it(model: Model) -> None:
    transformer, tokenizer = model
    shared = (tokenizer.ids("the tide gauge by the window drew the height of the water ") * 6)[
        :TOKENS
    ]
    one, other = (
        transformer.forward(shared, transformer.no_past()).hidden[-1],
        transformer.forward(
            [*shared, *tokenizer.ids("for ninety years")], transformer.no_past()
        ).hidden[TOKENS - 1],
    )
    assert np.allclose(one, other, atol=1e-2)


def test_the_same_tokens_after_the_same_past_give_the_same_bits(model: Model) -> None:
    transformer, tokenizer = model
    tokens = (tokenizer.ids("a copper float lay in a well beneath the floor ") * 13)[: 2 * TOKENS]

    def second_block() -> bytes:
        first = transformer.forward(tokens[:TOKENS], transformer.no_past()).kv
        return transformer.forward(tokens[TOKENS:], first).kv.tobytes()

    assert second_block() == second_block()


def test_more_tokens_than_positions_are_refused(model: Model) -> None:
    transformer, _ = model
    with pytest.raises(ValueError, match="512"):
        transformer.forward([101] * 513, transformer.no_past())


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    values = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3.0e38, 0.0], dtype=np.float32)
    back = from_bf16(to_bf16(values))
    assert back[0] == 1.0
    assert back[1] == -2.5
    assert back[2] == 1.0  # half way between 1 and 1.0078125: the even one
    assert back[3] == 1.015625  # half way again, and here the even one is above
    assert abs(back[4] / values[4] - 1) < 2**-8
    assert back[5] == 0.0


def test_gelu_is_the_exact_one_to_seven_digits() -> None:
    values = np.linspace(-6, 6, 241, dtype=np.float32)
    exact = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in values.tolist()]
    assert np.allclose(gelu(values), exact, atol=1e-6)
