"""Scores are independent of micro-batches; rows without trained tokens are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_kit.trajectories import make_trajectory
from train_kit.workers import score_tokens
from transformers import PreTrainedModel

from skyrl_train.config import load_config
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.models.logprobs import response_logprobs


@pytest.mark.parametrize(
    ("budget", "expected_n_rows"),
    [
        ({}, [4]),
        ({"micro_forward_batch_size_per_gpu": 1}, [1, 1, 1, 1]),
        ({"micro_forward_batch_size_per_gpu": 3}, [3, 1]),
        ({"max_tokens_per_microbatch": 10}, [3, 1]),  # rows of 3, 4, 4 and 9 tokens, which share the first
    ],
)
def test_log_probs_do_not_depend_on_the_budget(
    policy: PreTrainedModel, budget: dict[str, Any], expected_n_rows: list[int]
) -> None:
    rewards = [[0.0] * n_tokens for n_tokens in (7, 1, 5, 2, 2)]
    trajectories = [make_trajectory(str(uid), values) for uid, values in enumerate(rewards)]
    trajectories[2] = make_trajectory("2", rewards[2], loss_mask=[0] * 5)
    batch = build_training_batch(trajectories, pad_token_id=0)
    cfg = load_config({"trainer": budget, "generator": {"sampling_params": {"temperature": 0.7}}}).trainer
    with torch.no_grad():
        expected, *_ = response_logprobs(policy, batch.sequences, batch.attention_mask, batch.loss_mask, 0.7)
    n_rows: list[int] = []
    hook = policy.base_model.register_forward_pre_hook(
        lambda _, __, inputs: n_rows.append(len(inputs["prefix_tree"].index)) if "prefix_tree" in inputs else None,
        with_kwargs=True,
    )
    logprobs = score_tokens(policy, batch, cfg).logprobs
    hook.remove()
    torch.testing.assert_close(logprobs, expected)
    assert not logprobs.requires_grad
    assert not logprobs[2].any()
    assert n_rows[2:] == expected_n_rows  # two passes check that the model can share prefixes
