"""The reward of Search-R1 (Jin et al., 2025, arXiv:2503.09516): exact match on the last answer."""

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.exact_match import is_match, parse_targets
from skyrl_gym.envs.tags import last_between
from skyrl_gym.tools.calls import strip_thoughts


def extract_solution(solution_str: str) -> str | None:
    """Return the last `<answer>…</answer>` in a text, or None if there is none."""
    answer = last_between(solution_str, "<answer>", "</answer>")
    return None if answer is None else answer.strip()


def compute_score(
    solution_str: str, ground_truth: Mapping[str, Any], format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` if the answer is one of `ground_truth["target"]`, else `format_score`, or 0 without an answer.

    Thoughts are ignored.

    >>> truth = {"target": ["Mount Fuji", "Fuji"]}
    >>> compute_score("<answer>mount Fuji.</answer>", truth)
    1.0
    >>> compute_score("Mount Fuji", truth)
    0.0
    """
    answer = extract_solution(strip_thoughts(solution_str))
    if answer is None:
        return 0.0
    return score if is_match(answer, parse_targets(ground_truth)) else format_score
