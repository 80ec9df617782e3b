import torch

from skyrl_train.optimizers.rounding import noise_generator, round_to_bfloat16

CPU = torch.device("cpu")


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    """A value between two neighbors becomes the upper one with the probability of its distance to the lower one."""
    n, distance = 1 << 20, 2**-7  # of the neighbors of 1
    for share in (0.01, 0.5, 0.9):
        values = torch.full((n,), 1 + share * distance)
        rounded = round_to_bfloat16(values, noise_generator(CPU, 1, 2)).float()
        assert set(rounded.tolist()) == {1, 1 + distance}
        is_upper = (rounded > 1).double().mean().item()
        assert abs(is_upper - share) < 5 * (share * (1 - share) / n) ** 0.5
        assert torch.equal(rounded, round_to_bfloat16(values, noise_generator(CPU, 1, 2)).float())
        assert not torch.equal(rounded, round_to_bfloat16(values, noise_generator(CPU, 1, 3)).float())
    values = torch.randn(3, 1001)
    mean = torch.stack([round_to_bfloat16(values, noise_generator(CPU, key)) for key in range(400)]).float().mean(0)
    nearest = values.bfloat16().float()
    assert (mean - values).abs().mean() < 0.1 * (nearest - values).abs().mean()


def test_bfloat16_values_infinities_and_nan_stay() -> None:
    values = torch.cat([torch.randn(997).bfloat16().float(), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    assert torch.equal(round_to_bfloat16(values, noise_generator(CPU)).float(), values)
    assert round_to_bfloat16(torch.full((100,), torch.nan), noise_generator(CPU)).isnan().all()
