"""Language models that judge replies: rubrics, several judges, pairs, and agreement with labelled samples.

    panel = load_panel("judge.yaml")
    panel.judge("What is the capital of France?", "It is Paris.", "Paris").score    # 1.0, 0.0, or None: unknown

A judge that gives no verdict makes the score unknown, never 0.
"""

from skyrl_gym.judges.judge import Comparison, Judge, Judgement
from skyrl_gym.judges.panel import Panel, load_panel
from skyrl_gym.judges.rubric import CORRECTNESS, Criterion, Rubric

__all__ = ["CORRECTNESS", "Comparison", "Criterion", "Judge", "Judgement", "Panel", "Rubric", "load_panel"]
