"""A worker that compares answers: it receives ``[answer, gold, seconds]``, and answers ``{"is_correct": …}``."""

from __future__ import annotations

import logging
import sys
from typing import Any

from skyrl_gym.worker_pool.serving import serve

MEMORY_BYTES = 512 << 20  # Python and sympy use about 130 MiB
RECYCLE_BYTES = 256 << 20


def answer(question: list[Any]) -> dict[str, Any]:
    """Compare an answer with the ground truth."""
    candidate, gold, _ = question
    return {"is_correct": is_same(candidate, gold)}


def is_same(answer: str, gold: str) -> bool | None:
    """Return the verdict of math-verify, without its timeouts; None if it cannot parse `gold`."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as compare

    box = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed_gold, parsed_answer = (parse(_latex(text), box, parsing_timeout=None) for text in (gold, answer))
    return bool(compare(parsed_gold, parsed_answer, timeout_seconds=None)) if parsed_gold else None


def _latex(text: str) -> str:
    r"""Format an answer for math-verify: in a box, except for a percentage, which must be written as ``$50$\%``."""
    if not text.rstrip(" $").endswith("%"):
        return rf"\boxed{{{text}}}"
    number = text.strip(" $").removesuffix("%").removesuffix("\\")
    return rf"${number}$\%"


if __name__ == "__main__":
    logging.disable()  # math-verify warns that its timeouts are off
    is_same("1", "1")  # warm-up: imports and tables must not count towards the first answer's time
    serve(int(sys.argv[1]), answer, memory_bytes=MEMORY_BYTES, recycle_bytes=RECYCLE_BYTES)
