"""Policy losses with one value per token (B, R), and the critic's loss. `reduction.token_weights` reduces them.

A policy loss is registered under its function's name, except that `clipped_surrogate` is `regular`. `gspo_token` is a
second name of `gspo`.
"""

from skyrl_train.algorithms.losses.clipped import clipped_surrogate, dual_clip, value_loss
from skyrl_train.algorithms.losses.covariance import clip_cov, kl_cov
from skyrl_train.algorithms.losses.masking import LossOutput, Tokens, importance_ratio, within_mask
from skyrl_train.algorithms.losses.sequence import gmpo, gspo, luspo, sequence_ratio, vespo
from skyrl_train.algorithms.losses.weighted import (
    cispo,
    cross_entropy,
    dppo,
    dro,
    importance_sampling,
    policy_gradient,
    rollout_is,
    sapo,
)
