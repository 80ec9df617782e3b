import subprocess
from pathlib import Path

from tx_kit.processes import start_python

from tx.tinker.doorbell import UNUSABLE


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """`run/test_main.py` has a folder without a model."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    flags = ("--base-model", str(tmp_path), "--checkpoints-base", str(tmp_path / "state"))
    engine = start_python("-m", "tx.tinker.engine", *flags, stderr=subprocess.PIPE)
    _, messages = engine.communicate(timeout=60)
    assert engine.returncode == UNUSABLE
    assert "Traceback" in messages  # what we did not foresee
    assert messages.splitlines()[-1] == f"{tmp_path} cannot be loaded: KeyError('num_attention_heads')"
