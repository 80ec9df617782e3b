"""The embedded engine. It generates with the policy's tensors in the trainer's process, or with a copy elsewhere."""

from skyrl_train.inference_engines.hf.engine import HFEngine, load_engine

__all__ = ["HFEngine", "load_engine"]
