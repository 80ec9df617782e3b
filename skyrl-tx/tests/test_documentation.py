from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tx_process import process
from tx_tiny_models import new_model, new_tokenizer

from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.losses import LOSSES

PAGE = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text("utf-8")


def test_every_setting_of_the_backend_is_there() -> None:
    for name in JaxConfig.model_fields:
        assert f"| `{name}` |" in PAGE


def test_every_loss_is_there_with_its_defaults() -> None:
    for name, loss in LOSSES.items():
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        assert re.findall(r"`(\w+)`", row)[1:] == [*loss.needs[1:], *loss.settings]
        assert [float(one) for one in re.findall(r"` ([\d.]+)", row)] == list(loss.settings.values())


def test_the_table_of_clients_is_the_one_that_was_measured() -> None:
    assert (Path(__file__).parent / "sdk" / "compatibility.md").read_text("utf-8") in PAGE


def test_the_ten_lines_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = new_tokenizer()
    new_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with process(tmp_path / "state", "--base-model", str(tmp_path / "model")) as server:
        code = code.replace("http://127.0.0.1:8000", server.url).replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
        written: dict[str, Any] = {}
        exec(compile(code, "docs/tinker.md", "exec"), written)
        written["service"].close(status="success").result()
    *steps, sampled = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[1]) for line in steps]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert sampled.startswith("SampleResponse(sequences=[SampledSequence(")
