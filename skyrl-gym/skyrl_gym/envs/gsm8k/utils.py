"""SkyRL's names for the grading of GSM8K."""

from skyrl_gym.envs.gsm8k.grading import compute_score, extract_solution

__all__ = ["compute_score", "extract_solution"]
