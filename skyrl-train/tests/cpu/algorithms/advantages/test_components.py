import statistics

import pytest
import torch

from skyrl_train.algorithms.advantages import gdpo
from skyrl_train.algorithms.masked import masked_whiten
from skyrl_train.config.algorithm import AlgorithmConfig, GdpoConfig
from skyrl_train.errors import ConfigError

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.float64)
UIDS = ["a", "a", "b", "b"]
COMPONENTS = {
    "answer": torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
    "format": torch.tensor([0.1, 0.3, -0.2, -0.2], dtype=torch.float64),
}


def config(**weights: float) -> AlgorithmConfig:
    return AlgorithmConfig(gdpo=GdpoConfig(weights=weights))


def estimate(settings: AlgorithmConfig) -> torch.Tensor:
    advantages, returns = gdpo(response_mask=MASK, index=UIDS, reward_components=COMPONENTS, config=settings)
    assert torch.equal(advantages, returns)
    return advantages


def expected(answer_weight: float, format_weight: float) -> torch.Tensor:
    """In group a the components disagree; in b the format is constant. The std of each pair of 0 and 1 is 0.7071."""
    unit = 0.5**0.5
    answer, form = [unit, -unit, -unit, unit], [-unit, unit, 0, 0]
    total = [answer_weight * a + format_weight * f for a, f in zip(answer, form, strict=True)]
    tokens = [x for x, mask in zip(total, MASK, strict=True) for _ in range(int(mask.sum()))]
    whitened = [(x - statistics.fmean(tokens)) / statistics.stdev(tokens) for x in total]
    return torch.tensor(whitened, dtype=torch.float64)[:, None] * MASK


@pytest.mark.parametrize(
    ("weights", "answer_weight", "format_weight"),
    [({}, 1, 1), ({"format": 0.5}, 1, 0.5), ({"answer": -2.0, "format": 0.0}, -2, 0)],
)
def test_components_are_normalized_separately_and_weighted(
    weights: dict[str, float], answer_weight: float, format_weight: float
) -> None:
    actual = estimate(config(**weights))
    torch.testing.assert_close(actual, expected(answer_weight, format_weight), atol=1e-5, rtol=0)  # std(format) + 1e-6


def test_equal_sums_of_different_components_get_different_advantages() -> None:
    components = {"answer": torch.tensor([1.0, 0, 0, 0]), "format": torch.tensor([0.0, 1, 1, 0])}
    advantages, _ = gdpo(response_mask=torch.ones(4, 1), index=["a"] * 4, reward_components=components, config=config())
    assert advantages[0, 0] > advantages[1, 0] + 0.1  # the rarer component has the larger advantage


def test_equal_components_give_exactly_zero() -> None:
    for size in range(2, 8):  # the mean of n times 0.1 is not exactly 0.1 for every n
        components = {
            "answer": torch.tensor([0.1] * size + [0.7] * size),
            "format": torch.tensor([-0.3] * size + [0.1] * size),
        }
        advantages, _ = gdpo(
            response_mask=torch.ones(2 * size, 2),
            index=["a"] * size + ["b"] * size,
            reward_components=components,
            config=config(),
        )
        assert not advantages.any()


def test_one_component_is_grpo_whitened() -> None:
    advantages, _ = gdpo(
        response_mask=MASK, index=UIDS, reward_components={"answer": COMPONENTS["answer"]}, config=config()
    )
    normalized = torch.tensor([1.0, -1, -1, 1], dtype=torch.float64)[:, None] * MASK * 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(advantages, masked_whiten(normalized, MASK))


def test_components_that_nearly_cancel_keep_their_precision() -> None:
    answer = torch.tensor([0.1, 0.7, 0.4, 0.9])
    components = {"answer": answer, "format": 2 - 3 * answer + torch.tensor([0.0, 1e-3, 0.0, -1e-3])}
    in_single, _ = gdpo(response_mask=MASK.float(), index=["a"] * 4, reward_components=components, config=config())
    in_double, _ = gdpo(
        response_mask=MASK,
        index=["a"] * 4,
        reward_components={name: scores.double() for name, scores in components.items()},
        config=config(),
    )
    assert in_single.dtype == torch.float32
    torch.testing.assert_close(in_single.double(), in_double, atol=1e-6, rtol=0)


def test_an_unknown_name_is_refused_with_the_available_names() -> None:
    with pytest.raises(ConfigError, match=r"gdpo\.weights names anwser,.* the components are: answer, format$"):
        estimate(config(anwser=1.0))


def test_missing_components_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs the components of rewards"):
        gdpo(response_mask=MASK, index=UIDS, reward_components={}, config=config())
