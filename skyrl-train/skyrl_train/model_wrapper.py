"""The model with its scores under the name that SkyRL's scripts import.

The constructor takes a loaded model (`skyrl_train.models.loading.load_model`) instead of a path, and `score` takes a
`TrainingBatch`.
"""

from skyrl_train.models.scoring_module import ScoringModule

HFModelWrapper = ScoringModule

__all__ = ["HFModelWrapper"]
