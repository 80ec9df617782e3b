"""Identification of a text's language with py3langid, which is deterministic."""

import math
from functools import cache
from typing import Any

from skyrl_gym.envs.ifeval.reply import has_word
from skyrl_gym.optional import require

_CODES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh"
)
LANGUAGES = tuple(_CODES.split())
"""ISO 639-1 codes of the languages to choose from. With more of them, short texts would be ambiguous."""
ALIASES = {"zh-cn": "zh", "zh-tw": "zh", "nb": "no", "fil": "tl", "iw": "he"}
CHUNK_CHARS = 1000
MIN_SHARE = 0.75
"""Minimum share of a text's chunks in the language. Names and quotations may be in other languages."""
MIN_PROBABILITY = 0.1


def check_language(code: str) -> str:
    """Return the code of a known language. Raises ValueError for any other."""
    code = ALIASES.get(code.lower(), code.lower())
    if code not in LANGUAGES:
        raise ValueError(f"should be one of {', '.join(LANGUAGES)}")
    return code


def require_package() -> None:
    """Raise ModuleNotFoundError if py3langid is not installed."""
    require("py3langid", "ifeval", "instructions about languages")


def is_in_language(text: str, language: str) -> bool:
    """Return True if most of a text is in a language.

    The text is divided into chunks, because the evidence of a long text is not calibrated, and so that half a text
    cannot hide behind the other half. A chunk may be in the language if no other is twice as probable.
    """
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    if not has_word(text):
        return False
    n_chunks = math.ceil(len(text) / CHUNK_CHARS)
    size = math.ceil(len(text) / n_chunks)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    n_fitting = 0
    for chunk in chunks:
        ranked = _identifier().rank(chunk)
        probability = dict(ranked)[language]
        n_fitting += probability >= max(MIN_PROBABILITY, ranked[0][1] / 2)
    return n_fitting >= MIN_SHARE * len(chunks)


@cache
def _identifier() -> Any:
    """Load the model: 2 s and 30 MB."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(LANGUAGES)
    return identifier
