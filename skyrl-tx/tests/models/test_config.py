import json
from pathlib import Path
from typing import Any

import pytest
from tx_kit.models import LLAMA_ROPE

from tx.models.config import config_of, read_config


def read_json(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return read


def test_older_configuration_keys(models: Path) -> None:
    newer = read_json(models / "llama")
    older = {name: value for name, value in newer.items() if name not in ("rope_parameters", "head_dim")}
    scaling = {name: value for name, value in LLAMA_ROPE.items() if name != "rope_theta"}
    older |= {"rope_theta": LLAMA_ROPE["rope_theta"], "rope_scaling": scaling, "hidden_size": 64}
    assert config_of(older) == config_of(newer | {"hidden_size": 64})


def test_eos_tokens(models: Path, tmp_path: Path) -> None:
    assert read_config(models / "qwen3").eos_ids == (2,)
    (tmp_path / "config.json").write_text((models / "qwen3" / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert read_config(tmp_path).eos_ids == (3, 4)
    assert config_of(read_json(models / "qwen3") | {"eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; use one of: Qwen3"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported; use default or llama3"),
    ],
)
def test_unsupported_features_are_refused(models: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(read_json(models / "qwen3_moe") | changed)
