"""A worker that compares answers: it is asked ``[answer, gold, seconds]``, and says ``{"is_correct": …}``."""

from __future__ import annotations

import logging
import sys
from typing import Any

from skyrl_gym.worker_pool.serving import serve

MEMORY_BYTES = 512 << 20  # Python and sympy take about 130 MiB
SPENT_BYTES = 256 << 20


def answer(question: list[Any]) -> dict[str, Any]:
    """The verdict."""
    given, gold, _ = question
    return {"is_correct": is_same(given, gold)}


def is_same(answer: str, gold: str) -> bool | None:
    """What math-verify says, with its own alarms off; None where it finds nothing in `gold`."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as compare

    box = [LatexExtractionConfig(boxed_match_priority=0)]
    right, given = (parse(_latex(text), box, parsing_timeout=None) for text in (gold, answer))
    return bool(compare(right, given, timeout_seconds=None)) if right else None


def _latex(text: str) -> str:
    r"""As math-verify wants it: in a box; a percentage, which it does not read in a box, as ``$50$\%``."""
    if not text.rstrip(" $").endswith("%"):
        return rf"\boxed{{{text}}}"
    number = text.strip(" $").removesuffix("%").removesuffix("\\")
    return rf"${number}$\%"


if __name__ == "__main__":
    logging.disable()  # math-verify warns that its alarms are off
    is_same("1", "1")  # imports, and tables that are built once, are not on the first answer's time
    serve(int(sys.argv[1]), answer, memory_bytes=MEMORY_BYTES, spent_bytes=SPENT_BYTES)
