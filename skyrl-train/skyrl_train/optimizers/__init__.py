"""Optimizers of trained weights, and what they keep in short dtypes or in host memory."""

from skyrl_train.optimizers.adamw import AdamW
from skyrl_train.optimizers.create import create_optimizer, hidden_matrices
from skyrl_train.optimizers.host_weights import HostWeights
from skyrl_train.optimizers.muon import Muon
