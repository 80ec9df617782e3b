"""The policy worker against an independent oracle, and its promises about micro-batches, bad gradients and memory."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from workers.grpo_oracle import OracleTrajectory, gradient, grpo_loss

from skyrl_train.algorithms import advantage_estimator, policy_loss
from skyrl_train.algorithms.reduction import reduce_loss
from skyrl_train.algorithms.registry import POLICY_LOSSES, PolicyLoss
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.config.algorithm import AlgorithmConfig, LossReduction
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.types import TrainingBatch, Trajectory, TrajectoryID
from skyrl_train.workers.policy import PolicyWorker
from skyrl_train.workers.scoring import score_tokens

TEMPERATURE = 0.7
EPS_LOW, EPS_HIGH, KL_COEF = 0.1, 0.3, 0.05


def config(**trainer: Any) -> SkyRLConfig:
    algorithm = {"eps_clip_low": EPS_LOW, "eps_clip_high": EPS_HIGH, "kl_loss_coef": KL_COEF}
    return load_config(
        {
            "trainer": {"algorithm": algorithm, **trainer},
            "generator": {"sampling_params": {"temperature": TEMPERATURE}},
        }
    )


def make_worker(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, loss: PolicyLoss | None = None, **trainer: Any
) -> PolicyWorker:
    loss = loss or policy_loss("regular")
    return PolicyWorker(model, tokenizer, config(**trainer).trainer, loss, n_optimizer_steps=10)


def random_trajectories(n_prompts: int, n_samples: int, n_tokens: int, seed: int) -> list[OracleTrajectory]:
    """Ragged conversations: prompts of 2 to 9 tokens, one to three turns with observations in between."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, n_tokens) for _ in range(rng.randint(low, high))]

    trajectories = []
    for prompt in range(n_prompts):
        prompt_ids = ids(2, 9)
        for _ in range(n_samples):
            response, was_sampled = ids(1, 5), []
            was_sampled += [True] * len(response)
            for _ in range(rng.randint(0, 2)):
                observation, turn = ids(1, 6), ids(1, 4)
                response += observation + turn
                was_sampled += [False] * len(observation) + [True] * len(turn)
            reward = rng.choice([-1.0, 0.0, 0.5, 1.0])
            trajectories.append(OracleTrajectory(f"p{prompt}", prompt_ids, response, was_sampled, reward))
    return trajectories


def as_batch(trajectories: list[OracleTrajectory], cfg: SkyRLConfig) -> TrainingBatch:
    """The trainer's own way from rollouts to a batch with advantages."""
    batch = build_training_batch(
        [
            Trajectory(
                id=TrajectoryID(t.prompt_uid, i),
                env_class="test",
                data_source="test",
                prompt_ids=t.prompt_ids,
                response_ids=t.response_ids,
                loss_mask=[int(sampled) for sampled in t.was_sampled],
                logprobs=[0.0] * len(t.response_ids),
                rewards=[0.0] * (len(t.response_ids) - 1) + [t.reward],
                stop_reason="stop",
            )
            for i, t in enumerate(trajectories)
        ],
        pad_token_id=0,
    )
    batch.advantages, batch.returns = advantage_estimator("grpo")(
        token_level_rewards=batch.rewards,
        response_mask=batch.loss_mask,
        index=batch.uids,
        values=None,
        config=cfg.trainer.algorithm,
    )
    return batch


def perturbed(model: PreTrainedModel, scale: float, seed: int) -> PreTrainedModel:
    """A copy whose weights have moved a little, as after an update."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def gradients(worker: PolicyWorker, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    worker.model.zero_grad()
    worker.forward_backward(batch)
    return {name: p.grad.clone() for name, p in worker.model.named_parameters() if p.grad is not None}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def rounding(gradient: dict[str, torch.Tensor]) -> float:
    """What may differ in float32: losses that sum over tokens have larger gradients than means."""
    return 1e-6 + 1e-6 * max(values.abs().max().item() for values in gradient.values())


@pytest.fixture
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(tiny_model)


@pytest.mark.parametrize("on_policy", [True, False], ids=["old log-probs are the current ones", "old policy differs"])
def test_one_grpo_step_agrees_with_the_oracle(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, on_policy: bool
) -> None:
    cfg = config()
    reference = perturbed(policy, 0.02, seed=1)
    old_policy = policy if on_policy else perturbed(policy, 0.02, seed=2)
    trajectories = random_trajectories(n_prompts=3, n_samples=4, n_tokens=len(tiny_tokenizer), seed=0)
    batch = as_batch(trajectories, cfg)
    batch.ref_logprobs = score_tokens(reference, batch, cfg.trainer).logprobs
    batch.old_logprobs = None if on_policy else score_tokens(old_policy, batch, cfg.trainer).logprobs

    worker = make_worker(policy, tiny_tokenizer)
    ours = gradients(worker, batch)
    loss = grpo_loss(
        policy,
        old_policy,
        reference,
        trajectories,
        temperature=TEMPERATURE,
        eps_low=EPS_LOW,
        eps_high=EPS_HIGH,
        kl_coef=KL_COEF,
    )

    assert largest_difference(ours, gradient(policy, loss)) < 1e-6
    assert worker.forward_backward(batch)["policy/final_loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_the_oracle_would_notice_a_missing_kl_gradient(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    cfg = config()
    batch = as_batch(random_trajectories(2, 4, len(tiny_tokenizer), seed=3), cfg)
    worker = make_worker(policy, tiny_tokenizer)
    without = gradients(worker, batch)
    batch.ref_logprobs = score_tokens(perturbed(policy, 0.02, seed=1), batch, cfg.trainer).logprobs
    assert largest_difference(gradients(worker, batch), without) > 1e-5


@pytest.mark.parametrize("reduction", get_args(LossReduction))
def test_micro_batches_of_1_3_and_16_rows_have_the_same_gradient(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, reduction: str
) -> None:
    cfg = config()
    batch = as_batch(random_trajectories(4, 4, len(tiny_tokenizer), seed=4), cfg)
    batch.ref_logprobs = score_tokens(perturbed(policy, 0.02, seed=1), batch, cfg.trainer).logprobs
    algorithm = {"loss_reduction": reduction, "max_seq_len": 40, "use_entropy_loss": True}
    results = [
        gradients(make_worker(policy, tiny_tokenizer, algorithm=algorithm, **split), batch)
        for split in (
            {"micro_train_batch_size_per_gpu": 16},
            {"micro_train_batch_size_per_gpu": 3},
            {"micro_train_batch_size_per_gpu": 1},
            {"max_tokens_per_microbatch": 50},
        )
    ]
    for other in results[1:]:
        assert largest_difference(results[0], other) < rounding(results[0])


def scalar_reinforce(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """As scripts for SkyRL write it: reduced by itself, and a number beside it."""
    return reduce_loss(-advantages * log_probs, loss_mask, config.loss_reduction, config.max_seq_len), 0.25


def off_policy_batch(policy: PreTrainedModel, n_tokens: int, seed: int) -> TrainingBatch:
    """Tokens that one policy sampled, another one started the update from, and a third has now reached."""
    cfg = config()
    batch = as_batch(random_trajectories(4, 4, n_tokens, seed), cfg)
    batch.ref_logprobs = score_tokens(perturbed(policy, 0.02, seed=1), batch, cfg.trainer).logprobs
    old = score_tokens(perturbed(policy, 0.02, seed=2), batch, cfg.trainer)
    batch.old_logprobs, batch.entropies, _ = old
    batch.rollout_logprobs = score_tokens(perturbed(policy, 0.02, seed=3), batch, cfg.trainer).logprobs
    return batch


@pytest.mark.parametrize("name", [*POLICY_LOSSES.list_available(), "a scalar one of a user's"])
def test_no_loss_depends_on_micro_batches(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    loss = policy_loss(name) if name in POLICY_LOSSES.list_available() else scalar_reinforce
    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=11)
    results = []
    for split in (16, 3, 1):
        torch.manual_seed(0)  # clip_cov chooses tokens at random
        worker = make_worker(policy, tiny_tokenizer, loss, micro_train_batch_size_per_gpu=split)
        results.append((gradients(worker, batch), worker.forward_backward(batch)))
    assert max(gradient.abs().max() for gradient in results[0][0].values()) > 1e-4
    for other, metrics in results[1:]:
        assert largest_difference(results[0][0], other) < rounding(results[0][0])
        if name != "clip_cov":  # the second pass chooses others
            assert metrics == pytest.approx(results[0][1], abs=1e-5)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "a mean over everything"])
def test_rows_that_are_left_out_do_not_matter_to_a_loss_of_the_whole_batch(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    def mean(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (-log_probs * advantages).mean(), 0.0

    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=17)
    batch.loss_mask[::2] = 0
    chosen = {"clip_cov": {"clip_ratio": 0.2, "clip_cov_lb": -0.5}, "kl_cov": {"kl_cov_frac": 0.2}}
    loss = policy_loss(name) if name in chosen else mean
    results = []
    for split in (16, 3):
        torch.manual_seed(0)
        worker = make_worker(policy, tiny_tokenizer, loss, algorithm=chosen, micro_train_batch_size_per_gpu=split)
        results.append(gradients(worker, batch))
    assert largest_difference(*results) < rounding(results[0])
    if name == "clip_cov":
        torch.manual_seed(1)
        assert largest_difference(gradients(worker, batch), results[0]) > 1e-4, "nothing was chosen at random"


def test_a_metric_of_a_loss_never_touches_the_kl_loss(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    def measured(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return 0 * log_probs, {"my_kl": log_probs.detach()}

    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=18)
    assert gradients(make_worker(policy, tiny_tokenizer, measured), batch)
    kl = make_worker(policy, tiny_tokenizer, measured).forward_backward(batch)
    assert kl["policy/final_loss"] == pytest.approx(KL_COEF * kl["policy/policy_kl"])


def test_a_scalar_loss_is_that_of_its_tokens(policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=12)
    split = {"micro_train_batch_size_per_gpu": 5}
    by_token = make_worker(policy, tiny_tokenizer, policy_loss("policy_gradient"), **split)
    by_itself = make_worker(policy, tiny_tokenizer, scalar_reinforce, **split)
    assert largest_difference(gradients(by_token, batch), gradients(by_itself, batch)) < 1e-6
    metrics = by_itself.forward_backward(batch)
    assert metrics["policy/ppo_clip_ratio"] == 0.25
    assert metrics["policy/policy_loss"] == pytest.approx(by_token.forward_backward(batch)["policy/policy_loss"])


@pytest.mark.parametrize(
    "algorithm",
    [
        {"off_policy_correction": {"tis_ratio_type": "token"}},
        {"off_policy_sequence_mask_threshold": 0.001},
        {"top_entropy_quantile": 0.5},
    ],
    ids=lambda algorithm: next(iter(algorithm)),
)
def test_what_puts_a_factor_on_tokens_refuses_a_scalar_loss_and_ignores_micro_batches(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, algorithm: dict[str, Any]
) -> None:
    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=13)
    with pytest.raises(ConfigError, match="returns a scalar"):
        make_worker(policy, tiny_tokenizer, scalar_reinforce, algorithm=algorithm)
    plain = gradients(make_worker(policy, tiny_tokenizer), batch)
    weighed = [
        gradients(make_worker(policy, tiny_tokenizer, algorithm=algorithm, micro_train_batch_size_per_gpu=n), batch)
        for n in (16, 3)
    ]
    assert largest_difference(*weighed) < 1e-6
    assert largest_difference(weighed[0], plain) > 1e-5


def test_truncated_importance_sampling_scales_a_token_by_its_capped_ratio(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=14)
    assert batch.old_logprobs is not None
    batch.rollout_logprobs = batch.old_logprobs - 10  # every ratio is far above its cap
    plain = gradients(make_worker(policy, tiny_tokenizer, algorithm={"use_kl_loss": False}), batch)
    correction = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}
    algorithm = {"use_kl_loss": False, "off_policy_correction": correction}
    tripled = gradients(make_worker(policy, tiny_tokenizer, algorithm=algorithm), batch)
    assert largest_difference(tripled, {name: 3 * gradient for name, gradient in plain.items()}) < 1e-5


def test_a_correction_without_the_engines_log_probs_is_refused(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=15)
    batch.rollout_logprobs = None
    worker = make_worker(policy, tiny_tokenizer, algorithm={"off_policy_correction": {"tis_ratio_type": "token"}})
    with pytest.raises(ConfigError, match="log-probs of the engine"):
        worker.forward_backward(batch)


def test_the_reference_is_in_the_loss_only_where_asked_for(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = off_policy_batch(policy, len(tiny_tokenizer), seed=16)
    in_reward = {"use_kl_loss": False, "use_kl_in_reward": True}
    measured = make_worker(policy, tiny_tokenizer, algorithm=in_reward)
    ours = gradients(measured, batch)
    assert measured.forward_backward(batch)["policy/policy_kl"] > 0
    batch.ref_logprobs = None
    assert largest_difference(ours, gradients(measured, batch)) == 0


def test_gradient_checkpointing_changes_memory_and_nothing_else(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = as_batch(random_trajectories(2, 3, len(tiny_tokenizer), seed=5), config())
    plain = gradients(make_worker(policy, tiny_tokenizer), batch)
    n_forward_passes = 0

    def count(*_: object) -> None:
        nonlocal n_forward_passes
        n_forward_passes += 1

    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.base_model.layers[0].mlp.register_forward_pre_hook(count)
    assert largest_difference(gradients(make_worker(policy, tiny_tokenizer), batch), plain) < 1e-7
    assert n_forward_passes == 2, "activations were not recomputed"
    assert not any(module.training for module in policy.modules())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    worker = make_worker(policy, tiny_tokenizer)
    batch = as_batch(random_trajectories(1, 2, len(tiny_tokenizer), seed=6), config())
    before = copy.deepcopy(policy.state_dict())
    assert batch.advantages is not None
    batch.advantages[0, 0] = float("inf")
    metrics = worker.update(batch)
    assert metrics["policy/skipped_updates"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    batch.advantages[0, 0] = 1.0
    assert worker.update(batch)["policy/skipped_updates"] == 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_a_batch_without_trained_tokens_changes_nothing(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = as_batch(random_trajectories(1, 2, len(tiny_tokenizer), seed=6), config())
    worker = make_worker(policy, tiny_tokenizer)
    worker.update(batch)  # leaves momentum behind
    before = copy.deepcopy(policy.state_dict())
    batch.loss_mask.zero_()
    metrics = worker.update(batch)
    assert "policy/grad_norm" not in metrics
    assert metrics["policy/skipped_updates"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_save_and_load_continue_bit_for_bit(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    schedule = {"policy": {"optimizer_config": {"scheduler": "linear", "lr": 1e-3, "num_warmup_steps": 2}}}
    batches = [as_batch(random_trajectories(2, 3, len(tiny_tokenizer), seed), config()) for seed in range(4)]
    first = make_worker(policy, tiny_tokenizer, **schedule)
    for batch in batches[:2]:
        first.update(batch)
    first.save(tmp_path / "policy")
    second = make_worker(perturbed(policy, 0.1, seed=9), tiny_tokenizer, **schedule)
    second.load(tmp_path / "policy")
    for batch in batches[2:]:
        assert first.update(batch) == second.update(batch)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_loading_an_incomplete_folder_names_it(
    policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    worker = make_worker(policy, tiny_tokenizer)
    worker.save(tmp_path / "policy")
    (tmp_path / "policy" / "optim_world_size_1_rank_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optim_world_size_1_rank_0\.pt"):
        worker.load(tmp_path / "policy")
