from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_kit.merges import save_base, save_experts
from train_kit.models import ROUTER_BIAS, save_biased_router

from skyrl_train.checkpoint.merge import average_models
from skyrl_train.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("frozen_objects")  # a merge collects garbage


@pytest.mark.parametrize(("shares", "is_tied"), [([0.3, 0.7], False), ([0.2, 0.3, 0.5], True)])
def test_an_average_has_the_mean_of_each_tensor(tmp_path: Path, shares: list[float], is_tied: bool) -> None:
    sources = [save_base(tmp_path / str(seed), seed=seed, is_tied=is_tied) for seed in range(len(shares))]
    report = average_models([str(source) for source in sources], tmp_path / "mean", shares)
    tensors = [load_file(source / "model.safetensors") for source in sources]
    for name, mean in load_file(tmp_path / "mean/model.safetensors").items():
        expected = sum(share * one[name].double() for share, one in zip(shares, tensors, strict=True))
        torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)
    assert report.n_changed == len([name for name in tensors[0] if "norm" not in name])  # norms start at 1
    assert report.logit_gap < 1e-5


@pytest.mark.parametrize("save", [save_experts, save_biased_router])
def test_experts_and_the_bias_of_their_router_are_averaged(tmp_path: Path, save: Callable[..., Path]) -> None:
    sources = [save(tmp_path / str(seed), seed=seed) for seed in range(2)]
    report = average_models([str(source) for source in sources], tmp_path / "mean")
    one, other, mean = (load_file(tmp_path / name / "model.safetensors") for name in ("0", "1", "mean"))
    assert (ROUTER_BIAS in mean) == (save is save_biased_router)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (one[name] + other[name]) / 2)
    assert report.logit_gap < 1e-5


@pytest.mark.parametrize("target", [".", ".."])
def test_the_working_folder_is_no_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    base, work = save_base(tmp_path / "base"), tmp_path / "a/work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    with pytest.raises(ConfigError, match=r"already exists; choose a new folder"):
        average_models([str(base), str(base)], Path(target))
    assert not list(work.iterdir())


def test_models_that_cannot_be_averaged_are_refused(tmp_path: Path) -> None:
    one, other = (str(save_base(tmp_path / str(seed), seed=seed)) for seed in range(2))
    wide = str(save_base(tmp_path / "wide", hidden_size=64))
    for sources, weights, message in (
        ([one], None, "two or more models, but got 1"),
        ([one, other], [0.5, 0.6], r"got 2 weights \(sum 1.1\) for 2 models"),
        ([one, other], [1.0], r"got 1 weights \(sum 1\) for 2 models"),
        ([one, wide], None, r"has shape .* in .*, but .* in .*wide; average models of the same architecture"),
        ([one, one], None, "is identical to"),
        ([one, str(tmp_path / "none")], None, "there is no model"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            average_models(sources, tmp_path / "mean", weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "wide"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_average_of_low_precision_is_rounded_once(tmp_path: Path, dtype: str) -> None:
    shares = [0.3, 0.3, 0.4]
    sources = [save_base(tmp_path / str(seed), seed=seed, dtype=dtype) for seed in range(len(shares))]
    average_models([str(source) for source in sources], tmp_path / "mean", shares)
    tensors = [load_file(source / "model.safetensors") for source in sources]
    for name, mean in load_file(tmp_path / "mean/model.safetensors").items():
        exact = sum(share * one[name].double() for share, one in zip(shares, tensors, strict=True))
        assert isinstance(exact, torch.Tensor)
        assert mean.dtype == getattr(torch, dtype)
        is_rounded_once = mean == exact.to(mean.dtype)
        assert is_rounded_once.double().mean() > 0.98, name  # the sum is float32, so ties may go either way
