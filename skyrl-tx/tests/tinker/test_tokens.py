from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tx_tiny_models import new_tokenizer

from tx.tinker.tokens import MOST_STOP_CHARACTERS, Decoder
from tx.tinker.types import UserError


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    """With a token for each byte."""
    new_tokenizer().save_pretrained(tmp_path)
    return Decoder(tmp_path)


def tokens_of(text: str) -> list[int]:
    found: list[int] = new_tokenizer().encode(text)
    return found


def test_a_string_ends_where_its_last_byte_does(decoder: Decoder) -> None:
    tokens = tokens_of("naïve 😀")
    assert len(tokens) == 11
    assert [decoder.holds_any(tokens[:n], ["x", "ï"]) for n in (3, 4)] == [False, True]
    assert [decoder.holds_any(tokens[:n], ["😀"]) for n in (10, 11)] == [False, True]


def test_the_longest_strings_may_have_more_tokens_than_characters(decoder: Decoder) -> None:
    string = "😀" * MOST_STOP_CHARACTERS
    tokens = tokens_of(f"so {string}")
    assert len(tokens) > 4 * MOST_STOP_CHARACTERS
    assert [decoder.holds_any(tokens[:-n], ["x", string]) for n in (2, 1)] == [False, False]
    assert decoder.holds_any(tokens, ["x", string])


def test_what_is_before_a_string_may_be_anything(decoder: Decoder, tmp_path: Path) -> None:
    """Also for tokenizers that decode bytes only where all that stand together are characters."""
    other = Tokenizer(BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    other.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    (tmp_path / "other").mkdir()
    other.save(str(tmp_path / "other" / "tokenizer.json"))
    for filling in ("a", "é", "€", "😀"):
        text = filling * 70
        assert decoder_holds(decoder, tokens_of(text + "stop€"))
        assert decoder_holds(Decoder(tmp_path / "other"), list((text + "stop€").encode()))


def decoder_holds(decoder: Decoder, tokens: list[int]) -> bool:
    """Whether a string is found at the end, and not before."""
    *before, last = (decoder.holds_any(tokens[:n], ["stop€"]) for n in range(len(tokens) - 3, len(tokens) + 1))
    return last and not any(before)


def test_special_tokens_are_text_too(decoder: Decoder) -> None:
    assert decoder.holds_any(tokens_of("so<|im_end|>"), ["<|im_end|>"])


def test_strings_need_a_tokenizer(decoder: Decoder, tmp_path: Path) -> None:
    decoder.check(["stop"])
    Decoder(tmp_path / "empty").check([])
    with pytest.raises(UserError, match="stop strings need the model's tokenizer"):
        Decoder(tmp_path / "empty").check(["stop"])
