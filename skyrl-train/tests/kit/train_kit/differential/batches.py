"""Random trajectories as tensors, for comparing our functions with those of other packages."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

EXACT = 1e-9  # float64 on both sides
NEAR = 1e-6  # the other side adds 1e-8 to a divisor, or has a float32 factor
FLOAT32 = 1e-5  # the other side uses single precision


@dataclass(frozen=True)
class Batch:
    """B trajectories of up to R tokens in groups of at least two, each with a sampled token; float64."""

    mask: torch.Tensor  # (B, R) 1 on sampled tokens: one run from the start, or several runs with gaps
    index: list[str]  # [B] the prompt of each row, in any order
    rewards: torch.Tensor  # (B, R) on every sampled token
    outcomes: torch.Tensor  # (B, R) on the last sampled token only
    values: torch.Tensor  # (B, R) of a critic
    old_log_probs: torch.Tensor  # (B, R)
    log_probs: torch.Tensor  # (B, R) of an updated policy
    ref_log_probs: torch.Tensor  # (B, R)
    sum_pi_squared: torch.Tensor  # (B, R) consistent with old_log_probs
    advantages: torch.Tensor  # (B, R) of both signs
    row_advantages: torch.Tensor  # (B, R) equal for all tokens of a row
    greedy_rewards: torch.Tensor  # (B,) equal for all rows of a prompt


def make_batch(seed: int, has_gaps: bool, outcome: str, drift: float) -> Batch:
    """Generate a batch; `outcome` is the range of rewards, `drift` the distance of the policy in nats per token."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=random)

    n_prompts = int(whole(1, 3))
    prompt = torch.arange(n_prompts).repeat_interleave(whole(2, 5, n_prompts))
    prompt = prompt[torch.randperm(len(prompt), generator=random)]
    shape = n_rows, length = len(prompt), int(whole(1, 7))
    mask = (torch.arange(length) < whole(1, length, n_rows, 1)).double()
    if has_gaps:
        mask[:, 1:] *= uniform(n_rows, length - 1) < 0.7
    scores = {"any": normal(n_rows), "0 or 1": whole(0, 1, n_rows).double(), "±1": whole(0, 1, n_rows).double() * 2 - 1}
    outcomes = torch.zeros_like(mask)
    outcomes[torch.arange(n_rows), (mask * torch.arange(length)).argmax(dim=1)] = scores[outcome]
    old_log_probs = (0.01 + 0.9 * uniform(*shape)).log()
    probs = old_log_probs.exp()
    return Batch(
        mask=mask,
        index=[f"prompt {p}" for p in prompt.tolist()],
        rewards=normal(*shape) * mask,
        outcomes=outcomes,
        values=normal(*shape),
        old_log_probs=old_log_probs,
        log_probs=(old_log_probs + drift * normal(*shape)).clamp(max=-1e-3),
        ref_log_probs=(old_log_probs + drift * normal(*shape)).clamp(max=-1e-3),
        sum_pi_squared=probs.square() + (1 - probs).square() * uniform(*shape),
        advantages=normal(*shape),
        row_advantages=normal(n_rows, 1).expand(shape).contiguous(),
        greedy_rewards=normal(n_prompts)[prompt],
    )


def batches(drift: float = 1.0, has_gaps: bool | None = None) -> st.SearchStrategy[Batch]:
    """Return a strategy for batches; by default with and without gaps. Half of them are close to the old policy."""
    return st.builds(
        make_batch,
        seed=st.integers(0, 2**32 - 1),
        has_gaps=st.booleans() if has_gaps is None else st.just(has_gaps),
        outcome=st.sampled_from(["any", "0 or 1", "±1"]),
        drift=st.sampled_from([drift / 100, drift]),
    )


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, tolerance: float = EXACT) -> None:
    """Assert equality on sampled tokens, with a tolerance that is absolute below 1 and relative above."""
    theirs = theirs.detach().to(ours.dtype)
    assert ours.shape == theirs.shape == mask.shape
    torch.testing.assert_close(ours.detach()[mask > 0], theirs[mask > 0], rtol=tolerance, atol=tolerance)
