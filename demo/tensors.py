"""K and V of the demo's model as files, for `python -m bench codec`. `python -m demo.tensors DIR`

Each file is a block of 256 tokens, laid out (layer, K or V, token, hidden), once in bf16 and once
in fp16. The text is this project's own pages.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from demo.transformer import Floats, ModelMissing, Transformer, parts, to_bf16

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/*.md", "bench/*.md")
CONTEXT_TOKENS = 512  # as many as the model takes
BLOCK_TOKENS = 256
EXIT_CANNOT = 2


class Listening(Transformer):
    """The model, which keeps K and V as they were computed, before they are rounded."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Floats]) -> None:
        super().__init__(config, weights)
        self._heard: list[Floats] = []

    def _linear(self, name: str, values: Floats) -> Floats:
        result = super()._linear(name, values)
        if name.endswith(("attention.self.key", "attention.self.value")):
            self._heard.append(result)
        return result

    def tensors(self, tokens: list[int]) -> Floats:
        """(layers, 2, tokens, hidden) of a text that begins here."""
        self._heard = []
        self.forward(tokens, self.no_past())
        return np.stack(self._heard).reshape(self.layers, 2, len(tokens), self.hidden)


def write(folder: Path, tokens_max: int) -> int:
    """Fill `folder`. Returns how many blocks there are of each dtype."""
    config, weights, tokenizer = parts()
    model = Listening(config, weights)
    paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    tokens = tokenizer.ids("\n".join(path.read_text(encoding="utf-8") for path in paths))
    count = 0
    for begin in range(0, min(len(tokens), tokens_max) - CONTEXT_TOKENS + 1, CONTEXT_TOKENS):
        computed = model.tensors(tokens[begin : begin + CONTEXT_TOKENS])
        for first in range(0, CONTEXT_TOKENS, BLOCK_TOKENS):
            block = np.ascontiguousarray(computed[:, :, first : first + BLOCK_TOKENS])
            to_bf16(block).tofile(folder / f"{count:03}.bf16")
            block.astype(np.float16).tofile(folder / f"{count:03}.fp16")
            count += 1
    return count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo.tensors",
        description="Write K and V of a real transformer, in bf16 and fp16.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="is made if it is not there")
    parser.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="of the text (%(default)s)"
    )
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        count = write(options.folder, options.tokens)
    except ModelMissing as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT
    print(f"{count} blocks of each dtype in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
