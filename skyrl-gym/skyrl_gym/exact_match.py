"""Exact match of an answer, as it is usual for open questions.

Source: the normalisation of SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(answer: str) -> str:
    """Without capitals, punctuation, articles and needless space."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def is_match(answer: str, targets: Sequence[str]) -> bool:
    """Whether an answer is one of the targets, normalised. One of which nothing would be left, e.g. "A", is compared
    as it stands.
    """
    normalized, plain = normalize_answer(answer), answer.strip().lower()
    return any(
        normalized == wanted if (wanted := normalize_answer(target)) else plain == target.strip().lower()
        for target in targets
    )


def targets_of(ground_truth: Any) -> list[str]:
    """The right answers, of which one will do.

    Raises:
        ValueError: there are none.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, Sequence) or not targets or not all(isinstance(one, str) for one in targets):
        raise ValueError(f"ground_truth={ground_truth!r} must be {{'target': text or a list of texts}}")
    return list(targets)
