"""Rules of the algorithm that read only the configuration."""

from collections.abc import Iterator

from skyrl_train.config.base import value_at
from skyrl_train.config.problems import show
from skyrl_train.config.root import SkyRLConfig

CORRECTION = "trainer.algorithm.off_policy_correction"

INTERVALS = (
    (f"{CORRECTION}.product_mask_low", f"{CORRECTION}.product_mask_high"),
    (f"{CORRECTION}.geo_mask_low", f"{CORRECTION}.geo_mask_high"),
    (f"{CORRECTION}.token_mask_is_threshold_low", f"{CORRECTION}.token_mask_is_threshold_high"),
    (f"{CORRECTION}.outlier_token_is_threshold_low", f"{CORRECTION}.outlier_token_is_threshold_high"),
    ("trainer.algorithm.clip_cov.clip_cov_lb", "trainer.algorithm.clip_cov.clip_cov_ub"),
    ("trainer.algorithm.rollout_is.ratio_low", "trainer.algorithm.rollout_is.ratio_high"),
)


def mini_batches_divide_batch(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject mini-batches with unequal numbers of prompts."""
    batch, sizes = cfg.trainer.train_batch_size, {"policy": cfg.trainer.policy_mini_batch_size}
    if cfg.trainer.critic.model.path is not None:
        sizes["critic"] = cfg.trainer.critic_mini_batch_size
    for role, size in sizes.items():
        if batch % size:
            divisors = [n for n in range(1, batch + 1) if batch % n == 0]
            nearest = [n for n in divisors if n < size][-1:] + [n for n in divisors if n > size][:1]
            yield (
                f"trainer.{role}_mini_batch_size={size} must divide trainer.train_batch_size={batch}; try "
                f"{' or '.join(map(str, nearest))}"
            )


def defaults_can_be_derived(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject a divisor `max_seq_len` that no key determines, and a training temperature of 0 from greedy rollouts."""
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        yield (
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by trainer.algorithm.max_seq_len=null, "
            f"which cannot be computed with generator.max_turns={cfg.generator.max_turns} and "
            "generator.max_input_length=null; set trainer.algorithm.max_seq_len"
        )
    if algorithm.temperature == 0:
        yield (
            "generator.sampling_params.temperature=0.0 (greedy) cannot divide the logits in training, but "
            "trainer.algorithm.temperature=null uses it; try generator.sampling_params.temperature=1.0, or set "
            "trainer.algorithm.temperature=1.0 if rollouts should be greedy"
        )


def group_filters(cfg: SkyRLConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, value that disables it) for each active filter of groups with equal rewards."""
    algorithm = cfg.trainer.algorithm
    if algorithm.dynamic_sampling.type is not None:
        yield "trainer.algorithm.dynamic_sampling.type", algorithm.dynamic_sampling.type, "null"
    if algorithm.zero_variance_filter:
        yield "trainer.algorithm.zero_variance_filter", "true", "false"


def reference_is_a_second_model(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject a teacher that is the policy, and reference updates that a teacher or a shared adapter rules out."""
    trainer, update = cfg.trainer, "trainer.update_ref_every_epoch"
    if trainer.algorithm.advantage_estimator == "on_policy_distillation":
        estimator = "trainer.algorithm.advantage_estimator=on_policy_distillation"
        teacher, student = trainer.ref.model.path, trainer.policy.model.path
        if teacher == student:
            yield (
                f"{estimator} learns from trainer.ref.model.path={show(teacher)}, which is "
                f"trainer.policy.model.path={show(student)} itself; set trainer.ref.model.path=<the teacher>"
            )
        if trainer.update_ref_every_epoch:
            yield f"{update}=true would replace the teacher of {estimator} by the policy; set {update}=false"
    if trainer.update_ref_every_epoch and trainer.ref.shares_adapter_with(trainer.policy.model):
        path = trainer.policy.model.lora.lora_path
        yield (
            f"{update}=true does not work with trainer.policy.model.lora.lora_path={show(path)}; merge the adapter "
            f"first (skyrl merge adapter {path} <folder>) and train a new one on the merged model"
        )


def filter_has_a_group(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject filters of equal rewards with one sample per prompt."""
    for key, value, off in group_filters(cfg):
        if cfg.generator.n_samples_per_prompt == 1:
            yield (
                f"{key}={value} compares the rewards of one prompt's samples, and generator.n_samples_per_prompt=1 "
                f"leaves nothing to compare; try generator.n_samples_per_prompt=5, or {key}={off}"
            )


def kl_terms_are_used(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject KL terms that would count twice, and settings of the KL divergence that nothing uses."""
    algorithm, estimator = cfg.trainer.algorithm, cfg.trainer.algorithm.kl_estimator_type
    if algorithm.use_kl_in_reward and algorithm.use_kl_loss:
        yield (
            "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true would count the KL "
            "divergence twice; set one of them to false"
        )
    if algorithm.use_kl_in_reward and estimator.endswith("+"):
        yield (
            f"trainer.algorithm.kl_estimator_type={estimator} differs from {estimator[:-1]} only in its gradient, "
            "which trainer.algorithm.use_kl_in_reward=true does not use; set "
            f"trainer.algorithm.kl_estimator_type={estimator[:-1]}"
        )
    is_adaptive = algorithm.kl_ctrl.type == "adaptive"
    if is_adaptive and not algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.kl_ctrl.type=adaptive controls the KL penalty in the reward, but "
            "trainer.algorithm.use_kl_in_reward=false disables it; set trainer.algorithm.use_kl_in_reward=true and "
            "trainer.algorithm.use_kl_loss=false, or trainer.algorithm.kl_ctrl.type=fixed"
        )
    if is_adaptive and algorithm.kl_loss_coef == 0:
        yield (
            "trainer.algorithm.kl_ctrl.type=adaptive multiplies trainer.algorithm.kl_loss_coef=0.0, which stays 0; try "
            "trainer.algorithm.kl_loss_coef=0.001"
        )
    if algorithm.use_bias_correction_kl and not algorithm.use_kl_loss:
        yield (
            "trainer.algorithm.use_bias_correction_kl=true weights the KL loss, but "
            "trainer.algorithm.use_kl_loss=false disables it; set trainer.algorithm.use_kl_loss=true, or "
            "trainer.algorithm.use_bias_correction_kl=false"
        )


def bounds_leave_room(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject empty or one-sided intervals, a dual clip inside PPO's, and overlong buffers that are too long."""
    keys = [f"{CORRECTION}.token_mask_is_threshold_{end}" for end in ("low", "high")]
    values = [value_at(cfg, key) for key in keys]
    if values.count(None) == 1:
        missing = values.index(None)
        yield (
            f"{keys[missing]}=null must be set too when {keys[1 - missing]}={show(values[1 - missing])}: tokens are "
            f"left out on both sides; set {keys[missing]}={(0.5, 2.0)[missing]}, or {keys[1 - missing]}=null"
        )
    for low_key, high_key in INTERVALS:
        low, high = value_at(cfg, low_key), value_at(cfg, high_key)
        if low is not None and high is not None and low >= high:
            yield (
                f"{low_key}={low} must be below {high_key}={high}, or nothing lies between them; lower the first or "
                "raise the second"
            )
    algorithm, longest = cfg.trainer.algorithm, cfg.generator.sampling_params.max_generate_length
    first, buffer = 1 + algorithm.eps_clip_high, algorithm.overlong_buffer_len
    if algorithm.policy_loss_type == "dual_clip" and algorithm.clip_ratio_c <= first:
        yield (
            f"trainer.algorithm.clip_ratio_c={algorithm.clip_ratio_c} must be above {first:g}, i.e. 1 plus "
            f"trainer.algorithm.eps_clip_high={algorithm.eps_clip_high}; otherwise trainer.algorithm.policy_loss_type="
            f"dual_clip clips inside the range of PPO; try trainer.algorithm.clip_ratio_c={first + 2:g}"
        )
    if buffer is not None and buffer >= longest:
        fixes = [f"trainer.algorithm.overlong_buffer_len={n}" for n in ([longest // 4 or 1] if longest > 1 else [])]
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} must be below "
            f"generator.sampling_params.max_generate_length={longest}, or every response is penalized for its length; "
            f"try {' or '.join([*fixes, 'trainer.algorithm.overlong_buffer_len=null'])}"
        )


def policy_learns_from_rewards(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn about groups of one, filters without effect, rewards that nothing reads, and a KL loss of pure noise."""
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    if generator.n_samples_per_prompt == 1 and algorithm.advantage_estimator == "grpo":
        yield (
            "generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_estimator=grpo compares every "
            "trajectory with itself only; try generator.n_samples_per_prompt=5"
        )
    if algorithm.dynamic_sampling.type == "filter" and algorithm.zero_variance_filter:
        yield (
            "trainer.algorithm.zero_variance_filter=true has no effect, because "
            "trainer.algorithm.dynamic_sampling.type=filter already drops groups of equal rewards; remove one of them"
        )
    for name, effect in (
        ("zero_reward_on_non_stop", "nearly every reward becomes 0"),
        ("apply_overlong_filtering", "nearly every trajectory is left out of the loss"),
    ):
        if getattr(generator, name) and generator.sampling_params.max_generate_length == 1:
            yield (
                f"generator.{name}=true keeps replies that end with the EOS token, but almost none does with "
                f"generator.sampling_params.max_generate_length=1: {effect}; set generator.{name}=false"
            )
    if algorithm.policy_loss_type == "cross_entropy":
        yield (
            "trainer.algorithm.policy_loss_type=cross_entropy imitates every rollout, whatever its reward; try "
            "trainer.algorithm.policy_loss_type=policy_gradient"
        )
    if algorithm.use_kl_loss and algorithm.kl_estimator_type == "k1" and not algorithm.use_bias_correction_kl:
        yield (
            "trainer.algorithm.kl_estimator_type=k1 with trainer.algorithm.use_kl_loss=true has a gradient of 0 on "
            "average, which is noise; try trainer.algorithm.kl_estimator_type=k1+ or k3"
        )


def coefficients_are_unusual(cfg: SkyRLConfig) -> Iterator[str]:
    """Warn about coefficients far above usual values."""
    algorithm = cfg.trainer.algorithm
    coefficients = {
        "trainer.algorithm.kl_loss_coef": algorithm.kl_loss_coef if algorithm.compares_with_reference else 0.0,
        "trainer.algorithm.entropy_loss_coef": algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        "trainer.policy.optimizer_config.weight_decay": cfg.trainer.policy.optimizer_config.weight_decay,
    }
    for key, value in coefficients.items():
        if value > 1:
            yield f"{key}={value:g} is so large that rewards hardly matter; try {key}=0.01"
