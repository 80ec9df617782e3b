"""The embedded engine. It generates with the policy's tensors in the trainer's process, or with a copy elsewhere."""

from skyrl_train.inference_engines.hf.engine import create_engine, load_engine
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.inference_engines.hf.packed import PackedEngine
