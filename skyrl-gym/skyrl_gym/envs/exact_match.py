"""Exact match of the answer to an open question.

Source: the normalization of SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(answer: str) -> str:
    """Lowercase an answer, and remove punctuation, articles and redundant spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def is_match(answer: str, targets: Sequence[str]) -> bool:
    """Return True if the normalized answer is one of the targets.

    A target that normalizes to nothing, e.g. "A", is compared without normalization, ignoring case.
    """
    normalized, plain = normalize_answer(answer), answer.strip().lower()
    return any(
        normalized == expected if (expected := normalize_answer(target)) else plain == target.strip().lower()
        for target in targets
    )


def parse_targets(ground_truth: Any) -> list[str]:
    """Return the accepted answers of a ground truth.

    Raises:
        ValueError: it has none.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, Sequence) or not targets or not all(isinstance(text, str) for text in targets):
        raise ValueError(f"ground_truth={ground_truth!r} must be {{'target': text or a list of texts}}")
    return list(targets)
