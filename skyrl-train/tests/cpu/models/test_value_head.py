"""Critics loaded from language models and from exported critics."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_kit.models import CPU
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import CRITIC_PATH, load_model
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types import TrainingBatch, ValueScores

SEQUENCES = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 0]])
ATTENTION = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
LOSS_MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])


def load(path: Path) -> PreTrainedModel:
    return load_model(str(path), "critic", key=CRITIC_PATH, dtype=torch.float32, device=CPU)


def values_of(model: PreTrainedModel) -> torch.Tensor:
    rows = TrainingBatch(SEQUENCES, ATTENTION, LOSS_MASK, draws=torch.arange(len(SEQUENCES)))
    scores = ScoringModule(model, is_critic=True)(rows)
    assert isinstance(scores, ValueScores)
    return scores.values


def test_values_of_a_language_model_start_at_zero(tiny_model_path: Path) -> None:
    model = load(tiny_model_path)
    assert not values_of(model).any()
    language_model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    for name, tensor in language_model.base_model.state_dict().items():
        assert torch.equal(tensor, model.base_model.state_dict()[name]), name
    assert not any(module.training for module in model.modules()), "dropout would make values random"


def test_a_value_is_that_of_the_state_before_the_token(tiny_model_path: Path, tmp_path: Path) -> None:
    model = load(tiny_model_path)
    torch.nn.init.normal_(model.score.weight)
    values = values_of(model)
    for row, column, before in ((0, 0, [5]), (0, 2, [5, 6, 7]), (1, 1, [9, 10, 11, 12])):
        expected = model(input_ids=torch.tensor([before]), use_cache=False).logits[0, -1, 0]
        torch.testing.assert_close(values[row, column], expected)
    assert (values[LOSS_MASK == 0] == 0).all()
    model.save_pretrained(tmp_path)
    exported = values_of(load(tmp_path))
    torch.testing.assert_close(exported, values, msg="an exported critic keeps its head")


def test_a_folder_with_missing_weights_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_path, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path=.*lacks 1 weights.*norm\.weight"):
        load(folder)
