"""Rules of `trainer.algorithm.*`: what is refused because it cannot work, or cannot teach anything."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.base import value_at
from skyrl_train.config.built_in import (
    CHOOSE_TOKENS,
    COMPARE_NOTHING,
    COMPARE_SAMPLES,
    ESTIMATORS,
    PER_TOKEN,
    READ_NO_TOKEN_REWARDS,
    READ_ROLLOUT_LOGPROBS,
    READ_VALUES,
    SEQUENCE_LOSSES,
    reads_reference,
)
from skyrl_train.config.problems import Rule, show
from skyrl_train.config.root import SkyRLConfig


def estimator_has_a_critic(cfg: SkyRLConfig) -> Iterator[str]:
    """Generalised advantage estimation reads values."""
    estimator = cfg.trainer.algorithm.advantage_estimator
    if estimator in READ_VALUES and cfg.trainer.critic.model.path is None:
        yield (
            f"trainer.algorithm.advantage_estimator={estimator} reads the values of a critic, and "
            "trainer.critic.model.path=null trains none; set "
            f"trainer.critic.model.path={show(cfg.trainer.policy.model.path)}, or "
            "trainer.algorithm.advantage_estimator=grpo"
        )


def steps_share_one_advantage(cfg: SkyRLConfig) -> Iterator[str]:
    """Rows of one trajectory share its advantage, so that it cannot differ from token to token."""
    algorithm = cfg.trainer.algorithm
    if not cfg.generator.step_wise_trajectories:
        return
    if algorithm.advantage_estimator in PER_TOKEN:
        yield (
            "generator.step_wise_trajectories=true gives all rows of a trajectory one advantage, and those of "
            f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} differ from token to token; try "
            "grpo, or leave step_wise_trajectories out: by default, too, a trajectory's turns are learned from together"
        )
    if algorithm.use_kl_in_reward:
        yield (
            "generator.step_wise_trajectories=true takes the rewards of a trajectory's last row, and "
            "trainer.algorithm.use_kl_in_reward=true puts penalties on all of them; set "
            "trainer.algorithm.use_kl_in_reward=false trainer.algorithm.use_kl_loss=true"
        )


def distillation_has_a_teacher(cfg: SkyRLConfig) -> Iterator[str]:
    """The difference of a model from itself teaches nothing."""
    teacher, pupil = cfg.trainer.ref.model.path, cfg.trainer.policy.model.path
    if cfg.trainer.algorithm.advantage_estimator == "on_policy_distillation" and teacher == pupil:
        yield (
            "trainer.algorithm.advantage_estimator=on_policy_distillation learns from "
            f"trainer.ref.model.path={show(teacher)}, which is trainer.policy.model.path={show(pupil)} itself; set "
            "trainer.ref.model.path=<the teacher>"
        )


def estimator_has_a_group(cfg: SkyRLConfig) -> Iterator[str]:
    """A group of one has nothing to be compared with; for grpo that is a warning."""
    estimator = cfg.trainer.algorithm.advantage_estimator
    if cfg.generator.n_samples_per_prompt == 1 and estimator in COMPARE_SAMPLES - {"grpo"}:
        yield (
            f"trainer.algorithm.advantage_estimator={estimator} compares the samples of one prompt, and "
            "generator.n_samples_per_prompt=1 leaves nothing to compare; try generator.n_samples_per_prompt=5, or "
            "trainer.algorithm.advantage_estimator=reinforce++"
        )


def filter_has_a_group(cfg: SkyRLConfig) -> Iterator[str]:
    """A group of one has nothing to be equal to."""
    for key, value, off in _group_filters(cfg):
        if cfg.generator.n_samples_per_prompt == 1:
            yield (
                f"{key}={value} compares the rewards of one prompt's samples, and generator.n_samples_per_prompt=1 "
                f"leaves nothing to compare; try generator.n_samples_per_prompt=5, or {key}={off}"
            )


def filter_leaves_out_what_teaches_nothing(cfg: SkyRLConfig) -> Iterator[str]:
    """Where rewards are not compared, groups of equal rewards teach as much as any."""
    estimator = cfg.trainer.algorithm.advantage_estimator
    for key, value, off in _group_filters(cfg):
        if estimator in COMPARE_NOTHING:
            yield (
                f"{key}={value} leaves groups of equal rewards out, but "
                f"trainer.algorithm.advantage_estimator={estimator} compares no rewards and learns as much from them; "
                f"set {key}={off}"
            )


def sequence_loss_has_one_advantage(cfg: SkyRLConfig) -> Iterator[str]:
    """A loss of whole trajectories cannot tell their tokens apart."""
    loss, estimator = cfg.trainer.algorithm.policy_loss_type, cfg.trainer.algorithm.advantage_estimator
    if loss in SEQUENCE_LOSSES and estimator in PER_TOKEN:
        yield (
            f"trainer.algorithm.policy_loss_type={loss} takes one advantage for each trajectory, and "
            f"trainer.algorithm.advantage_estimator={estimator} gives each token its own; try "
            "trainer.algorithm.policy_loss_type=gspo or dual_clip, or trainer.algorithm.advantage_estimator=grpo"
        )


def kl_is_in_one_place(cfg: SkyRLConfig) -> Iterator[str]:
    """The KL penalty belongs to the loss or to the reward."""
    algorithm = cfg.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true would count the KL "
            "divergence twice; set one of them to false"
        )


def reward_kl_is_read(cfg: SkyRLConfig) -> Iterator[str]:
    """A penalty in rewards that nothing reads is none."""
    algorithm = cfg.trainer.algorithm
    if algorithm.use_kl_in_reward and algorithm.advantage_estimator in READ_NO_TOKEN_REWARDS:
        yield (
            "trainer.algorithm.use_kl_in_reward=true changes the rewards of tokens, which "
            f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} does not read; set "
            "trainer.algorithm.use_kl_in_reward=false, and trainer.algorithm.use_kl_loss=true for a KL loss"
        )


def reward_kl_needs_no_gradient(cfg: SkyRLConfig) -> Iterator[str]:
    """A `+` chooses a gradient, and a reward has none."""
    algorithm = cfg.trainer.algorithm
    estimator = algorithm.kl_estimator_type
    if algorithm.use_kl_in_reward and estimator.endswith("+"):
        yield (
            f"trainer.algorithm.kl_estimator_type={estimator} differs from {estimator[:-1]} by its gradient, and with "
            "trainer.algorithm.use_kl_in_reward=true there is none; set "
            f"trainer.algorithm.kl_estimator_type={estimator[:-1]}"
        )


def kl_control_has_a_reward(cfg: SkyRLConfig) -> Iterator[str]:
    """The controller moves the weight of the penalty in the reward, nothing else."""
    algorithm = cfg.trainer.algorithm
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.kl_ctrl.type=adaptive controls the KL penalty in the reward, and "
            "trainer.algorithm.use_kl_in_reward=false leaves nothing to control; set "
            "trainer.algorithm.use_kl_in_reward=true and trainer.algorithm.use_kl_loss=false, or "
            "trainer.algorithm.kl_ctrl.type=fixed"
        )


def kl_control_has_a_start(cfg: SkyRLConfig) -> Iterator[str]:
    """The controller multiplies the weight, and 0 stays 0."""
    algorithm = cfg.trainer.algorithm
    if algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_loss_coef == 0:
        yield (
            "trainer.algorithm.kl_loss_coef=0.0 stays 0 whatever trainer.algorithm.kl_ctrl.type=adaptive multiplies it "
            "by; try trainer.algorithm.kl_loss_coef=0.001"
        )


def kl_correction_has_a_loss(cfg: SkyRLConfig) -> Iterator[str]:
    """What is weighed is the KL loss."""
    algorithm = cfg.trainer.algorithm
    if algorithm.use_bias_correction_kl and not algorithm.use_kl_loss:
        yield (
            "trainer.algorithm.use_bias_correction_kl=true weighs the KL loss, and "
            "trainer.algorithm.use_kl_loss=false leaves none; set trainer.algorithm.use_kl_loss=true, or "
            "trainer.algorithm.use_bias_correction_kl=false"
        )


def reference_update_has_a_reference(cfg: SkyRLConfig) -> Iterator[str]:
    """Only a reference that is read, and is no teacher, may become the policy. One's own estimator may read it."""
    algorithm = cfg.trainer.algorithm
    if not cfg.trainer.update_ref_every_epoch:
        return
    if algorithm.advantage_estimator == "on_policy_distillation":
        yield (
            "trainer.update_ref_every_epoch=true would replace the teacher of "
            "trainer.algorithm.advantage_estimator=on_policy_distillation by its pupil; set "
            "trainer.update_ref_every_epoch=false"
        )
    elif algorithm.advantage_estimator in ESTIMATORS and not reads_reference(algorithm):
        yield (
            "trainer.update_ref_every_epoch=true updates a reference that nothing reads, with "
            "trainer.algorithm.use_kl_loss=false and trainer.algorithm.use_kl_in_reward=false; set one of them to "
            "true, or trainer.update_ref_every_epoch=false"
        )


def correction_suits_the_loss(cfg: SkyRLConfig) -> Iterator[str]:
    """Some losses cannot be corrected for the engine's log-probs, some have read them already."""
    loss = cfg.trainer.algorithm.policy_loss_type
    if loss in CHOOSE_TOKENS:
        reason = "chooses tokens by comparing them all, corrected or not"
    elif loss in READ_ROLLOUT_LOGPROBS:
        reason = "reads the engine's log-probs itself, so that they would count twice"
    else:
        return
    for key, value in _corrections(cfg):
        yield (
            f"{key}={value} cannot go with trainer.algorithm.policy_loss_type={loss}, which {reason}; set {key}=null, "
            "or trainer.algorithm.policy_loss_type=dual_clip"
        )


def token_mask_has_two_ends(cfg: SkyRLConfig) -> Iterator[str]:
    """The interval of a token's ratio has both ends, or there is none."""
    keys = [f"{CORRECTION}.token_mask_is_threshold_{end}" for end in ("low", "high")]
    values = [value_at(cfg, key) for key in keys]
    if values.count(None) == 1:
        missing = values.index(None)
        yield (
            f"{keys[missing]}=null must be set too when {keys[1 - missing]}={show(values[1 - missing])}: tokens are "
            f"left out on both sides; set {keys[missing]}={(0.5, 2.0)[missing]}, or {keys[1 - missing]}=null"
        )


def intervals_are_not_empty(cfg: SkyRLConfig) -> Iterator[str]:
    """The lower end of an interval is below its upper end."""
    for low_key, high_key in INTERVALS:
        low, high = value_at(cfg, low_key), value_at(cfg, high_key)
        if low is not None and high is not None and low >= high:
            yield (
                f"{low_key}={low} must be below {high_key}={high}, or nothing lies between them; lower the first or "
                "raise the second"
            )


def dual_clip_is_beyond_the_clip(cfg: SkyRLConfig) -> Iterator[str]:
    """The second clip of `dual_clip` holds ratios that the first one lets pass."""
    algorithm = cfg.trainer.algorithm
    first = 1 + algorithm.eps_clip_high
    if algorithm.policy_loss_type == "dual_clip" and algorithm.clip_ratio_c <= first:
        yield (
            f"trainer.algorithm.clip_ratio_c={algorithm.clip_ratio_c} must be above {first:g}, that is 1 plus "
            f"trainer.algorithm.eps_clip_high={algorithm.eps_clip_high}, or trainer.algorithm.policy_loss_type="
            f"dual_clip clips what it should not; try trainer.algorithm.clip_ratio_c={first + 2:g}"
        )


def overlong_buffer_leaves_room(cfg: SkyRLConfig) -> Iterator[str]:
    """A response may have some length that costs nothing."""
    buffer, longest = cfg.trainer.algorithm.overlong_buffer_len, cfg.generator.sampling_params.max_generate_length
    if buffer is not None and buffer >= longest:
        fixes = [f"trainer.algorithm.overlong_buffer_len={n}" for n in ([longest // 4 or 1] if longest > 1 else [])]
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} must be below "
            f"generator.sampling_params.max_generate_length={longest}, or every response is punished for its length; "
            f"try {' or '.join([*fixes, 'trainer.algorithm.overlong_buffer_len=null'])}"
        )


CORRECTION = "trainer.algorithm.off_policy_correction"

INTERVALS = (
    (f"{CORRECTION}.product_mask_low", f"{CORRECTION}.product_mask_high"),
    (f"{CORRECTION}.geo_mask_low", f"{CORRECTION}.geo_mask_high"),
    (f"{CORRECTION}.token_mask_is_threshold_low", f"{CORRECTION}.token_mask_is_threshold_high"),
    (f"{CORRECTION}.outlier_token_is_threshold_low", f"{CORRECTION}.outlier_token_is_threshold_high"),
    ("trainer.algorithm.clip_cov.clip_cov_lb", "trainer.algorithm.clip_cov.clip_cov_ub"),
    ("trainer.algorithm.rollout_is.ratio_low", "trainer.algorithm.rollout_is.ratio_high"),
)

SWITCHES = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
)
"""Keys of the off-policy correction that turn a part of it on."""


def _corrections(cfg: SkyRLConfig) -> Iterator[tuple[str, str]]:
    """The parts of the off-policy correction that are on, as (key, value)."""
    for name in SWITCHES:
        value = getattr(cfg.trainer.algorithm.off_policy_correction, name)
        if value is not None:
            yield f"{CORRECTION}.{name}", show(value)


def _group_filters(cfg: SkyRLConfig) -> Iterator[tuple[str, str, str]]:
    """What leaves groups of equal rewards out, as (key, value, the value that turns it off)."""
    algorithm = cfg.trainer.algorithm
    if algorithm.dynamic_sampling.type is not None:
        yield "trainer.algorithm.dynamic_sampling.type", algorithm.dynamic_sampling.type, "null"
    if algorithm.zero_variance_filter:
        yield "trainer.algorithm.zero_variance_filter", "true", "false"


ALGORITHM_RULES: tuple[Rule, ...] = (
    estimator_has_a_critic,
    distillation_has_a_teacher,
    estimator_has_a_group,
    steps_share_one_advantage,
    filter_has_a_group,
    filter_leaves_out_what_teaches_nothing,
    sequence_loss_has_one_advantage,
    kl_is_in_one_place,
    reward_kl_is_read,
    reward_kl_needs_no_gradient,
    kl_control_has_a_reward,
    kl_control_has_a_start,
    kl_correction_has_a_loss,
    reference_update_has_a_reference,
    correction_suits_the_loss,
    token_mask_has_two_ends,
    intervals_are_not_empty,
    dual_clip_is_beyond_the_clip,
    overlong_buffer_leaves_room,
)
