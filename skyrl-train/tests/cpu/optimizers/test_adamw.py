import pytest
import torch

from skyrl_train.optimizers import AdamW, Muon
from skyrl_train.optimizers import adamw as adamw_module
from skyrl_train.optimizers.create import accumulate_in_float32

SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.01}


def train(dtype: torch.dtype, n_steps: int = 150, **settings: object) -> list[float]:
    """Return the losses of a small network that learns a fixed function, as means over 30 steps."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(8, 64, generator=generator) / 8
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 8)).to(dtype)
    accumulate_in_float32(network.parameters())
    optimizer = AdamW(network.parameters(), **(SETTINGS | settings))  # type: ignore[arg-type]
    losses = []
    for _ in range(n_steps):
        inputs = torch.randn(64, 64, generator=generator)
        loss = (network(inputs.to(dtype)).float() - (inputs @ target.T).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses).view(-1, 30).mean(1).tolist()


def test_short_weights_and_moments_follow_adamw() -> None:
    expected = train(torch.float32)
    assert expected[-1] < 0.3 * expected[0]
    assert train(torch.float32, quantizes_moments=True) == pytest.approx(expected, rel=0.01)
    assert train(torch.bfloat16) == pytest.approx(expected, rel=0.02)
    assert train(torch.bfloat16, quantizes_moments=True) == pytest.approx(expected, rel=0.02)


def test_updates_below_the_distance_of_bfloat16_numbers_are_kept_on_average() -> None:
    for rounds, moved in ((True, 100 * 1e-6), (False, 0.0)):
        weights = torch.nn.Parameter(torch.full((64, 256), 0.02, dtype=torch.bfloat16))
        before = weights.detach().float().mean().item()
        accumulate_in_float32([weights])
        optimizer = AdamW([weights], lr=1e-6, weight_decay=0.0, rounds_stochastically=rounds)
        for _ in range(100):
            weights.grad = torch.ones(64, 256)
            optimizer.step()
        assert before - weights.detach().float().mean().item() == pytest.approx(moved, rel=0.15)


@pytest.mark.parametrize("quantizes_moments", [False, True])
def test_a_step_does_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch, quantizes_moments: bool) -> None:
    """Also compare with PyTorch: the first step has exact moments, whatever their dtype."""
    results = []
    for chunk in (1 << 21, 1000):
        monkeypatch.setattr(adamw_module, "CHUNK_VALUES", chunk)
        generator = torch.Generator().manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(3, 40, 300, generator=generator))  # experts
        weights.grad = torch.randn(3, 40, 300, generator=generator)
        mirror = torch.nn.Parameter(weights.detach().clone())
        mirror.grad = weights.grad.clone()
        optimizer = AdamW([weights], quantizes_moments=quantizes_moments, **SETTINGS)  # type: ignore[arg-type]
        optimizer.step()
        torch.optim.AdamW([mirror], **SETTINGS).step()  # type: ignore[arg-type]
        torch.testing.assert_close(weights, mirror, rtol=0, atol=1e-7)
        weights.grad.mul_(0.5)
        optimizer.step()
        results.append(weights.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_update_of_muon_is_orthogonal_and_as_large_as_adamws(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shape, lr, decay = (32, 80), 1e-2, 0.1
    matrix = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    vector = torch.nn.Parameter(torch.randn(5, generator=generator))
    accumulate_in_float32([matrix])
    matrix.grad, vector.grad = torch.randn(shape, generator=generator), torch.ones(5)
    before, before_vector = matrix.detach().float().clone(), vector.detach().clone()
    optimizer = Muon([matrix, vector], [matrix], lr=lr, weight_decay=decay)
    optimizer.step()
    direction = matrix.grad / matrix.grad.norm()  # momentum scales the first gradient, and the scale cancels
    for _ in range(5):  # Newton-Schulz, in float32
        square = direction @ direction.T
        direction = 3.4445 * direction + (-4.775 * square + 2.0315 * square @ square) @ direction
    expected = before * (1 - lr * decay) - lr * 0.2 * max(shape) ** 0.5 * direction
    tolerance = 3e-4 if dtype == torch.float32 else 2**-6  # PyTorch iterates in bfloat16
    torch.testing.assert_close(matrix.detach().float(), expected, rtol=0, atol=tolerance)
    assert set(optimizer.state[matrix]) == {"step", "momentum_buffer"}
    torch.testing.assert_close(vector.detach(), before_vector * (1 - lr * decay) - lr)
