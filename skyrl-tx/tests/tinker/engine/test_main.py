from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tx_kit.processes import start_python

from tx.tinker.doorbell import UNUSABLE


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "{} has no config.json; use the folder of a Hugging Face model"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "{} cannot be loaded: KeyError('num_attention_heads')"),
    ],
)
def test_an_unusable_model(tmp_path: Path, config: str | None, words: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if config is not None:
        (model / "config.json").write_text(config)
    flags = ("--base-model", str(model), "--checkpoints-base", str(tmp_path / "state"))
    engine = start_python("-m", "tx.tinker.engine", *flags, stderr=subprocess.PIPE)
    _, messages = engine.communicate(timeout=60)
    assert engine.returncode == UNUSABLE
    assert messages.splitlines()[-1] == words.format(model)
    assert ("Traceback" in messages) == (config is not None)  # what we did not foresee
