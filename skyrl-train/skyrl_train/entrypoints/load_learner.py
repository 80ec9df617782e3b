"""Load the models of a run on their ranks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.contract import resolve_policy_loss
from skyrl_train.algorithms.objectives import Objective, PolicyObjective, ValueObjective
from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.config import SkyRLConfig, TrainerConfig
from skyrl_train.config.policy import CriticConfig, DividedModelConfig, PolicyConfig, ShardedModelConfig
from skyrl_train.config.run import RunConfig
from skyrl_train.config.supervised import DPOTrainerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.launch.launcher import Launcher, ModelLauncher
from skyrl_train.learner import Learner
from skyrl_train.media.processing import save_tokenizer
from skyrl_train.models.loading import CRITIC_PATH, POLICY_PATH, REF_PATH, check_same_tokens, check_vocabulary_size
from skyrl_train.types.specs import ModelSpec, OptimizerSpec, Role, lora_spec
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads the models of a run with a launcher."""

    cfg: RunConfig
    launcher: ModelLauncher
    tokenizer: PreTrainedTokenizerBase
    temperature: float = 1.0
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a turn, in addition to the EOS token."""

    async def load_trained(
        self,
        role: Role,
        load: Callable[[], PreTrainedModel],
        objective: Objective,
        section: PolicyConfig | CriticConfig,
        n_steps: int,
        *,
        replays_experts: bool = False,
    ) -> WorkerGroup:
        """Load a model to train for `n_steps` optimizer steps. `section` has its settings."""
        key = f"trainer.{'critic' if role == 'critic' else 'policy'}"
        optimizer = OptimizerSpec(section.optimizer_config, n_steps, self.cfg.seed)
        if optimizer.n_warmup_steps >= n_steps:
            logger.warning(
                "%s.optimizer_config.num_warmup_steps=%d is not below the %d optimizer steps of this run: the learning "
                "rate only rises; lower it, or train longer",
                *(key, optimizer.n_warmup_steps, n_steps),
            )
        lora = lora_spec(section.model, f"{key}.model.lora", self.cfg.seed)
        spec = replace(
            self._spec(role, load, section),
            optimizer=optimizer,
            lora=lora,
            train_dtype=section.model.train_dtype,
            trains_vision=not section.model.freeze_vision,
            replays_experts=replays_experts,
        )
        return await self.launcher.load(spec, objective)

    async def load_reference(
        self,
        trainer: TrainerConfig | DPOTrainerConfig,
        load: Callable[[str, str], PreTrainedModel],
        policy: WorkerGroup,
    ) -> WorkerGroup:
        """Load the frozen reference. If the reference is the policy without its adapter, return the policy.

        `load` loads the causal language model at a path, the value of a configuration key. Raise ConfigError if no
        model is there, or if its vocabulary is not the policy's.
        """
        if trainer.policy_is_reference:
            return policy
        path, model = trainer.ref.model.path, trainer.policy.model
        if path != model.path:
            check_same_tokens(path, REF_PATH, self.tokenizer)
        has_adapter = trainer.ref.shares_adapter_with(model)
        lora = lora_spec(model, "trainer.policy.model.lora", trainer.seed) if has_adapter else None
        spec = self._spec("ref", partial(load, path, REF_PATH), trainer.ref)
        ref = await self.launcher.load(replace(spec, lora=lora), None)
        check_vocabulary_size(ref.facts.n_embeddings, REF_PATH, path, policy.facts.n_embeddings)
        return ref

    def _spec(self, role: Role, load: Callable[[], PreTrainedModel], sharding: ShardedModelConfig) -> ModelSpec:
        save, eos_ids = partial(save_tokenizer, self.tokenizer), [self.tokenizer.eos_token_id, *self.stop_token_ids]
        return model_spec(role, load, save, self.cfg, self.temperature, sharding=sharding, eos_ids=eos_ids)


async def load_learner(
    root: SkyRLConfig,
    launcher: Launcher,
    tokenizer: PreTrainedTokenizerBase,
    get_model: Callable[[str, str], PreTrainedModel],
    get_value_model: Callable[[str], PreTrainedModel],
    total_steps: int,
) -> Learner:
    """Load the policy, and the critic and the reference if the configuration uses them.

    `get_model` loads the causal language model at a path, the value of a configuration key. `get_value_model` loads the
    critic at a path. Raise ConfigError if there is no model at a path, or if the models do not fit together.
    """
    cfg, stop_token_ids = root.trainer, root.generator.sampling_params.stop_token_ids
    n_prompts = total_steps * cfg.train_batch_size * cfg.update_epochs_per_batch
    loader = ModelLoader(cfg, launcher, tokenizer, cfg.algorithm.temperature, stop_token_ids)
    if (critic_path := cfg.critic.model.path) is not None:
        check_same_tokens(critic_path, CRITIC_PATH, tokenizer)
    policy = await loader.load_trained(
        "policy",
        partial(get_model, cfg.policy.model.path, POLICY_PATH),
        PolicyObjective(resolve_policy_loss(cfg.algorithm), cfg.algorithm),
        cfg.policy,
        n_prompts // cfg.policy_mini_batch_size,
        replays_experts=cfg.algorithm.router_replay,
    )
    critic, ref, reference_sync = None, None, None
    if critic_path is not None:
        objective, n_steps = ValueObjective(cfg.algorithm.value_clip), n_prompts // cfg.critic_mini_batch_size
        load = partial(get_value_model, critic_path)
        critic = await loader.load_trained("critic", load, objective, cfg.critic, n_steps)
        check_vocabulary_size(critic.facts.n_embeddings, CRITIC_PATH, critic_path, policy.facts.n_embeddings)
    if reads_reference(cfg.algorithm):
        ref = await loader.load_reference(cfg, get_model, policy)
        if cfg.update_ref_every_epoch:
            if await policy.tensor_specs() != await ref.tensor_specs():
                raise ConfigError(
                    "trainer.update_ref_every_epoch=true makes the policy the reference, but "
                    "trainer.ref.model.path has another architecture; set trainer.update_ref_every_epoch=false, "
                    "or omit trainer.ref.model.path"
                )
            reference_sync = launcher.weight_sync(policy, {"the reference": ref})
    estimator = advantage_estimator(cfg.algorithm.advantage_estimator)
    return Learner(cfg, estimator, policy=policy, critic=critic, ref=ref, reference_sync=reference_sync)


def model_spec(
    role: Role,
    load: Callable[[], PreTrainedModel],
    save_tokenizer: Callable[[str], Any],
    cfg: RunConfig,
    temperature: float,
    sharding: ShardedModelConfig | None = None,
    eos_ids: Sequence[int] = (),
) -> ModelSpec:
    """Return the specification of one model. `cfg.strategy` decides which fields of `sharding` are used."""
    sharding = sharding or ShardedModelConfig()
    megatron = sharding.megatron_config if isinstance(sharding, DividedModelConfig) else None
    return ModelSpec(
        role=role,
        load=load,
        save_tokenizer=save_tokenizer,
        eos_ids=tuple(eos_ids),
        fsdp=sharding.fsdp_config,
        sequence_parallel_size=sharding.sequence_parallel_size,
        megatron=megatron if cfg.strategy_traits.is_model_parallel else None,
        temperature=temperature,
        bf16=cfg.bf16,
        activation_offload=cfg.activation_offload,
        max_tokens_per_micro_batch=cfg.max_tokens_per_microbatch,
        max_rows_forward=cfg.micro_forward_batch_size_per_gpu,
        max_rows_train=cfg.micro_train_batch_size_per_gpu,
    )
