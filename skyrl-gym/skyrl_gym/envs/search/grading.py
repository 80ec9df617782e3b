"""The reward of Search-R1 (Jin et al., 2025, arXiv:2503.09516): exact match of the last answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.tags import last_between
from skyrl_gym.exact_match import is_match, targets_of


def extract_solution(solution_str: str) -> str | None:
    """The last `<answer>…</answer>` of a text; None without one."""
    answer = last_between(solution_str, "<answer>", "</answer>")
    return None if answer is None else answer.strip()


def compute_score(
    solution_str: str, ground_truth: Mapping[str, Any], format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if the answer is one of `ground_truth["target"]`, else `format_score`; 0 without an answer."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if is_match(answer, targets_of(ground_truth)) else format_score
