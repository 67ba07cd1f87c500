"""Text to tokens as BERT has it."""

from demo.wordpiece import Tokenizer, words

VOCABULARY = ["[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", ",", "play", "##ing"]


def pieces(text: str) -> list[str]:
    return [VOCABULARY[number] for number in Tokenizer(VOCABULARY).ids(text)]


def test_words_are_lower_case_without_accents_and_split_at_punctuation() -> None:
    assert words("Café, don't!\n$5") == ["cafe", ",", "don", "'", "t", "!", "$", "5"]


def test_the_longest_piece_comes_first() -> None:
    assert pieces("Unaffable, playing") == ["un", "##aff", "##able", ",", "play", "##ing"]


def test_a_word_with_any_unknown_part_is_unknown_as_a_whole() -> None:
    assert pieces("unaffably café") == ["[UNK]", "cafe"]


def test_an_endless_word_is_unknown() -> None:
    assert pieces("play" * 26) == ["[UNK]"]
