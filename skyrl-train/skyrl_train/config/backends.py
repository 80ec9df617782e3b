"""Traits of engines and training strategies, one row each.

Other code checks a trait, not a name. A new engine is a folder in `inference_engines/` and a row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Traits of an inference engine."""

    label: str
    """Display name, e.g. `vLLM`."""

    start: str
    """`module:function` that creates an engine from an `inference_engines.base.EngineSetup`."""

    connect: str | None = None
    """`module:function` that connects to a running server at an address, or None if it does not run as a server."""

    package: str | None = None
    """Package that an engine on this machine needs, or None for the embedded engine."""

    reads_files: bool = False
    """It loads new weights from files, even if the run has started it. Other engines receive tensors."""

    records_experts: bool = False
    """It reports which experts of a mixture computed a token, for `trainer.algorithm.router_replay`."""

    needs_ray_for_several_devices: bool = True

    reports_only_own_logprobs: bool = False
    """It reports the log-probs of the distribution that it samples from, even if that is not the policy's."""

    has_samplers: bool = False
    """It samples either on its own or with our sampler, as `generator.vllm.sampler` says."""

    @property
    def is_embedded(self) -> bool:
        """It generates in this process with a model loaded by transformers, such as the policy itself."""
        return self.package is None


EMBEDDED = "hf"

ENGINES = {
    EMBEDDED: EngineTraits(
        "the embedded engine", "skyrl_train.inference_engines.hf.engine:start", records_experts=True
    ),
    "vllm": EngineTraits(
        "vLLM",
        "skyrl_train.inference_engines.vllm.start:start",
        connect="skyrl_train.inference_engines.vllm.start:connect",
        package="vllm",
        has_samplers=True,
    ),
    "sglang": EngineTraits(
        "SGLang",
        "skyrl_train.inference_engines.sglang.engine:start",
        connect="skyrl_train.inference_engines.sglang.engine:connect",
        package="sglang",
        reads_files=True,
        needs_ray_for_several_devices=False,
        reports_only_own_logprobs=True,
    ),
}
"""Engines by the value of `generator.backend`."""


def check_engine(name: str) -> str:
    """Return `name` if it is an engine or `auto`. Raise ValueError otherwise."""
    if name != "auto" and name not in ENGINES:
        raise ValueError(f"{name} is not an engine")
    return name


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """Traits of a training strategy, i.e. of a way to split a model over its ranks."""

    is_model_parallel: bool = False
    """Ranks share matrices, layers and rows (`megatron_config`). Otherwise they shard the weights (`fsdp_config`)."""

    package: str | None = None
    """Package that it needs in addition to PyTorch."""

    has_scalar_heads: bool = True
    """It trains critics and reward models, not only language models."""


StrategyName = Literal["fsdp2", "fsdp", "megatron"]

FSDP2 = StrategyTraits()
STRATEGIES: Mapping[StrategyName, StrategyTraits] = {
    "fsdp2": FSDP2,
    "fsdp": FSDP2,
    "megatron": StrategyTraits(is_model_parallel=True, package="megatron", has_scalar_heads=False),
}
"""Strategies by the value of `trainer.strategy`."""
