"""Our advantage estimators against those of verl, in float64, on sampled tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.differential.batches import EXACT, FLOAT32, NEAR, Batch, assert_same, batches
from train_kit.differential.verl import rewards_by_group
from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.ppo import core_algos as verl

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.inputs import named_inputs
from skyrl_train.config.algorithm import AlgorithmConfig, GdpoConfig


def ours(name: str, batch: Batch, rewards: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    available = {
        "token_level_rewards": rewards,
        "response_mask": batch.mask,
        "index": batch.index,
        "values": batch.values,
        "old_log_probs": batch.old_log_probs,
        "sum_pi_squared": batch.sum_pi_squared,
        "greedy_rewards": batch.greedy_rewards,
        "config": AlgorithmConfig(),
        **more,
    }
    estimator = advantage_estimator(name)
    return estimator(**named_inputs(estimator, available))


def assert_same_advantages(
    batch: Batch,
    our: tuple[torch.Tensor, torch.Tensor],
    their: tuple[torch.Tensor, torch.Tensor],
    tolerance: float = EXACT,
    returns_tolerance: float | None = None,
) -> None:
    assert_same(our[0], their[0], batch.mask, tolerance)
    assert_same(our[1], their[1], batch.mask, tolerance if returns_tolerance is None else returns_tolerance)


BY_GROUP = {
    "GRPO": ("grpo", {}, verl.compute_grpo_outcome_advantage, {}, EXACT),
    "GRPO without the division": (
        "grpo",
        {"grpo_norm_by_std": False},
        verl.compute_grpo_outcome_advantage,
        {"norm_adv_by_std_in_grpo": False},
        EXACT,
    ),
    "vectorized GRPO": ("grpo", {}, verl.compute_grpo_vectorized_outcome_advantage, {}, FLOAT32),
    "RLOO": ("rloo", {}, verl.compute_rloo_outcome_advantage, {}, EXACT),
    "vectorized RLOO": ("rloo", {}, verl.compute_rloo_vectorized_outcome_advantage, {}, EXACT),
    "REINFORCE++ with a baseline": (
        "reinforce++-baseline",
        {},
        verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
        {},
        NEAR,
    ),
    "OPO": ("opo", {}, verl.compute_opo_outcome_advantage, {}, EXACT),
    "GPG": ("gpg", {}, verl.compute_gpg_outcome_advantage, {}, NEAR),
    "pass@k": (
        "grpo_passk",
        {},
        verl.compute_grpo_passk_outcome_advantage,
        {"config": AlgoConfig(norm_adv_by_std_in_grpo=True)},
        EXACT,
    ),
    "pass@k without the division": (
        "grpo_passk",
        {"grpo_norm_by_std": False},
        verl.compute_grpo_passk_outcome_advantage,
        {"config": AlgoConfig(norm_adv_by_std_in_grpo=False)},
        EXACT,
    ),
}
"""Our estimator and settings, verl's function and settings, and the tolerance."""


@pytest.mark.parametrize("name", BY_GROUP)
@given(batch=batches())
def test_estimators_that_compare_groups(name: str, batch: Batch) -> None:
    """Groups have at least two rows, and rows a sampled token.

    verl keeps or refuses the score of a group of one, divides by 0 for a group without tokens, and counts rows without
    one as trajectories.
    """
    estimator, settings, theirs, their_settings, tolerance = BY_GROUP[name]
    for rewards in (batch.outcomes, batch.rewards) if name == "GRPO" else (batch.outcomes,):
        their = theirs(**rewards_by_group(batch, rewards), **their_settings)
        assert_same_advantages(batch, ours(estimator, batch, rewards, **settings), their, tolerance)


@given(batch=batches())
def test_reinforce_plus_plus(batch: Batch) -> None:
    for gamma in (1.0, 0.9):
        our = ours("reinforce++", batch, batch.rewards, gamma=gamma)
        their = verl.compute_reinforce_plus_plus_outcome_advantage(
            batch.rewards.clone(), batch.mask, config=AlgoConfig(gamma=gamma)
        )
        assert_same_advantages(batch, our, their, NEAR, EXACT)


@given(batch=batches())
def test_remax(batch: Batch) -> None:
    their = verl.compute_remax_outcome_advantage(batch.rewards.clone(), batch.greedy_rewards, batch.mask)
    assert_same_advantages(batch, ours("remax", batch, batch.rewards), their)


@given(batch=batches())
def test_gae(batch: Batch) -> None:
    """Batches include observations between turns; on both sides the successor of a token is the next sampled one."""
    for gamma, lambd in ((1.0, 1.0), (0.9, 0.8), (1.0, 0.0)):
        our = ours("gae", batch, batch.rewards, gamma=gamma, lambd=lambd)
        their = verl.compute_gae_advantage_return(batch.rewards, batch.values, batch.mask, gamma, lambd)
        assert_same_advantages(batch, our, their, NEAR, EXACT)


@pytest.mark.parametrize("has_gaps", [False, True])
@given(data=st.data())
def test_optimal_token_baseline(has_gaps: bool, data: st.DataObject) -> None:
    """verl has a separate function for gaps between turns.

    `handle_zero_tail` is off: the advantage of a token without peers is 0 here, not the return.
    """
    batch = data.draw(batches(has_gaps=has_gaps))
    multi_turn = verl.compute_multi_turn_optimal_token_baseline_advantage
    their = (multi_turn if has_gaps else verl.compute_optimal_token_baseline_advantage)(
        **rewards_by_group(batch, batch.rewards),
        old_log_probs=batch.old_log_probs,
        sum_pi_squared=batch.sum_pi_squared,
        handle_zero_tail=False,
    )
    assert_same_advantages(batch, ours("optimal_token_baseline", batch, batch.rewards), their, FLOAT32, EXACT)


@given(batch=batches())
def test_gdpo(batch: Batch) -> None:
    components = {"answer": batch.outcomes.sum(dim=1), "style": 10 * batch.rewards.sum(dim=1)}  # (B,) each
    config = AlgorithmConfig(gdpo=GdpoConfig(weights={"style": 0.5}))
    our = ours("gdpo", batch, batch.outcomes, reward_components=components, config=config)
    prompt_mask = torch.ones(len(batch.mask), 2)
    their = verl.compute_gdpo_outcome_advantage(
        **rewards_by_group(batch, batch.outcomes),
        config=AlgoConfig(gdpo_reward_keys=list(components), gdpo_reward_weights=[1.0, 0.5]),
        non_tensor_batch={name: total.numpy() for name, total in components.items()},
        batch={
            "prompts": torch.zeros_like(prompt_mask).long(),
            "attention_mask": torch.cat([prompt_mask, torch.ones_like(batch.mask)], dim=1).long(),
        },
    )
    assert_same_advantages(batch, our, their, FLOAT32)
