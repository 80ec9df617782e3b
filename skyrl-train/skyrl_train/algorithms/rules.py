"""Configuration rules that depend on the estimator and the policy loss.

They read the registry, so custom functions obey the same rules as built-in ones. Rules that need only the configuration
are in `skyrl_train.config.rules`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from skyrl_train.algorithms.contract import check_advantage_estimator, estimator_traits, resolve_policy_loss
from skyrl_train.algorithms.inputs import INPUTS, readable_inputs, required_inputs
from skyrl_train.algorithms.registry import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    EstimatorTraits,
    LossTraits,
    advantage_estimator,
    is_built_in,
)
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.problems import FIELDS, Rule, raise_problems, show
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.config.rules import find_problems
from skyrl_train.config.rules.algorithm import group_filters
from skyrl_train.config.rules.placement import find_other_size, find_unused_size
from skyrl_train.errors import ConfigError


@dataclass(slots=True)
class Functions:
    """The configured estimator and loss, resolved once. The defaults of their traits pass every rule."""

    estimator: EstimatorTraits = field(default_factory=EstimatorTraits)
    loss: LossTraits = field(default_factory=LossTraits)
    required: frozenset[str] = frozenset()  # inputs that the estimator needs
    readable: frozenset[str] = INPUTS  # inputs that it may read


def inspect_functions(config: AlgorithmConfig) -> tuple[Functions, list[str]]:
    """Return the configured functions' properties, and one sentence for each function that breaks its contract."""
    name, functions, problems = config.advantage_estimator, Functions(), []
    if name in ADVANTAGE_ESTIMATORS.list_available():
        estimator = ADVANTAGE_ESTIMATORS.get(name)
        functions.required, functions.readable = required_inputs(estimator), readable_inputs(estimator)
        functions.estimator = ADVANTAGE_ESTIMATORS.traits(name)
        try:
            if not is_built_in(estimator):  # tests cover built-in ones, and checking would load PyTorch
                check_advantage_estimator(estimator, config)
                functions.estimator = estimator_traits(config)
        except ConfigError as error:
            problems.append(str(error))
    if config.policy_loss_type in POLICY_LOSSES.list_available():
        functions.loss = POLICY_LOSSES.traits(config.policy_loss_type)
        try:
            if not is_built_in(POLICY_LOSSES.get(config.policy_loss_type)):
                resolve_policy_loss(config)
        except ConfigError as error:
            problems.append(str(error))
    return functions, problems


def reads_reference(config: AlgorithmConfig) -> bool:
    """Return True if a KL term or the estimator needs reference log-probs."""
    name, known = config.advantage_estimator, ADVANTAGE_ESTIMATORS.entries
    is_required = name in known and "ref_log_probs" in required_inputs(ADVANTAGE_ESTIMATORS.get(name))
    return config.compares_with_reference or is_required


def loads_reference(cfg: SkyRLConfig) -> bool:
    """Return True if the run loads the reference as a separate model."""
    return reads_reference(cfg.trainer.algorithm) and not cfg.trainer.policy_is_reference


def functions_fit_the_run(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject an estimator or a loss that breaks its contract or does not fit the rest of the configuration."""
    algorithm = cfg.trainer.algorithm
    functions, problems = inspect_functions(algorithm)
    traits = functions.estimator
    estimator = f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator}"
    loss = f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}"
    yield from problems
    if "values" in functions.required and cfg.trainer.critic.model.path is None:
        yield (
            f"{estimator} needs a critic's values, but trainer.critic.model.path=null trains no critic; set "
            f"trainer.critic.model.path={show(cfg.trainer.policy.model.path)}, or "
            "trainer.algorithm.advantage_estimator=grpo"
        )
    if algorithm.use_kl_in_reward and "token_level_rewards" not in functions.readable:
        yield (
            f"trainer.algorithm.use_kl_in_reward=true changes the rewards of tokens, but {estimator} ignores them; set "
            "trainer.algorithm.use_kl_in_reward=false, and trainer.algorithm.use_kl_loss=true for a KL loss"
        )
    is_compared = algorithm.compares_with_reference or "ref_log_probs" in functions.readable
    if cfg.trainer.update_ref_every_epoch and not is_compared:
        yield (
            "trainer.update_ref_every_epoch=true updates a reference that nothing uses, because "
            "trainer.algorithm.use_kl_loss=false and trainer.algorithm.use_kl_in_reward=false; set one of them to "
            "true, or trainer.update_ref_every_epoch=false"
        )
    is_refused = algorithm.advantage_estimator != "grpo"  # SkyRL's scripts run grpo with one sample: a warning
    if cfg.generator.n_samples_per_prompt == 1 and traits.compares_samples and is_refused:
        yield (
            f"{estimator} compares the samples of one prompt, but generator.n_samples_per_prompt=1 leaves nothing to "
            "compare; try generator.n_samples_per_prompt=5, or trainer.algorithm.advantage_estimator=reinforce++"
        )
    for key, value, off in group_filters(cfg):
        if traits.compares == "nothing":
            yield (
                f"{key}={value} leaves out groups of equal rewards, but {estimator} compares no rewards and learns as "
                f"much from them; set {key}={off}"
            )
    if functions.loss.per_sequence and traits.per_token:
        yield (
            f"{loss} needs one advantage per trajectory, but {estimator} computes one per token; try "
            "trainer.algorithm.policy_loss_type=gspo or dual_clip, or trainer.algorithm.advantage_estimator=grpo"
        )
    reason = functions.loss.conflict_with_correction
    for name, switch in algorithm.off_policy_correction.switches.items() if reason else ():
        key = f"trainer.algorithm.off_policy_correction.{name}"
        yield (
            f"{key}={show(switch)} cannot be combined with {loss}, which {reason}; set {key}=null, or "
            "trainer.algorithm.policy_loss_type=dual_clip"
        )


def functions_are_used_as_intended(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn about settings that probably do not suit the estimator or the loss."""
    algorithm, critic = cfg.trainer.algorithm, cfg.trainer.critic.model.path
    functions, _problems = inspect_functions(algorithm)
    traits, published = functions.loss, functions.loss.loss_reduction
    estimator = f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator}"
    loss = f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}"
    learns_from_equal_totals = functions.estimator.compares in ("parts", "baseline")
    for key, value, off in group_filters(cfg) if learns_from_equal_totals else ():
        yield (
            f"{key}={value} leaves out groups of equal total rewards, but {estimator} also learns from them; "
            f"{key}={off} keeps them"
        )
    if critic is not None and "values" not in functions.readable:
        yield (
            f"trainer.critic.model.path={show(critic)} trains a critic, but {estimator} ignores its values; set "
            "trainer.critic.model.path=null, or trainer.algorithm.advantage_estimator=gae"
        )
    if cfg.trainer.algorithm.advantage_batch_normalize and functions.estimator.whitens:
        yield (
            f"trainer.algorithm.advantage_batch_normalize=true normalizes advantages that {estimator} has already "
            "whitened; set trainer.algorithm.advantage_batch_normalize=false"
        )
    if published is not None and algorithm.loss_reduction != published:
        mean = "a mean over trajectories" if published == "sequence_mean" else published
        yield (
            f"{loss} was published with {mean}, but trainer.algorithm.loss_reduction={algorithm.loss_reduction} "
            f"weights tokens differently; set trainer.algorithm.loss_reduction={published}"
        )
    own = [key for key in FIELDS if key.startswith(f"trainer.algorithm.{algorithm.policy_loss_type}.")]
    for name in ("eps_clip_low", "eps_clip_high"):
        value = getattr(algorithm, name)
        if not traits.reads_eps_clip and value != FIELDS[f"trainer.algorithm.{name}"].get_default():
            bounds = f"; its settings are {', '.join(own)}" if own else ", which clips nothing"
            yield f"trainer.algorithm.{name}={value} is ignored by {loss}{bounds}"
    settings = cfg.trainer.fully_async
    corrects = traits.reads_rollout_logprobs or bool(algorithm.off_policy_correction.switches)
    if settings.enabled and settings.max_staleness_steps > 0 and not corrects:
        level = "sequence" if traits.per_sequence else "token"
        correction = f"off_policy_correction.tis_ratio_type={level}"
        yield (
            f"trainer.fully_async.max_staleness_steps={settings.max_staleness_steps} trains on rollouts from older "
            f"weights, but {loss} does not correct for that; set "
            f"trainer.algorithm.{'policy_loss_type=rollout_is' if traits.whole_batch else correction}"
        )
    for name in ("tis_ratio_type", "token_mask_is_threshold_high"):
        switch = algorithm.off_policy_correction.switches.get(name, "sequence")
        if traits.per_sequence and switch != "sequence":
            yield (
                f"trainer.algorithm.off_policy_correction.{name}={show(switch)} weights single tokens, but {loss} has "
                "one ratio per trajectory; try trainer.algorithm.off_policy_correction.tis_ratio_type=sequence, or "
                "trainer.algorithm.policy_loss_type=gspo"
            )


def reference_has_the_size_of_its_devices(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject a reference that shares the policy's GPUs but is configured with a different number of them."""
    if loads_reference(cfg):
        yield from find_other_size(cfg.trainer.placement, "ref")


def reference_is_placed_if_there_is_one(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn about GPUs for a reference that is not loaded."""
    is_read = reads_reference(cfg.trainer.algorithm)
    if not is_read or cfg.trainer.policy_is_reference:
        reason = "the reference is the policy without its adapter" if is_read else "the run has no reference"
        yield from find_unused_size(cfg.trainer.placement, "ref", reason)


ALGORITHM_RULES: tuple[Rule, ...] = (functions_fit_the_run, reference_has_the_size_of_its_devices)
ALGORITHM_WARNINGS: tuple[Rule, ...] = (functions_are_used_as_intended, reference_is_placed_if_there_is_one)


def algorithm_warnings(cfg: SkyRLConfig) -> list[str]:
    """Return a sentence for each unusual setting of the algorithm."""
    return find_problems(cfg, ALGORITHM_WARNINGS)


def check_algorithm(cfg: SkyRLConfig) -> None:
    """Raise ConfigError unless the estimator and the loss are registered and suit the configuration."""
    advantage_estimator(cfg.trainer.algorithm.advantage_estimator)
    resolve_policy_loss(cfg.trainer.algorithm)
    raise_problems(find_problems(cfg, ALGORITHM_RULES))
