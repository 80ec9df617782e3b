"""`custom_reward_function.path=tools/reward-manager.py`: scores of replies to generated tasks."""

from skyrl_gym.tasks.registry import compute_lgc_v2_score, compute_score

__all__ = ["compute_lgc_v2_score", "compute_score"]
