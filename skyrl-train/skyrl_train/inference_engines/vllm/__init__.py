"""The vLLM engine: generates with a copy of the policy's weights, in the trainer's process."""

from skyrl_train.inference_engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
