"""`skyrl-agent train` with a harness: the run, the plan, and settings that are refused."""

import json
from pathlib import Path

import pytest
import yaml
from agent_kit.harbor_tasks import write_harbor_task
from agent_kit.runs import write_run
from click.testing import Result
from typer.testing import CliRunner

from skyrl_agent.cli import app
from skyrl_agent.harness.training import parse_harness
from skyrl_train.errors import ConfigError, DataError

ASK = """
import http.client, json, os
connection = http.client.HTTPConnection("127.0.0.1:8000")
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": os.environ["TASK"]}]})
connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
print(json.load(connection.getresponse())["choices"][0]["message"]["content"])
"""


def write_harness(folder: Path, **settings: object) -> Path:
    path = folder / "agent.yaml"
    files = {"{home}/ask.py": ASK}
    path.write_text(yaml.safe_dump({"harness": "python3 -IS ~/ask.py > answer.txt", "files": files, **settings}))
    return path


def skyrl(command: str, folder: Path, *more: str) -> Result:
    overrides = write_run(folder)
    write_harbor_task(folder / "tasks/a", "What is 1?")
    write_harbor_task(folder / "tasks/b", "What is 2?")
    data = f"harbor:{folder / 'tasks'}"
    harness = str(write_harness(folder))
    return CliRunner().invoke(
        app, [command, harness, *overrides, f"data.train_data={data}", f"data.val_data={data}", *more]
    )


def test_the_command_trains_on_harbor_tasks(tmp_path: Path) -> None:
    limit = "generator.sampling_params.max_generate_length=8"
    result = skyrl("train", tmp_path, limit, "generator.n_samples_per_prompt=2", "trainer.epochs=2")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "outputs" / "agents" / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/grad_norm" in row]
    assert [row["environment/harness/requests"] for row in steps] == [1.0, 1.0]
    assert [row["generate/n_invalid"] for row in steps] == [0.0, 0.0]
    assert "eval/all/avg_score" in rows[-1]
    result = skyrl("train", tmp_path / "plan", "--dry-run")
    assert "environment  harness" in result.output
    assert not (tmp_path / "plan/outputs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generator.max_turns=3", "generator.max_turns=3 has no effect on a harness; set it in the harness file"),
        ("generator.step_wise_trajectories=true", "has no effect on a harness; remove it"),
    ],
)
def test_settings_without_effect_are_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_harness(write_harness(tmp_path), [*write_run(tmp_path), override], trains=True)


def test_mistakes_in_a_harness_file_are_named(tmp_path: Path) -> None:
    for settings, message in (
        ({"max_turns": 0}, "max_turns"),
        ({"workspace": {"kind": "docker", "path": ["/x"]}}, "kind=docker takes no path; remove it"),
        ({"workspace": {"image": "ubuntu"}}, "image need kind=docker or kind=podman"),
        ({"arguments": ["-v"]}, "arguments apply to known agents and lists"),
        ({"time_limit": 3}, "time_limit"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_harness(write_harness(tmp_path, **settings), [], trains=True)
    with pytest.raises(ConfigError, match=r"mini is neither a file nor a known agent \(mini-swe-agent, pi, "):
        parse_harness(Path("mini"), [], trains=True)
    write_harbor_task(tmp_path / "tasks/a", "x", dockerfile="FROM ubuntu")
    with pytest.raises(DataError, match=r"1 of 1 tasks of harbor:.* cannot be used; .*it needs its image"):
        parse_harness(Path("pi"), [f"data.train_data=harbor:{tmp_path / 'tasks'}"], trains=True)
