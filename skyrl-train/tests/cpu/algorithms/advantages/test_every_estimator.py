"""Properties of every built-in advantage estimator."""

from __future__ import annotations

import math

import pytest
import torch
from estimator_inputs import TOKEN_INPUTS, Inputs, inputs, make_inputs, select, with_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms import advantages as package
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS

BY_ROW = {"token_rewards", "on_policy_distillation", "remax"}
BY_GROUP = {"grpo", "grpo_passk", "maxrl", "opo", "optimal_token_baseline", "rloo"}
BY_TURN = {"grpo_per_turn", "rloo_per_turn"}
OVER_THE_BATCH = {"gae", "gae_per_turn", "gdpo", "gpg", "reinforce++", "reinforce++-baseline"}
EVERY = sorted(BY_ROW | BY_GROUP | BY_TURN | OVER_THE_BATCH)

every_estimator = pytest.mark.parametrize("name", EVERY)
few_examples = settings(max_examples=40)


def estimate(name: str, inputs: Inputs) -> torch.Tensor:
    """Return advantages and returns, stacked (2, B, R)."""
    return torch.stack(advantage_estimator(name)(**inputs))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_every_built_in_estimator_is_listed() -> None:
    ours = [
        name
        for name in ADVANTAGE_ESTIMATORS.list_available()
        if advantage_estimator(name).__module__.startswith(package.__name__)
    ]
    assert ours == EVERY


@every_estimator
@given(inputs=inputs)
@few_examples
def test_finite_and_exactly_zero_outside_the_mask(name: str, inputs: Inputs) -> None:
    results = estimate(name, inputs)
    assert results.isfinite().all()
    assert (results[:, inputs["response_mask"] == 0] == 0).all()


@every_estimator
@given(inputs=inputs, data=st.data())
@few_examples
def test_the_order_of_rows_does_not_matter(name: str, inputs: Inputs, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(inputs["index"]))))
    assert_same(estimate(name, select(inputs, order)), estimate(name, inputs)[:, order])


@every_estimator
@given(inputs=inputs, data=st.data())
@few_examples
def test_masked_columns_do_not_matter(name: str, inputs: Inputs, data: st.DataObject) -> None:
    """Padding on either side, and observations in between unless they would split a turn."""
    length = inputs["response_mask"].shape[1]
    by_turn = name.endswith("_per_turn")
    at = data.draw(st.sampled_from([0, length]) if by_turn else st.integers(0, length))
    fill = data.draw(st.sampled_from([0.0, math.nan]))

    def widened(tensor_name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            return x
        column = torch.full_like(x[:, :1], 0.0 if tensor_name == "response_mask" else fill)
        return torch.cat([x[:, :at], column, x[:, at:]], dim=1)

    results = estimate(name, with_tensors(inputs, widened))
    assert (results[:, :, at] == 0).all()
    assert_same(torch.cat([results[:, :, :at], results[:, :, at + 1 :]], dim=2), estimate(name, inputs))


@every_estimator
@given(inputs=inputs)
@few_examples
def test_a_row_without_sampled_tokens_does_not_matter_to_other_prompts(name: str, inputs: Inputs) -> None:
    def with_empty_row(tensor_name: str, x: torch.Tensor) -> torch.Tensor:
        fill = math.nan if tensor_name in TOKEN_INPUTS else 0.0
        return torch.cat([x, torch.full_like(x[:1], fill)])

    longer = with_tensors(inputs, with_empty_row) | {"index": [*inputs["index"], "another prompt"]}
    results = estimate(name, longer)
    assert (results[:, -1] == 0).all()
    assert_same(results[:, :-1], estimate(name, inputs))


@every_estimator
@given(inputs=inputs)
@few_examples
def test_nan_outside_the_mask_stays_there(name: str, inputs: Inputs) -> None:
    def poisoned(tensor_name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs["response_mask"] > 0, x, math.nan) if tensor_name in TOKEN_INPUTS else x

    assert torch.equal(estimate(name, with_tensors(inputs, poisoned)), estimate(name, inputs))


@every_estimator
@given(inputs=inputs)
@few_examples
def test_single_precision_is_kept_and_gives_the_same(name: str, inputs: Inputs) -> None:
    doubles = estimate(name, with_tensors(inputs, lambda _, x: x.float().double()))
    singles = estimate(name, with_tensors(inputs, lambda _, x: x.float()))
    assert doubles.dtype == torch.float64
    assert singles.dtype == torch.float32
    torch.testing.assert_close(singles.double(), doubles, atol=1e-5, rtol=1e-5)


@every_estimator
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_the_type_of_the_mask_does_not_matter(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(seed=7, n_rows=6, length=6)
    results = estimate(name, inputs | {"response_mask": inputs["response_mask"].to(dtype)})
    assert torch.equal(results, estimate(name, inputs))


@every_estimator
@given(inputs=inputs)
@few_examples
def test_inputs_are_unchanged(name: str, inputs: Inputs) -> None:
    before = with_tensors(inputs, lambda _, x: x.clone())
    estimate(name, inputs)
    after, before = inputs | inputs["reward_components"], before | before["reward_components"]
    assert all(torch.equal(x, before[key]) for key, x in after.items() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("name", sorted(BY_ROW | BY_GROUP | BY_TURN))
@given(inputs=inputs, data=st.data())
@few_examples
def test_splitting_a_batch_between_prompts_does_not_matter(name: str, inputs: Inputs, data: st.DataObject) -> None:
    first = data.draw(st.sets(st.sampled_from(inputs["index"])))
    parts = [[i for i, uid in enumerate(inputs["index"]) if (uid in first) == wanted] for wanted in (True, False)]
    whole = estimate(name, inputs)
    for rows in filter(None, parts):
        assert_same(estimate(name, select(inputs, rows)), whole[:, rows])


@pytest.mark.parametrize("name", sorted(OVER_THE_BATCH))
def test_estimators_over_the_batch_depend_on_the_split(name: str) -> None:
    inputs = make_inputs(seed=4, n_rows=7, length=7)
    rows = [i for i, uid in enumerate(inputs["index"]) if uid == inputs["index"][0]]
    assert 1 < len(rows) < 7
    assert not torch.allclose(estimate(name, select(inputs, rows))[0], estimate(name, inputs)[0, rows], atol=1e-3)
