"""Settings that reduce the memory of a run, for the error that memory ran out."""

from collections.abc import Iterator
from typing import Any

from skyrl_train.config.base import value_at

PASSES = frozenset({"score", "forward_backward", "probe"})
"""Stages whose memory grows with the tokens of a micro-batch."""


def suggest_settings(cfg: Any, stage: str, *, has_gpu: bool) -> Iterator[str]:
    """Yield the settings that would reduce the memory of a stage, the cheapest first, without those in use.

    `stage` is as in `OutOfMemoryError.stage`. Settings that do not apply to the command or the device are left out.
    """

    def value(key: str) -> Any:
        return value_at(cfg, key, None)

    if stage in PASSES - {"score"} and value("trainer.gradient_checkpointing") is False:
        yield "trainer.gradient_checkpointing=true"
    if stage != "load" and (fraction := value("generator.gpu_memory_utilization")) is not None:
        yield f"a lower generator.gpu_memory_utilization than {fraction:g}"
    optimizer = "trainer.policy.optimizer_config"
    if stage in {"forward_backward", "probe", "optim_step"} and has_gpu and value(f"{optimizer}.cpu_offload") is False:
        yield f"{optimizer}.cpu_offload=true"
    if value("trainer.algorithm.use_kl_loss") and stage != "generate":
        yield "trainer.algorithm.use_kl_loss=false"
    if stage in PASSES | {"generate"}:
        for key in ("generator.sampling_params.max_generate_length", "generator.max_input_length", "data.max_length"):
            if (length := value(key)) is not None:
                yield f"a lower {key} than {length}"
    if stage != "generate" and not value("trainer.policy.model.lora.rank"):
        yield "trainer.policy.model.lora.rank=32"
    yield "a smaller trainer.policy.model.path"
