"""The learner of a run, with its policy, critic and reference."""

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.contract import resolve_policy_loss
from skyrl_train.algorithms.objectives import Objective, PolicyObjective, ValueObjective
from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.policy import CriticConfig, PolicyConfig
from skyrl_train.errors import ConfigError
from skyrl_train.launch.launcher import Launcher
from skyrl_train.launch.specs import model_spec, optimizer_spec
from skyrl_train.learner import Learner
from skyrl_train.models.loading import CRITIC_PATH, POLICY_PATH, REF_PATH, check_same_vocabulary, check_vocabulary_size
from skyrl_train.types.specs import LoraSpec, Role, lora_spec
from skyrl_train.workers.group import WorkerGroup


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
    critic at a path.

    Raises:
        ConfigError: there is no model at a path, or the models do not fit together.
    """
    cfg = root.trainer
    n_prompts = total_steps * cfg.train_batch_size * cfg.update_epochs_per_batch

    async def load(
        role: Role,
        model: Callable[[], PreTrainedModel],
        objective: Objective | None = None,
        trained: PolicyConfig | CriticConfig | None = None,
        lora: LoraSpec | None = None,
    ) -> WorkerGroup:
        optimizer = None
        if trained is not None:
            size = cfg.policy_mini_batch_size if role == "policy" else cfg.critic_mini_batch_size
            optimizer = optimizer_spec(trained.optimizer_config, f"trainer.{role}.optimizer_config", n_prompts // size)
            lora = lora_spec(trained.model, f"trainer.{role}.model.lora", cfg.seed)
        spec = model_spec(
            role,
            model,
            tokenizer.save_pretrained,
            cfg,
            cfg.algorithm.temperature,
            optimizer=optimizer,
            lora=lora,
            sharding={"policy": cfg.policy, "critic": cfg.critic, "ref": cfg.ref}[role],
            eos_ids=[tokenizer.eos_token_id, *root.generator.sampling_params.stop_token_ids],
        )
        return await launcher.load(spec, objective)

    objective = PolicyObjective(resolve_policy_loss(cfg.algorithm), cfg.algorithm)
    policy = await load("policy", partial(get_model, cfg.policy.model.path, POLICY_PATH), objective, cfg.policy)
    n_embeddings = policy.facts.n_embeddings
    critic, ref, reference_sync = None, None, None
    if (path := cfg.critic.model.path) is not None:
        check_same_vocabulary(path, CRITIC_PATH, tokenizer)
        value_objective = ValueObjective(cfg.algorithm.value_clip)
        critic = await load("critic", partial(get_value_model, path), value_objective, cfg.critic)
        check_vocabulary_size(critic.facts.n_embeddings, CRITIC_PATH, path, n_embeddings)
    if reads_reference(cfg.algorithm) and cfg.policy_is_reference:
        ref = policy
    elif reads_reference(cfg.algorithm):
        check_same_vocabulary(cfg.ref.model.path, REF_PATH, tokenizer)
        lora = lora_spec(cfg.policy.model, "trainer.policy.model.lora", cfg.seed)
        lora = lora if cfg.ref.shares_adapter_with(cfg.policy.model) else None
        ref = await load("ref", partial(get_model, cfg.ref.model.path, REF_PATH), lora=lora)
        check_vocabulary_size(ref.facts.n_embeddings, REF_PATH, cfg.ref.model.path, n_embeddings)
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
