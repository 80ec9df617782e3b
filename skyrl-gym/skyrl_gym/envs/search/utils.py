"""SkyRL's names for the grading of search answers."""

from skyrl_gym.envs.exact_match import normalize_answer
from skyrl_gym.envs.search.grading import compute_score, extract_solution

__all__ = ["compute_score", "extract_solution", "normalize_answer"]
