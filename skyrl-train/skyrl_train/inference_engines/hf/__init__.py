"""The embedded engine: generates with the policy's own tensors, in the trainer's process."""

from skyrl_train.inference_engines.hf.engine import HFEngine

__all__ = ["HFEngine"]
