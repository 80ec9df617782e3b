"""The gradients of the trainer, from rollouts on, against the specification in `train_kit.oracle`.

Models are in float64; log-probs and losses are in float32, so gradients agree up to 1e-5 of the largest entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from train_kit.batches import as_trajectories
from train_kit.cases import format_case, pairwise_table
from train_kit.models import SMALL, perturbed
from train_kit.oracle import OracleRow, OracleTrajectory, Settings, update
from train_kit.oracle.rollouts import random_rollouts
from train_kit.oracle.scores import Gradient, OracleScores, score_row
from train_kit.workers import TEMPERATURE, SingleRankGroup, complete, config, policy_objective
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel, Qwen3Config

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.objectives import ValueObjective
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.algorithm import KLEstimator, LossReduction
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.launch.process import LocalRank
from skyrl_train.learner import Learner
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import Role
from skyrl_train.workers.group import WorkerGroup

EXACT = 1e-5
REDUCTIONS = get_args(LossReduction)
FLOAT_METRICS = {"rel": 1e-4, "abs": 1e-5}

on_one_and_several_rows = pytest.mark.parametrize("several_rows", [False, True], ids=["one row", "several rows"])


# -- models and rollouts


@dataclass(frozen=True)
class Models:
    """Policy (current, at the start of the update, in the engine), reference, and critic (current, at the start)."""

    policy: PreTrainedModel
    old: PreTrainedModel
    engine: PreTrainedModel
    ref: PreTrainedModel
    critic: PreTrainedModel
    old_critic: PreTrainedModel


@cache
def models() -> Models:
    """Return tiny Qwen3 models in float64 that are a few updates apart."""
    cfg = Qwen3Config(**SMALL | {"num_hidden_layers": 1}, tie_word_embeddings=True, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(cfg).double().eval()
        critic = AutoModelForTokenClassification.from_config(cfg).double().eval()
    old, engine, ref = (perturbed(policy, 0.014, seed) for seed in (1, 2, 3))
    return Models(policy, old, engine, ref, critic, perturbed(critic, 0.014, seed=4))


@cache
def specified(several_rows: bool) -> tuple[list[OracleTrajectory], OracleScores]:
    """Return rollouts with rollout log-probs, and their scores by the specification."""
    m = models()
    rollouts = [
        replace(t, rows=[_with_logprobs(row) for row in t.rows])
        for t in random_rollouts(several_rows, SMALL["vocab_size"])
    ]
    scores = OracleScores(
        rollouts, TEMPERATURE, policy=m.policy, old=m.old, ref=m.ref, critic=m.critic, old_critic=m.old_critic
    )
    return rollouts, scores


@torch.no_grad()
def _with_logprobs(row: OracleRow) -> OracleRow:
    scores = iter(score_row(models().engine, row, TEMPERATURE).logprobs.tolist())
    return replace(row, logprobs=[next(scores) if sampled else 0.0 for sampled in row.was_sampled])


# -- the trainer


def configured(s: Settings, **trainer: Any) -> SkyRLConfig:
    """Return the configuration with these settings."""
    algorithm = {name: value for name, value in asdict(s).items() if name not in ("tis_ratio_type", "tis_cap")}
    correction: dict[str, Any] = {"tis_ratio_type": s.tis_ratio_type}
    if s.tis_ratio_type is not None:
        correction[f"{s.tis_ratio_type}_tis_ratio_clip_high"] = s.tis_cap
    whole = {"clip_cov": {"clip_ratio": 1.0}, "off_policy_correction": correction}
    ref = {"model": {"path": "reference"}}  # never loaded; distillation requires a path other than the policy's
    return config(algorithm=algorithm | whole, update_epochs_per_batch=2, ref=ref, **trainer)


class PartRank:
    """One of several data-parallel ranks that share one worker, so that its gradients add up."""

    def __init__(self, rank: LocalRank) -> None:
        self._rank = rank

    async def call(self, role: Role, method: str, *args: Any) -> Any:
        """Call the worker, which is already loaded."""
        return None if method == "load" else await self._rank.call(role, method, *args)

    async def close(self) -> None:
        """Do nothing."""


@cache
def scored_batch(several_rows: bool) -> TrainingBatch:
    """Return the batch with the scores of the models as of the start of the update."""
    m, cfg = models(), configured(Settings()).trainer
    workers: dict[str, SingleRankGroup] = {
        "policy": SingleRankGroup("policy", m.old, cfg, policy_objective(cfg)),
        "critic": SingleRankGroup("critic", m.old_critic, cfg, ValueObjective(None)),
        "ref": SingleRankGroup("ref", m.ref, cfg, None),
    }
    learner = Learner(cfg, advantage_estimator("gae"), **{role: worker.group for role, worker in workers.items()})
    batch = build_training_batch(as_trajectories(specified(several_rows)[0]), pad_token_id=0)
    return complete(learner.score(batch))


def batch_with_advantages(several_rows: bool, cfg: TrainerConfig) -> TrainingBatch:
    """Return the batch with advantages, as the learner computes them before the update."""
    estimator = advantage_estimator(cfg.algorithm.advantage_estimator)
    return Learner(cfg, estimator, policy=_UNUSED).advantages(scored_batch(several_rows))[0]


_UNUSED: Any = None  # advantages are computed from scores alone


def train(role: Role, several_rows: bool, cfg: SkyRLConfig, n_ranks: int = 1) -> tuple[Gradient, dict[str, float]]:
    """Return gradient and metrics of one mini-batch split over `n_ranks`."""
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    if role == "policy":
        worker = SingleRankGroup(role, models().policy, trainer, policy_objective(trainer, algorithm.policy_loss_type))
    else:
        worker = SingleRankGroup(role, models().critic, trainer, ValueObjective(algorithm.value_clip))
    ranks = [PartRank(worker.rank) for _ in range(n_ranks)]
    group = WorkerGroup(worker.group._spec, ranks, worker.group._objective)
    worker.model.zero_grad()
    metrics = complete(group.forward_backward(batch_with_advantages(several_rows, trainer))).numbers()
    parameters = worker.model.named_parameters()
    return {name: p.new_zeros(p.shape) if p.grad is None else p.grad.clone() for name, p in parameters}, metrics


def assert_same_gradient(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    largest = max(values.abs().max().item() for values in expected.values())
    assert largest > 1e-5
    for name, values in expected.items():
        torch.testing.assert_close(
            actual[name], values, rtol=0, atol=EXACT * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_policy_as_specified(s: Settings, several_rows: bool, n_ranks: int = 1, **trainer: Any) -> dict[str, float]:
    """Compare gradient and logged losses; return all metrics."""
    gradient, metrics = train("policy", several_rows, configured(s, **trainer), n_ranks)
    rollouts, scored = specified(several_rows)
    expected = update(rollouts, scored, s)
    assert_same_gradient(gradient, scored.policy.gradient(expected.final))
    losses = {
        "policy_loss": expected.policy,
        "final_loss": expected.final,
        "policy_kl": expected.kl,
        "policy_entropy": expected.entropy,
    }
    numbers = {name: loss.item() for name, loss in losses.items()}
    assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, **FLOAT_METRICS)
    return metrics


# -- advantages


@on_one_and_several_rows
@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.list_available())
def test_advantages_and_returns_equal_the_specification(name: str, several_rows: bool) -> None:
    rollouts, scored = specified(several_rows)
    for options in ({}, {"gamma": 0.5, "lambd": 0.25, "grpo_norm_by_std": False, "advantage_batch_normalize": True}):
        s = Settings(advantage_estimator=name, **options)
        batch = batch_with_advantages(several_rows, configured(s).trainer)
        expected = update(rollouts, scored, s)
        assert batch.advantages is not None
        assert batch.returns is not None
        is_trained = batch.loss_mask > 0
        for actual, values in ((batch.advantages, expected.advantages), (batch.returns, expected.returns)):
            assert not actual[~is_trained].any()
            flat = torch.tensor([x for row in values for x in row])
            assert flat.abs().max() > 0.01
            torch.testing.assert_close(actual[is_trained], flat, rtol=EXACT, atol=EXACT)


# -- gradients


DIMENSIONS: dict[str, Sequence[Any]] = {
    "policy_loss_type": POLICY_LOSSES.list_available(),
    "advantage_estimator": ["grpo", "rloo", "reinforce++", "opo", "gae", "grpo_per_turn"],
    "loss_reduction": REDUCTIONS,
    "several_rows": [False, True],
    "micro_batches": [
        {"micro_train_batch_size_per_gpu": 5},
        {"micro_train_batch_size_per_gpu": 64},
        {"max_tokens_per_microbatch": 60},
    ],
    "kl": [
        {"use_kl_loss": False},
        {"kl_estimator_type": "k3"},
        {"kl_estimator_type": "k3", "use_bias_correction_kl": True},
        {"kl_estimator_type": "k1+"},
        {"use_kl_loss": False, "use_kl_in_reward": True},
    ],
    "terms": [
        {},
        {"use_entropy_loss": True},
        {"top_entropy_quantile": 0.3},
        {"tis_ratio_type": "token"},
        {"tis_ratio_type": "sequence"},
        {"off_policy_sequence_mask_threshold": 0.01},
        {"advantage_batch_normalize": True},
    ],
}

ALL_DIMENSIONS = DIMENSIONS | {
    "advantage_estimator": ADVANTAGE_ESTIMATORS.list_available(),
    "micro_batches": [{"micro_train_batch_size_per_gpu": n} for n in (1, 2, 3, 64)],
    "kl": [*DIMENSIONS["kl"], *({"kl_estimator_type": name} for name in get_args(KLEstimator))],
}
CASES = [
    *pairwise_table(DIMENSIONS),
    *(pytest.param(case, marks=pytest.mark.nightly) for case in pairwise_table(ALL_DIMENSIONS, seed=1)),
]


def test_a_pairwise_table_contains_every_pair() -> None:
    dimensions = {"a": [1, 2, 3], "b": "xy", "c": [True, False, None]}
    cases = pairwise_table(dimensions)
    for left, right in combinations(dimensions, 2):
        pairs = {(case[left], case[right]) for case in cases}
        assert pairs == {(i, j) for i in dimensions[left] for j in dimensions[right]}
    assert len(cases) < 18


@pytest.mark.parametrize("case", CASES, ids=format_case)
def test_gradients_of_the_policy(case: dict[str, Any]) -> None:
    named = {key: case[key] for key in ("policy_loss_type", "advantage_estimator", "loss_reduction")}
    s = Settings(**named, **case["kl"], **case["terms"])
    assert_policy_as_specified(s, case["several_rows"], **case["micro_batches"])


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "bias correction"])
@pytest.mark.parametrize("name", get_args(KLEstimator))
def test_gradients_of_kl_losses(name: str, corrected: bool) -> None:
    s = Settings(kl_estimator_type=name, use_bias_correction_kl=corrected, kl_loss_coef=1.0)
    assert_policy_as_specified(s, several_rows=True)


@pytest.mark.parametrize(
    "case",
    pairwise_table(
        {
            "n_ranks": [1, 2, 4, 16],
            "loss": ["regular", "kl_cov"],
            "reduction": REDUCTIONS,
            "several_rows": [False, True],
        }
    ),
    ids=format_case,
)
def test_gradient_and_metrics_of_the_policy_do_not_depend_on_the_number_of_ranks(case: dict[str, Any]) -> None:
    """With ten trajectories, some of the 16 ranks have no row, and some have several micro-batches."""
    terms: dict[str, Any] = {"use_entropy_loss": True, "top_entropy_quantile": 0.5, "tis_ratio_type": "token"}
    s = Settings(policy_loss_type=case["loss"], loss_reduction=case["reduction"], **terms)
    metrics = assert_policy_as_specified(s, case["several_rows"], case["n_ranks"], micro_train_batch_size_per_gpu=2)
    _, whole = train("policy", case["several_rows"], configured(s, micro_train_batch_size_per_gpu=64))
    assert metrics == pytest.approx(whole, **FLOAT_METRICS)


@pytest.mark.parametrize(
    "case",
    pairwise_table(
        {
            "n_ranks": [1, 3, 16],
            "several_rows": [False, True],
            "micro_batches": DIMENSIONS["micro_batches"],
            "settings": [
                {"advantage_estimator": "gae"},
                {"advantage_estimator": "gae", "gamma": 0.5, "value_clip": None},
                {"advantage_estimator": "gae_per_turn"},
                {"advantage_estimator": "grpo", "value_clip": None},
            ],
        }
    ),
    ids=format_case,
)
def test_gradient_and_loss_of_the_critic(case: dict[str, Any]) -> None:
    s, several_rows = Settings(**case["settings"]), case["several_rows"]
    gradient, metrics = train("critic", several_rows, configured(s, **case["micro_batches"]), case["n_ranks"])
    rollouts, scored = specified(several_rows)
    expected = update(rollouts, scored, s).critic
    assert_same_gradient(gradient, scored.critic.gradient(expected))
    assert metrics["critic_loss"] == pytest.approx(expected.item(), **FLOAT_METRICS)


# -- the specification itself


@pytest.mark.parametrize(
    "change",
    [
        *({"loss_reduction": name} for name in REDUCTIONS if name != "token_mean"),
        *({"policy_loss_type": name} for name in POLICY_LOSSES.list_available() if name != "regular"),
        *({"kl_estimator_type": name} for name in get_args(KLEstimator) if name != "k3"),
        {"use_kl_loss": False},
        {"use_bias_correction_kl": True},
        {"use_entropy_loss": True},
        {"top_entropy_quantile": 0.9},
        {"tis_ratio_type": "token"},
        {"tis_ratio_type": "sequence"},
        {"off_policy_sequence_mask_threshold": 0.01},
        {"eps_clip_low": 1.0},
        {"eps_clip_high": 9.0},
    ],
    ids=str,
)
def test_every_setting_changes_the_specified_gradient(change: dict[str, Any]) -> None:
    """Without this, the comparison could not detect a setting that the trainer ignores."""
    rollouts, scored = specified(several_rows=True)
    plain, changed = (
        scored.policy.gradient(update(rollouts, scored, s).final) for s in (Settings(), Settings(**change))
    )
    largest = max(values.abs().max().item() for values in plain.values())
    assert max((plain[name] - changed[name]).abs().max().item() for name in plain) > 100 * EXACT * largest


def test_gradients_of_the_specification_are_those_of_its_models() -> None:
    """The specification differentiates losses through a Jacobian: compare it with one pass through the policy."""
    rollouts, scored = specified(several_rows=True)
    scores = [score_row(models().policy, row, TEMPERATURE) for t in rollouts for row in t.rows]
    loss, same_loss = (
        sum((row.logprobs.square() + row.entropies.cos()).sum() for row in rows) for rows in (scores, scored.new)
    )
    names, parameters = zip(*models().policy.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    assert_same_gradient(scored.policy.gradient(same_loss), expected)
