"""Model and optimizer specifications from a run's configuration."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from skyrl_train.config.policy import DividedModelConfig, OptimizerConfig, ShardedModelConfig
from skyrl_train.config.run import RunConfig
from skyrl_train.types.specs import LoraSpec, ModelSpec, OptimizerSpec, Role

logger = logging.getLogger(__name__)


def model_spec(
    role: Role,
    load: Callable[[], PreTrainedModel],
    save_tokenizer: Callable[[str], Any],
    cfg: RunConfig,
    temperature: float,
    optimizer: OptimizerSpec | None = None,
    lora: LoraSpec | None = None,
    sharding: ShardedModelConfig | None = None,
    eos_ids: Sequence[int] = (),
    replays_experts: bool = False,
) -> ModelSpec:
    """Return the specification of one model. `cfg.strategy` decides which fields of `sharding` are used."""
    sharding = sharding or ShardedModelConfig()
    megatron = sharding.megatron_config if isinstance(sharding, DividedModelConfig) else None
    return ModelSpec(
        role=role,
        load=load,
        save_tokenizer=save_tokenizer,
        eos_ids=tuple(eos_ids),
        replays_experts=replays_experts,
        optimizer=optimizer,
        lora=lora,
        fsdp=sharding.fsdp_config,
        sequence_parallel_size=sharding.sequence_parallel_size,
        megatron=megatron if cfg.strategy_traits.is_model_parallel else None,
        temperature=temperature,
        bf16=cfg.bf16,
        max_tokens_per_micro_batch=cfg.max_tokens_per_microbatch,
        max_rows_forward=cfg.micro_forward_batch_size_per_gpu,
        max_rows_train=cfg.micro_train_batch_size_per_gpu,
    )


def optimizer_spec(cfg: OptimizerConfig, key: str, n_steps: int) -> OptimizerSpec:
    """Return the specification of an optimizer whose schedule spans the run's `n_steps` optimizer steps.

    Log a warning if warm-up takes the whole run. `key` is the optimizer's section, for the message.
    """
    n_warmup_steps = cfg.num_warmup_steps or int(cfg.warmup_ratio * n_steps)
    if n_warmup_steps >= n_steps:
        logger.warning(
            "%s.num_warmup_steps=%d is not below the %d optimizer steps of this run: the learning rate only rises; "
            "lower it, or train longer",
            *(key, n_warmup_steps, n_steps),
        )
    return OptimizerSpec(
        lr=cfg.lr,
        betas=cfg.adam_betas,
        weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.max_grad_norm,
        scheduler=cfg.scheduler,
        n_warmup_steps=n_warmup_steps,
        n_steps=n_steps,
        n_decay_steps=round(cfg.wsd_decay_ratio * max(0, n_steps - n_warmup_steps)),
    )
