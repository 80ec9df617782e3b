"""Properties of every built-in advantage estimator."""

import inspect
import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.estimator_inputs import TOKEN_INPUTS, Inputs, inputs, make_inputs, select, with_tensors

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms import advantages as package
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS

BY_ROW = {"token_rewards", "on_policy_distillation", "remax"}
BY_GROUP = {"grpo", "grpo_passk", "maxrl", "opo", "optimal_token_baseline", "rloo"}
BY_TURN = {"grpo_per_turn", "rloo_per_turn"}
OVER_THE_BATCH = {"gae", "gae_per_turn", "gdpo", "gpg", "reinforce++", "reinforce++-baseline"}
EVERY = sorted(BY_ROW | BY_GROUP | BY_TURN | OVER_THE_BATCH)

every_estimator = pytest.mark.parametrize("name", EVERY)
few_examples = settings(max_examples=12)


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


Change = tuple[Inputs, Callable[[torch.Tensor], torch.Tensor]]
"""Changed inputs, and the function that undoes the change in the results."""


def reorder_rows(name: str, inputs: Inputs, rng: random.Random) -> Change:
    order = rng.sample(range(len(inputs["index"])), len(inputs["index"]))
    return select(inputs, order), lambda results: results[:, torch.tensor(order).argsort()]


def insert_column(name: str, inputs: Inputs, rng: random.Random) -> Change:
    """Insert padding on either side, or an observation in between unless it would split a turn."""
    length = inputs["response_mask"].shape[1]
    at = rng.choice([0, length]) if name.endswith("_per_turn") else rng.randint(0, length)
    fill = rng.choice([0.0, math.nan])

    def widen(tensor_name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            return x
        column = torch.full_like(x[:, :1], 0.0 if tensor_name == "response_mask" else fill)
        return torch.cat([x[:, :at], column, x[:, at:]], dim=1)

    def cut(results: torch.Tensor) -> torch.Tensor:
        assert (results[:, :, at] == 0).all()
        return torch.cat([results[:, :, :at], results[:, :, at + 1 :]], dim=2)

    return with_tensors(inputs, widen), cut


def append_empty_row(name: str, inputs: Inputs, rng: random.Random) -> Change:
    """Append a row without sampled tokens, of another prompt."""

    def lengthen(tensor_name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full_like(x[:1], math.nan if tensor_name in TOKEN_INPUTS else 0.0)])

    def cut(results: torch.Tensor) -> torch.Tensor:
        assert (results[:, -1] == 0).all()
        return results[:, :-1]

    return with_tensors(inputs, lengthen) | {"index": [*inputs["index"], "another prompt"]}, cut


def poison_other_tokens(name: str, inputs: Inputs, rng: random.Random) -> Change:
    def poison(tensor_name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs["response_mask"] > 0, x, math.nan) if tensor_name in TOKEN_INPUTS else x

    return with_tensors(inputs, poison), lambda results: results


@every_estimator
def test_nothing_is_discounted_by_default(name: str) -> None:
    parameters = inspect.signature(advantage_estimator(name)).parameters
    assert {parameters[key].default for key in ("gamma", "lambd") if key in parameters} <= {1.0}


@every_estimator
@given(inputs=inputs, rng=st.randoms(use_true_random=False))
@few_examples
def test_advantages_depend_on_the_sampled_tokens_only(name: str, inputs: Inputs, rng: random.Random) -> None:
    before = with_tensors(inputs, lambda _, x: x.clone())
    expected = estimate(name, inputs)
    assert expected.isfinite().all()
    assert (expected[:, inputs["response_mask"] == 0] == 0).all()
    for change in (reorder_rows, insert_column, append_empty_row, poison_other_tokens):
        changed, undo = change(name, inputs, rng)
        assert_same(undo(estimate(name, changed)), expected)
    after, before = inputs | inputs["reward_components"], before | before["reward_components"]
    assert all(torch.equal(x, before[key]) for key, x in after.items() if isinstance(x, torch.Tensor)), "changed inputs"


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
def test_the_type_of_the_mask_does_not_matter(name: str) -> None:
    inputs = make_inputs(seed=7, n_rows=6, length=6)
    for dtype in (torch.bool, torch.long, torch.float32):
        results = estimate(name, inputs | {"response_mask": inputs["response_mask"].to(dtype)})
        assert torch.equal(results, estimate(name, inputs))


@pytest.mark.parametrize("name", sorted(BY_ROW | BY_GROUP | BY_TURN))
@given(inputs=inputs, data=st.data())
@few_examples
def test_splitting_a_batch_between_prompts_does_not_matter(name: str, inputs: Inputs, data: st.DataObject) -> None:
    first = data.draw(st.sets(st.sampled_from(inputs["index"])))
    parts = [[i for i, uid in enumerate(inputs["index"]) if (uid in first) == wanted] for wanted in (True, False)]
    whole = estimate(name, inputs)
    for rows in filter(None, parts):
        assert_same(estimate(name, select(inputs, rows)), whole[:, rows])
