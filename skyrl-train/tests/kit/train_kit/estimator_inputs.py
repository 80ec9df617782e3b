"""Random batches with every input that an advantage estimator can read."""

from typing import Any

import torch
from hypothesis import strategies as st

from skyrl_train.config.algorithm import AlgorithmConfig, GdpoConfig

TOKEN_INPUTS = ("token_level_rewards", "values", "old_log_probs", "ref_log_probs", "entropies", "sum_pi_squared")

Inputs = dict[str, Any]


def make_inputs(seed: int, n_rows: int, length: int) -> Inputs:
    """Generate inputs for up to three prompts, with turns, observations, padding and fully masked rows.

    Rewards, values and discounts are short binary fractions, which float32 adds without rounding.
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    def fractions(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=random).double() / 4

    n_prompts = int(torch.randint(1, 4, (), generator=random))
    prompt = torch.randint(0, n_prompts, (n_rows,), generator=random)
    ends = torch.randint(0, length + 1, (n_rows, 1), generator=random)
    mask = ((uniform(n_rows, length) < 0.7) & (torch.arange(length) < ends)).double()
    old_log_probs = uniform(n_rows, length).clamp(min=0.01).log()
    return {
        "token_level_rewards": fractions(n_rows, length) * mask * (uniform(n_rows, length) < 0.5),
        "response_mask": mask,
        "index": [f"prompt {p}" for p in prompt.tolist()],
        "values": fractions(n_rows, length),
        "old_log_probs": old_log_probs,
        "ref_log_probs": uniform(n_rows, length).clamp(min=0.01).log(),
        "entropies": uniform(n_rows, length),
        "sum_pi_squared": old_log_probs.exp().square() + uniform(n_rows, length) * 0.1,
        "greedy_rewards": fractions(n_prompts)[prompt],
        "reward_components": {"answer": fractions(n_rows), "format": fractions(n_rows)},
        "config": AlgorithmConfig(gdpo=GdpoConfig(weights={"format": 0.5})),
        "gamma": [1.0, 0.5][seed % 2],
        "lambd": [1.0, 0.5][seed // 2 % 2],
        "grpo_norm_by_std": seed % 3 > 0,
    }


inputs = st.builds(make_inputs, seed=st.integers(0, 10**6), n_rows=st.integers(1, 7), length=st.integers(1, 7))


def with_tensors(inputs: Inputs, change: Any) -> Inputs:
    """Apply `change(name, tensor)` to each tensor, including those of the reward components."""
    changed = {name: change(name, x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    components = inputs["reward_components"].items()
    return changed | {"reward_components": {name: change(name, x) for name, x in components}}


def select(inputs: Inputs, rows: list[int]) -> Inputs:
    """Return the inputs of the given rows, in this order."""
    chosen = with_tensors(inputs, lambda _, x: x[rows])
    return chosen | {"index": [inputs["index"][row] for row in rows]}
