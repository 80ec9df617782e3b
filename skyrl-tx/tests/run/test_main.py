import re
import subprocess
from importlib.metadata import version
from pathlib import Path

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
    wrong = tx("server")
    assert wrong.returncode == 1
    assert "unknown command 'server'" in wrong.stderr


def test_a_server_whose_model_is_unusable_exits(tmp_path: Path) -> None:
    flags = ("--base-model", str(tmp_path), "--port", "0", "--checkpoints-base", str(tmp_path / "state"))
    wrong = tx("serve", *flags)
    assert wrong.returncode == 1
    assert f"giving up: {tmp_path} has no config.json; use the folder of a Hugging Face model" in wrong.stderr
    assert "Traceback" not in wrong.stderr  # of the engine, which foresees this


def test_status_without_a_server() -> None:
    found = tx("status", "--url", "http://127.0.0.1:9")
    assert found.returncode == 1
    assert found.stderr.startswith("tx status: no response from http://127.0.0.1:9 (")


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
