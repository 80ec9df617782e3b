import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from tx_kit.models import save_chat_model
from tx_kit.processes import start_python

from tx.run.train import main

N_ROWS, BATCH = 12, 4
N_STEPS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    save_chat_model("qwen3", folder / "model", n_layers=1)
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(N_ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def arguments(folder: Path, output: Path, **flags: object) -> list[str]:
    settings = {
        "base_model": folder / "model",
        "dataset": folder / "rows.jsonl",
        "output_dir": output,
        "lora_rank": 8,
        "learning_rate": 1e-2,
        "batch_size": BATCH,
        "epochs": 40,
        "save_steps": 20,
        **flags,
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = load_file(output / "adapter" / "adapter_model.safetensors")
    return found


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    main(arguments(folder, output))
    return output


def test_the_loss_falls_and_peft_reads_the_adapter(folder: Path, whole: Path) -> None:
    steps = metrics(whole)
    assert [one["step"] for one in steps] == list(range(1, N_STEPS + 1))
    assert steps[-1]["loss"] < 0.85 * steps[0]["loss"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), whole / "adapter")
    assert model.peft_config["default"].r == 8
    assert [one.name for one in (whole / "checkpoints").iterdir()] == [str(N_STEPS)]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_killed_run_resumes(folder: Path, whole: Path, tmp_path: Path, number: signal.Signals) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = start_python("-m", "tx.run.main", "train", *arguments(folder, tmp_path), **quiet)
    file = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (file.is_file() and len(metrics(tmp_path)) >= 25):
        time.sleep(0.01)
    process.send_signal(number)
    process.wait()
    assert not (tmp_path / "adapter").exists(), "it was too fast for the test to interrupt"
    main(arguments(folder, tmp_path))
    assert [one["step"] for one in metrics(tmp_path)] == list(range(1, N_STEPS + 1))
    assert [one["loss"] for one in metrics(tmp_path)] == [one["loss"] for one in metrics(whole)]
    for name, tensor in weights(whole).items():
        np.testing.assert_array_equal(weights(tmp_path)[name], tensor)


def test_another_run_may_start_from_its_weights(folder: Path, whole: Path, tmp_path: Path) -> None:
    """But not in its folder."""
    main(arguments(folder, tmp_path, max_steps=1, load_checkpoint_path=whole / "checkpoints" / str(N_STEPS)))
    assert metrics(tmp_path)[0]["loss"] < 0.85 * metrics(whole)[0]["loss"]
    with pytest.raises(SystemExit, match=r"has a run with learning_rate=0\.01; .*use another --output-dir"):
        main(arguments(folder, whole, learning_rate=0.5))


def test_initial_weights_have_their_own_rank(folder: Path, whole: Path, tmp_path: Path) -> None:
    """Their folder is not needed to resume the run."""
    initial, output = shutil.copytree(whole / "adapter", tmp_path / "initial"), tmp_path / "output"
    flags = arguments(folder, output, load_checkpoint_path=initial)
    without_rank = [flag for flag in flags if not flag.startswith("--lora-rank")]
    main([*without_rank, "--max-steps=1"])
    assert json.loads((output / "settings.json").read_text())["lora_rank"] == 8
    shutil.rmtree(initial)
    main([*without_rank, "--max-steps=2"])
    assert [one["step"] for one in metrics(output)] == [1, 2]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("", r"--lora-rank=16 differs from rank 8 of .*/initial; omit --lora-rank"),
        ("training.json", r"--load-checkpoint-path .*/initial has no valid training\.json; name a"),
        ("adapter_model.safetensors", r"--load-checkpoint-path .*/initial cannot be loaded into --base-model"),
    ],
)
def test_unusable_initial_weights(folder: Path, whole: Path, tmp_path: Path, missing: str, message: str) -> None:
    initial = shutil.copytree(whole / "adapter", tmp_path / "initial")
    if missing:
        (initial / missing).unlink()
    rank = 8 if missing else 16
    with pytest.raises(SystemExit, match=message):
        main(arguments(folder, tmp_path / "output", load_checkpoint_path=initial, lora_rank=rank))
    assert missing == "adapter_model.safetensors" or not (tmp_path / "output").exists()


def test_a_refused_command_can_be_corrected(folder: Path, tmp_path: Path) -> None:
    """Settings of the optimizer may be numbers in quotes."""
    with pytest.raises(SystemExit, match=r"tx train: --dataset .*none\.jsonl: file not found"):
        main(arguments(folder, tmp_path, dataset=tmp_path / "none.jsonl"))
    main(arguments(folder, tmp_path, optimizer_args='{"weight_decay": "0.1"}', max_steps=1))
    assert [one["step"] for one in metrics(tmp_path)] == [1]
    assert json.loads((tmp_path / "settings.json").read_text())["optimizer_args"] == {"weight_decay": 0.1}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learning_rate": "-1"}, "--learning-rate='-1': Input should be greater than 0"),
        (
            {"optimizer_args": '{"momentum": 1}'},
            "--optimizer-args='{\"momentum\": 1}': momentum is unknown; it may have beta1, beta2, eps, weight_decay",
        ),
        ({"optimizer_args": '{"learning_rate": 1}'}, "learning_rate is unknown; it may have beta1"),
        ({"optimizer_args": '{"beta1": 1.0}'}, r"beta1=1\.0: Input should be less than or equal to 0\.9999999"),
        ({"optimizer_args": '{"eps": NaN}'}, "eps=nan: Input should be a finite number"),
        ({"optimizer_args": '{"eps"'}, "--optimizer-args='{\"eps\"': Expecting ':' delimiter"),
        ({"backend": "numpy"}, "--backend='numpy': Input should be 'jax' or 'torch'"),
    ],
)
def test_invalid_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments(folder, tmp_path, **flags))
    assert re.search(message, capsys.readouterr().err)


def test_a_diverged_run_ends_before_it_is_saved(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"tx train: step 2: the loss is (inf|nan); use a lower --learning-rate"):
        main(arguments(folder, tmp_path, learning_rate=1e30, max_steps=2, save_steps=2))
    assert [one["step"] for one in metrics(tmp_path)] == [1]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "settings.json"]
