"""SkyRL's names for the grading of AIME."""

from skyrl_gym.envs.aime.grading import compute_score
from skyrl_gym.envs.aime.grading import normalize_answer as normalize_final_answer

__all__ = ["compute_score", "normalize_final_answer"]
