from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tx_kit.models import new_tokenizer

from tx.tinker.backends.stop_strings import MAX_STOP_CHARACTERS, StopStringMatcher


@pytest.fixture
def decoder(tmp_path: Path) -> StopStringMatcher:
    """A tokenizer with a token per byte."""
    new_tokenizer().save_pretrained(tmp_path)
    return StopStringMatcher(tmp_path)


def tokens_of(text: str) -> list[int]:
    found: list[int] = new_tokenizer().encode(text)
    return found


def test_a_string_ends_where_its_last_byte_does(decoder: StopStringMatcher) -> None:
    tokens = tokens_of("naïve 😀")
    assert len(tokens) == 11
    assert [decoder.contains_any(tokens[:n], ["x", "ï"]) for n in (3, 4)] == [False, True]
    assert [decoder.contains_any(tokens[:n], ["😀"]) for n in (10, 11)] == [False, True]
    assert decoder.contains_any(tokens_of("so<|im_end|>"), ["<|im_end|>"])  # special tokens match, too


def test_a_string_may_have_more_tokens_than_characters(decoder: StopStringMatcher) -> None:
    string = "😀" * MAX_STOP_CHARACTERS
    tokens = tokens_of(f"so {string}")
    assert len(tokens) > 4 * MAX_STOP_CHARACTERS
    assert [decoder.contains_any(tokens[:-n], ["x", string]) for n in (2, 1)] == [False, False]
    assert decoder.contains_any(tokens, ["x", string])


def test_any_tokens_may_precede_a_string(decoder: StopStringMatcher, tmp_path: Path) -> None:
    """Also for tokenizers that decode bytes only if all adjacent ones are characters."""
    other = Tokenizer(BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    other.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    (tmp_path / "other").mkdir()
    other.save(str(tmp_path / "other" / "tokenizer.json"))
    for filling in ("a", "é", "€", "😀"):
        text = filling * 70
        assert decoder_holds(decoder, tokens_of(text + "stop€"))
        assert decoder_holds(StopStringMatcher(tmp_path / "other"), list((text + "stop€").encode()))


def decoder_holds(decoder: StopStringMatcher, tokens: list[int]) -> bool:
    """Return whether a string is found at the end, but not before."""
    *before, last = (decoder.contains_any(tokens[:n], ["stop€"]) for n in range(len(tokens) - 3, len(tokens) + 1))
    return last and not any(before)
