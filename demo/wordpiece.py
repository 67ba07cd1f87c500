"""WordPiece, as BERT models take their text: lower case, no accents, longest match first."""

import unicodedata
from pathlib import Path

UNKNOWN = "[UNK]"
START = "[CLS]"
END = "[SEP]"
WORD_CHARACTERS_MAX = 100  # a longer word is unknown, as in the model's own tokenizer


class Tokenizer:
    """Text to token ids, with the vocabulary a model was trained with."""

    def __init__(self, vocabulary: list[str]) -> None:
        self._ids = {piece: number for number, piece in enumerate(vocabulary)}

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Read a `vocab.txt`: one piece a line, its id is the line's number from 0."""
        return cls(path.read_text(encoding="utf-8").splitlines())

    def ids(self, text: str) -> list[int]:
        """The ids of `text`, without the marks for start and end."""
        return [self._ids[piece] for word in words(text) for piece in self._pieces(word)]

    def start(self) -> int:
        """The id that opens every sequence."""
        return self._ids[START]

    def end(self) -> int:
        """The id that closes a finished sequence."""
        return self._ids[END]

    def _pieces(self, word: str) -> list[str]:
        if len(word) > WORD_CHARACTERS_MAX:
            return [UNKNOWN]
        pieces: list[str] = []
        begin = 0
        while begin < len(word):
            piece = self._longest(word, begin)
            if piece is None:
                return [UNKNOWN]
            pieces.append(piece)
            begin += len(piece.removeprefix("##")) if begin else len(piece)
        return pieces

    def _longest(self, word: str, begin: int) -> str | None:
        mark = "##" if begin else ""
        for end in range(len(word), begin, -1):
            if (piece := mark + word[begin:end]) in self._ids:
                return piece
        return None


def words(text: str) -> list[str]:
    """Split at white space, and around every mark of punctuation."""
    plain = unicodedata.normalize("NFD", text.lower())
    spaced = "".join(
        f" {character} " if _is_punctuation(character) else character
        for character in plain
        if unicodedata.category(character) != "Mn"
    )
    return spaced.split()


def _is_punctuation(character: str) -> bool:
    # All ASCII that is neither letter, digit nor space counts, `$` and `^` too.
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character).startswith("P")
