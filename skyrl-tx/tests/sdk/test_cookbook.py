"""Unmodified recipes of the cookbook, with the newest SDK."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tx_kit.sdk import NEWEST, environment, processes_with, python

N_ROWS, N_STEPS = 16, 30
N_AHEAD = 2
"""Steps that the recipe has sent when it saves, and repeats after resuming: the one it saves for, and one ahead."""
RECIPE_SECONDS = 120
SETTINGS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("cookbook.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shortest conversations of the cookbook."""
    packages = Path(python(NEWEST)).parents[1] / "lib"
    (bundled,) = packages.glob("python*/site-packages/tinker_cookbook/example_data/conversations.jsonl")
    lines = sorted(bundled.read_text("utf-8").splitlines(), key=len)[:N_ROWS]
    path = tmp_path_factory.mktemp("rows") / "conversations.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@contextmanager
def recipe(url: str, home: Path, *, module: str, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a recipe, which logs to `home / "run"`; kill it if it still runs at the end."""
    command = [python(NEWEST), "-m", f"tinker_cookbook.recipes.{module}"]
    settings |= {"renderer_name": "qwen3_disable_thinking", "log_path": home / "run"}
    command += [f"{key}={value}" for key, value in settings.items()]
    with (home / "recipe.log").open("a") as log:
        variables = environment(home, TINKER_BASE_URL=url)
        process = subprocess.Popen(command, env=variables, cwd=home, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
    assert not processes_with(str(home))


def finish(process: subprocess.Popen[bytes], home: Path) -> None:
    assert process.wait(RECIPE_SECONDS) == 0, (home / "recipe.log").read_text()[-5000:]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file, without an incomplete one."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_supervised_learning_resumes_after_a_kill(
    urls: dict[str, str], model_folders: dict[str, Path], rows: Path, tmp_path: Path
) -> None:
    data = {"dataset": rows, "batch_size": N_ROWS, "num_epochs": N_STEPS}
    settings = {**SETTINGS["supervised learning"], **data, "model_name": model_folders["qwen3"]}
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + RECIPE_SECONDS
    with recipe(urls["qwen3"], tmp_path, **settings, behavior_if_log_dir_exists="raise") as process:
        while not 0 < last_saved(tmp_path / "run") < len(losses(log)) - N_AHEAD:
            assert process.poll() is None, (tmp_path / "recipe.log").read_text()[-5000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
    before, saved = losses(log), last_saved(tmp_path / "run")
    with recipe(urls["qwen3"], tmp_path, **settings, behavior_if_log_dir_exists="resume") as process:
        finish(process, tmp_path)
    words = (tmp_path / "recipe.log").read_text()
    assert "Resumed training from tinker://" in words
    after = losses(log)
    assert len(after) == N_STEPS
    assert after[:saved] == before[:saved]
    n_seen = saved + N_AHEAD
    np.testing.assert_allclose(after[saved : saved + len(before) - n_seen], before[n_seen:], atol=1e-4)
    assert after[-1] < 0.6 * after[0]


def last_saved(run: Path) -> int:
    """Return the step of the recipe's last checkpoint."""
    saved = read_log(run / "checkpoints.jsonl")
    return int(saved[-1]["epoch"]) if saved else 0  # one step each


def losses(log: Path) -> list[float]:
    """Return the losses of all steps; those that the recipe repeats occur once."""
    steps = [one for one in read_log(log) if "train_mean_nll" in one]
    assert [one["step"] for one in steps] == list(range(len(steps)))
    return [one["train_mean_nll"] for one in steps]


def test_reinforcement_learning(urls: dict[str, str], model_folders: dict[str, Path], tmp_path: Path) -> None:
    """A model learns to end its answers, which the recipe of sums rewards."""
    settings = {**SETTINGS["reinforcement learning"], "model_name": model_folders["llama"]}
    with recipe(urls["llama"], tmp_path, **settings) as process:
        finish(process, tmp_path)
    steps = [one for one in read_log(tmp_path / "run" / "metrics.jsonl") if "env/all/format" in one]
    assert len(steps) == 8
    ended, rewards = ([one[f"env/all/{name}"] for one in steps] for name in ("format", "reward/total"))
    assert np.mean(ended[-2:]) > np.mean(ended[:2]) + 0.25, ended
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]), rewards
    assert max(abs(one["optim/kl_sample_train_v1"]) for one in steps) < 1e-3


@pytest.fixture(scope="module")
def datasets(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """The settings of recipes that read a file."""
    base = tmp_path_factory.mktemp("datasets")
    tools = [{"prompt": f"What is {number} + 2?", "golden_response": [str(number + 2)]} for number in range(10)]
    save = "datasets.Dataset.from_list(json.loads(sys.argv[1])).save_to_disk(sys.argv[2])"
    program = f"import datasets, json, sys; {save}"
    subprocess.run([python(NEWEST), "-c", program, json.dumps(tools), str(base / "tools")], check=True, timeout=60)
    return {"prompt_distillation.train": {"file_path": rows}, "sdft.train": {"toolalpaca_data_path": base / "tools"}}


@pytest.mark.parametrize("name", SETTINGS["short runs"])
def test_short_runs(
    name: str,
    urls: dict[str, str],
    model_folders: dict[str, Path],
    datasets: dict[str, dict[str, Path]],
    tmp_path: Path,
) -> None:
    """The recipe runs unmodified, and each of its steps is finite."""
    settings = {**SETTINGS["short runs"][name], "model_name": model_folders["qwen3"], "max_steps": 2}
    settings |= datasets.get(settings["module"], {})
    with recipe(urls["qwen3"], tmp_path, **settings, behavior_if_log_dir_exists="delete") as process:
        finish(process, tmp_path)
    steps = read_log(tmp_path / "run" / "metrics.jsonl")
    assert len({one["step"] for one in steps}) >= 2
    numbers = [value for one in steps for value in one.values() if isinstance(value, float)]
    assert numbers
    assert np.isfinite(numbers).all()
