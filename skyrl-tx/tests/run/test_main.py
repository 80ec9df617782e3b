import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from tx_kit.processes import child_environment, python
from tx_kit.servers import BASE_MODEL, serving

from tx.run import status


def tx(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python(), "-m", "tx.run.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60)


def test_commands() -> None:
    assert tx("version").stdout.startswith(f"skyrl-tx {version('skyrl-tx')}\njax ")
    assert "tx serve --base-model MODEL" in tx().stdout
    assert "--max-lora-rank" in tx("serve", "--help").stdout
    wrong = tx("srve")
    assert wrong.returncode == 1
    assert "unknown command 'srve'. Did you mean 'serve'?" in wrong.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "{} has no config.json; use the folder of a Hugging Face model"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "failed to load {}: KeyError('num_attention_heads')"),
    ],
)
def test_a_server_whose_model_is_unusable_exits(tmp_path: Path, config: str | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    flags = ("--base-model", str(tmp_path), "--port", "0", "--checkpoints-base", str(tmp_path / "state"))
    wrong = tx("serve", *flags)
    assert wrong.returncode == 1
    assert f"giving up: {message.format(tmp_path)}" in wrong.stderr
    assert ("Traceback" in wrong.stderr) == (config is not None)  # for errors that the engine does not foresee


def test_status(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        client = running.sdk()
        model = client.create_lora_training_client(BASE_MODEL, rank=4).result()
        text, is_up = status.report(running.url)
        assert is_up
        assert text.splitlines()[:2] == [f"{running.url}: {BASE_MODEL}", "engine: up"]
        assert re.search(rf"  {model.model_id}  {BASE_MODEL}  rank 4  last request \d+ s ago", text)
        printed = tx("status", "--url", running.url)
        assert (printed.returncode, printed.stdout.splitlines()[:2]) == (0, text.splitlines()[:2])
        client.close(status="success").result()
    with serving(tmp_path / "other", engine=False) as running:
        text, is_up = status.report(running.url)
        assert (is_up, "engine: down" in text) == (False, True)
    failed = tx("status", "--url", "http://127.0.0.1:9")
    assert failed.returncode == 1
    assert failed.stderr.startswith("tx status: no response from http://127.0.0.1:9 (")
