import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.trajectories import make_segment, make_trajectory
from train_kit.workers import SingleRankGroup, config, policy_objective
from transformers import PreTrainedModel

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.objectives import ValueObjective
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import DivergenceError
from skyrl_train.learner import Learner, _select_probe
from skyrl_train.models.loading import load_model
from skyrl_train.types import TrainingBatch, Trajectory

COEFFICIENT = 0.5
IN_REWARD = {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator_type": "k1"}


def learner(model: PreTrainedModel, **algorithm: Any) -> Learner:
    cfg = config(algorithm={"kl_loss_coef": COEFFICIENT, **algorithm}).trainer
    policy = SingleRankGroup("policy", model, cfg, policy_objective(cfg))
    return Learner(cfg, advantage_estimator(cfg.algorithm.advantage_estimator), policy=policy.group)


def two_rows(uid: str, repetition: int, *rewards: float) -> Trajectory:
    """A trajectory whose history was rewritten before its last turn."""
    earlier = [make_segment([reward]) for reward in rewards[:-1]]
    return make_trajectory(uid, [rewards[-1]], earlier=earlier, repetition=repetition)


def with_kl(batch: TrainingBatch, *token_kl: float) -> TrainingBatch:
    """Return the batch with log-probs whose k1 estimate is the given value in each row's token."""
    ref = torch.full_like(batch.loss_mask, -2.0)
    return replace(batch, ref_logprobs=ref, old_logprobs=ref + torch.tensor(token_kl)[:, None])


def test_groups_of_equal_total_reward_are_filtered(tiny_model: PreTrainedModel) -> None:
    trajectories = [
        two_rows("0", 0, 1.0, 0.0),
        two_rows("0", 1, 0.0, 1.0),
        two_rows("1", 0, 0.5, 0.5),
        two_rows("1", 1, 0, 0),
    ]
    batch, metrics = learner(tiny_model, zero_variance_filter=True).filter_groups(build_training_batch(trajectories, 0))
    assert batch.loss_mask.sum(dim=1).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert metrics.numbers() == {"reward/num_zero_variance_filtered": 2}


def test_the_reward_of_a_trajectory_is_the_sum_over_its_rows(tiny_model: PreTrainedModel) -> None:
    trajectories = [two_rows("0", i, 0.5, 0.5) for i in range(4)]
    _, metrics = learner(tiny_model).advantages(build_training_batch(trajectories, 0))
    assert metrics.numbers()["loss/avg_final_rewards"] == 1.0


def test_the_kl_penalties_of_all_rows_lower_the_reward_of_the_trajectory(tiny_model: PreTrainedModel) -> None:
    trajectories = [two_rows("0", 0, 0.0, 1.0), two_rows("0", 1, 0.0, 1.0)]
    batch = with_kl(build_training_batch(trajectories, 0), 0.4, 0.1, 0.0, 0.1)
    batch, metrics = learner(tiny_model, **IN_REWARD, grpo_norm_by_std=False).advantages(batch)
    assert batch.advantages is not None
    total = COEFFICIENT * 0.4  # additional penalty of the first trajectory, in its earlier row
    expected = torch.tensor([[-total / 2], [-total / 2], [total / 2], [total / 2]])
    torch.testing.assert_close(batch.advantages, expected)
    assert metrics.numbers()["loss/avg_final_rewards"] == pytest.approx(1 - COEFFICIENT * 0.3)
    assert metrics.numbers()["loss/avg_kl"] == pytest.approx(0.15)
    assert metrics.numbers()["loss/avg_kl_max"] == pytest.approx(0.4)


def test_padding_does_not_count_as_a_token_without_divergence(tiny_model: PreTrainedModel) -> None:
    trajectories = [make_trajectory("0", [0.0], repetition=0), make_trajectory("0", [0.0] * 3, repetition=1)]
    batch = build_training_batch(trajectories, 0)
    old = torch.full_like(batch.loss_mask, -1.5)
    batch = replace(batch, old_logprobs=old, ref_logprobs=old - 0.4)
    _, metrics = learner(tiny_model, **IN_REWARD).advantages(batch)
    assert metrics.numbers()["loss/avg_kl"] == pytest.approx(0.4)


def test_the_kl_controller_counts_trajectories(tiny_model: PreTrainedModel) -> None:
    adaptive = IN_REWARD | {"kl_ctrl": {"type": "adaptive", "kl_target": 0.01, "horizon": 10}}
    coefficients = []
    for rows in ((0.0, 1.0), (0.0, 0.0, 0.0, 1.0)):
        model = learner(tiny_model, **adaptive)
        batch = build_training_batch([two_rows("0", i, *rows) for i in range(2)], 0)
        model.advantages(with_kl(batch, *[1.0] * len(batch)))
        coefficients.append(model.state_dict()["kl_controller"]["value"])
    assert coefficients == pytest.approx([COEFFICIENT * (1 + 0.2 * 2 / 10)] * 2), "two trajectories at a horizon of ten"


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda model: model.base_model.norm.weight[0].fill_(math.nan), "its weights are NaN or infinite"),
        (
            lambda model: model.get_input_embeddings().weight.fill_(1e30),
            "the gradient of its outputs is 0, so it can no longer learn",
        ),
        (lambda model: model.base_model.norm.weight.fill_(1e38), r"the gradient of its outputs is (nan|inf)"),
        (
            lambda model: model.get_output_embeddings().weight.mul_(1e5),
            r"the tokens that it was trained on have a mean log-prob of -\d+",
        ),
    ],
    ids=["NaN", "hidden states overflow", "gradients overflow", "other tokens are certain"],
)
async def test_weights_that_have_diverged_are_found(
    tiny_model: PreTrainedModel, harm: Callable[[PreTrainedModel], object], fault: str
) -> None:
    model = copy.deepcopy(tiny_model)
    trained = learner(model)
    batch = build_training_batch([two_rows("0", i, 0.0, float(i)) for i in range(4)], 0)
    await trained.check_weights()  # before the first update
    batch, _ = trained.advantages(await trained.score(batch))
    await trained.update_policy(batch)
    await trained.check_weights()
    with torch.no_grad():
        harm(model)
    with pytest.raises(
        DivergenceError, match=rf"^the policy has diverged with trainer\.policy\.opt\S+\.lr=1e-06: {fault}"
    ):
        await trained.check_weights()


async def test_a_critic_of_large_negative_returns_has_not_diverged(
    tiny_model: PreTrainedModel, tiny_model_path: Path
) -> None:
    """Values have the scale of rewards. Only the mean log-prob has a limit."""
    cfg = config().trainer
    value_model = load_model(str(tiny_model_path), "critic", dtype=torch.float32, device=torch.device("cpu"))
    critic = SingleRankGroup("critic", value_model, cfg, ValueObjective(None))
    policy = SingleRankGroup("policy", copy.deepcopy(tiny_model), cfg, policy_objective(cfg))
    trained = Learner(cfg, advantage_estimator("gae"), policy=policy.group, critic=critic.group)
    batch = build_training_batch([two_rows("0", i, 0.0, -500.0) for i in range(4)], 0)
    batch, _ = trained.advantages(await trained.score(batch))
    await trained.update_critic(batch)
    with torch.no_grad():
        value_model.score.bias.fill_(-500.0)
    await trained.check_weights()


async def test_a_policy_that_has_become_certain_has_not_diverged(tiny_model: PreTrainedModel) -> None:
    """The gradient of a solved task may underflow to 0."""
    model = copy.deepcopy(tiny_model)
    trained = learner(model)
    batch = build_training_batch([two_rows("0", i, 0.0, float(i)) for i in range(4)], 0)
    scored = await trained.score(batch)
    await trained.update_policy(trained.advantages(scored)[0])
    sampled = batch.sequences[batch.attention_mask.bool()].unique()
    assert len(sampled) > 1
    with torch.no_grad():
        hidden_size = model.config.hidden_size
        for layer in model.base_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.base_model.norm.weight.fill_(1e3)
        embeddings = torch.eye(model.config.vocab_size, hidden_size)
        model.get_input_embeddings().weight.copy_(embeddings)
        model.get_output_embeddings().weight.copy_(embeddings.roll(1, dims=0))  # each token is followed by the next
    probe = (await trained.policy.probe(batch)).numbers()
    assert probe == {"mean": 0.0, "grad_norm": 0.0}
    await trained.check_weights()


def test_new_weights_are_tested_on_few_tokens_of_the_rows_that_are_trained_first() -> None:
    loss_mask = torch.zeros(4, 30)
    loss_mask[0, 20:] = loss_mask[2, 5:7] = loss_mask[3, :3] = 1  # row 1 is not trained
    sequences = torch.arange(4 * 40).view(4, 40)
    batch = TrainingBatch(sequences, torch.ones_like(sequences), loss_mask, draws=torch.arange(4))
    probe = _select_probe(batch)
    assert torch.equal(probe.sequences, sequences[[3, 2], : 10 + 5 + 8])
    assert torch.equal(probe.loss_mask, loss_mask[[3, 2], : 5 + 8])
    assert _select_probe(batch.select([1])) is None
