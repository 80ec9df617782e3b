from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fleet_tasks import fleet_entries, write_tasks
from transformers import PreTrainedTokenizerBase

from integrations.fleet.entrypoints.main_fleet_tinker import TinkerOptions, main, parse_options
from integrations.fleet.prepare_dataset import main as prepare
from integrations.fleet.tinker_engine import apply_overlong_filtering, training_data
from skyrl_train.errors import ConfigError
from skyrl_train.models.tiny import tiny_qwen3
from skyrl_train.types import Segment, Trajectory, TrajectoryID

sys.path.append(str(Path(__file__).parents[5] / "skyrl-tx/tests"))


def trajectory(draw: int, sample: int, reward: float, n_prompt: int = 2, error: str | None = None) -> Trajectory:
    segment = Segment(
        token_ids=[*range(n_prompt), 7, 8, 9],
        n_prompt=n_prompt,
        loss_mask=[1, 0, 1],
        rewards=[0.0, 0.0, reward],
        logprobs=[-0.5, 0.0, -0.25],
    )
    return Trajectory(TrajectoryID(str(draw), sample, draw), "fleet_task", "notes", (segment,), "stop", error=error)


def test_data_align_advantages_with_the_next_token() -> None:
    data, metrics = training_data([trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)], 10)
    first, second = data
    assert first.model_input.to_ints() == [0, 1, 7, 8]
    inputs = {name: list(tensor.data) for name, tensor in first.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [1, 7, 8, 9]
    assert inputs["logprobs"] == [0.0, -0.5, 0.0, -0.25]
    advantage = 0.5 / (0.5**0.5 + 1e-6)  # the unbiased deviation of 0 and 1
    assert inputs["advantages"] == pytest.approx([0.0, advantage, 0.0, advantage], rel=1e-5)
    assert list(second.loss_fn_inputs["advantages"].data)[1] == pytest.approx(-advantage, rel=1e-5)
    assert metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6)


def test_invalid_trajectories_are_in_no_baseline() -> None:
    valid = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(1, 0, 1.0), trajectory(1, 1, 1.0)]
    invalid = [trajectory(0, 2, 0.0, error="verifier"), trajectory(1, 2, 0.0, error="verifier")]
    expected, actual = training_data(valid, 10)[0], training_data([*valid[:2], *invalid, *valid[2:]], 10)[0]
    assert len(actual) == 2  # the second prompt's rewards are equal
    assert [repr(datum) for datum in actual] == [repr(datum) for datum in expected]


def test_overlong_sequences_are_truncated_and_not_trained_on() -> None:
    (segment,) = trajectory(0, 0, 1.0).segments
    assert apply_overlong_filtering(segment, 5) is segment
    cut = apply_overlong_filtering(segment, 4)
    assert (cut.token_ids, cut.loss_mask) == ([0, 1, 7, 8], [0, 0])
    data, metrics = training_data([trajectory(0, 0, 1.0, n_prompt=3), trajectory(0, 1, 0.0)], 5)
    assert len(data) == 1  # and the reward of the other one still counts in the baseline
    assert metrics["rollouts/truncated_overlong"] == 1


def test_the_options_have_the_names_and_defaults_of_the_generator() -> None:
    options = parse_options(["--train_data", "a.parquet", "--tasks_file", "t.json", "--max_turns", "3"])
    assert (options.max_input_length, options.max_generate_length, options.max_sequence_length) == (30720, 2048, 32768)
    cfg = options.config()
    assert (cfg.generator.max_turns, cfg.generator.max_input_length) == (3, 30720)
    assert cfg.generator.sampling_params.max_generate_length == 2048
    with pytest.raises(ConfigError, match="--max_sequence_length=100 must be at least"):
        TinkerOptions(train_data="a", tasks_file="t", max_sequence_length=100)
    with pytest.raises(ConfigError, match="--batch_size=0 must be above 0"):
        TinkerOptions(train_data="a", tasks_file="t", batch_size=0)


def test_a_run_on_a_tinker_server_trains_and_resumes(
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    openenv: Any,
    slack_server: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tx_process import process

    model = tmp_path / "model"
    tiny_tokenizer.save_pretrained(model)
    tiny_qwen3(tiny_tokenizer, seed=0, context_length=8192).save_pretrained(model)
    tasks = write_tasks(tmp_path / "tasks.json", fleet_entries({"github": (4, 0), "outlook": (2, 0)}))
    prepare(["--tasks-json", str(tasks), "--output-dir", str(tmp_path / "data")])
    monkeypatch.setenv("FLEET_STAND_IN_FAULTS", "0.2")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.setattr("integrations.fleet.metrics.MAX_TOOL_ERROR_RATE", -1.0)  # every step alerts
    options: dict[str, Any] = {
        "train_data": tmp_path / "data/train.parquet",
        "eval_data": tmp_path / "data/validation.parquet",
        "tasks_file": tasks,
        "model_name": model,
        "batch_size": 2,
        "max_turns": 2,
        "max_generate_length": 8,
        "max_input_length": 4000,
        "max_sequence_length": 4016,
        "save_every": 2,
        "eval_every": 3,
        "output_dir": tmp_path,
        "logger": "jsonl",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with process(tmp_path / "state", "--base-model", str(model), "--backend", "torch") as server:
        server.wait_for_engine()
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        main([*arguments, "--max_steps=2"])
        main([*arguments, "--max_steps=3"])
        with server.client() as http:
            sessions = http.get("sessions").json()["sessions"]
            answers = [http.post("session_heartbeat", json={"session_id": name}) for name in sessions]
        assert [answer.status_code for answer in answers] == [410, 410]  # both runs finished their session
    folder = tmp_path / "fleet-tinker-grpo/fleet_tinker"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollouts/total" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert sum(row["rollouts/invalid"] for row in steps) > 0
    for row in steps:
        assert row["rollouts/valid"] + row["rollouts/invalid"] == 8
        assert 0.5 <= row["reward/avg_raw_reward"] <= 1.0  # no lost grade counts as 0
    assert {"reward/github/signal_ratio", "advantage/std", "time/train", "throughput/tokens_total"} <= steps[0].keys()
    assert (folder / "evals/global_step_3/outlook.jsonl").exists()
    alerts = [body["text"] for _, body in slack_server.received]
    assert {text.partition(":")[0] for text in alerts} >= {f"fleet_tinker, step {step}" for step in (1, 2, 3)}
    assert "environment/fleet_task/tool_error_rate is 0%" in alerts[-1]
