import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skyrl_train.models.generation import add_eos_ids, save_model
from skyrl_train.models.loading import set_train_dtype


@pytest.mark.parametrize("is_empty", [False, True])
def test_all_weights_become_float32_and_stay_tied(tiny_model: PreTrainedModel, is_empty: bool) -> None:
    model = copy.deepcopy(tiny_model).bfloat16()
    model.model.norm.float()  # as transformers keeps some weights of some models
    model.lm_head.weight = model.model.embed_tokens.weight
    parameters = dict(model.named_parameters())
    expected = {name: parameter.detach().float() for name, parameter in parameters.items()}
    dtypes = set_train_dtype(model, torch.float32, is_empty=is_empty)
    assert dtypes == {name: torch.bfloat16 for name in parameters if name != "model.norm.weight"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], "an optimizer or an engine may have it"
        assert parameter.dtype == torch.float32
        assert is_empty or torch.equal(parameter, expected[name])
    assert set_train_dtype(model, torch.float32, is_empty=False) == {}


def test_the_configuration_of_a_folder_names_the_type_of_its_weights(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model)
    tensors = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    save_model(model, tmp_path / "rounded", tensors)
    save_model(model, tmp_path / "own")
    for folder, dtype in (("rounded", torch.bfloat16), ("own", torch.float32)):
        assert AutoConfig.from_pretrained(tmp_path / folder).dtype == dtype
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert loaded.dtype == dtype
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter.to(dtype)), name


@pytest.mark.parametrize(
    ("own", "added", "expected"),
    [(2, [3], [2, 3]), ([2, 3], [3], [2, 3]), (None, [3], [3]), (2, [None], 2), (None, [None], None)],
)
def test_eos_tokens_are_added_once(
    own: int | list[int] | None, added: list[int | None], expected: int | list[int] | None, tmp_path: Path
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": own}))
    add_eos_ids(tmp_path, added)
    assert json.loads(file.read_text()) == {"eos_token_id": expected}
