"""Policy optimization as pure functions over tensors: advantages, losses, KL divergence, filters, reductions."""

from skyrl_train.algorithms import advantages, losses
from skyrl_train.algorithms.inputs import required_inputs
from skyrl_train.algorithms.registry import (
    advantage_estimator,
    policy_loss,
    register_advantage_estimator,
    register_policy_loss,
)
