from pathlib import Path
from typing import Any

import pytest
from gym_kit.http_server import Request
from train_kit.fleet.tasks import write_dataset
from train_kit.runs import Run
from train_kit.tinker import serving_tinker
from train_kit.vision_models import save_vision_model

from integrations.fleet.entrypoints.main_fleet_tinker import FleetTinkerOptions, main
from skyrl_agent.integrations.tinker.options import parse_options
from tx.tinker.db_models import Kind
from tx.tinker.wire import tinker_pb2 as pb


def test_the_options_are_those_of_fleet() -> None:
    argv = ["--train_data", "a.parquet", "--tasks_file", "t.json", "--ttl_seconds", "60"]
    options = parse_options(FleetTinkerOptions, argv, "")
    assert (options.model_name, options.max_turns) == ("Qwen/Qwen3-VL-30B-A3B-Instruct", 50)
    cfg = options.config()
    assert (cfg.trainer.project_name, cfg.trainer.run_name) == ("fleet-tinker-grpo", "fleet_tinker")
    for sampling in (cfg.generator.sampling_params, cfg.generator.eval_sampling_params):
        assert (sampling.max_generate_length, sampling.stop) == (2048, ["</tool_call>"])
    assert cfg.environment.env_class == "fleet_task"
    assert cfg.environment.skyrl_gym.env_config("fleet_task") == {"tasks_file": "t.json", "ttl_seconds": 60}
    assert cfg.generator.trajectory_timeout_seconds == 60
    assert (cfg.environment.skyrl_gym.isolation, cfg.environment.skyrl_gym.python) == ("thread", None)
    gym = (
        parse_options(FleetTinkerOptions, [*argv, "--env_python", "/venv/bin/python"], "")
        .config()
        .environment.skyrl_gym
    )
    assert (gym.isolation, gym.python) == ("process", "/venv/bin/python")


def test_a_run_on_a_tinker_server_trains_and_resumes(
    fleet_model: Path, tmp_path: Path, openenv: Any, slack_requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = write_dataset(tmp_path, {"github": (4, 0), "outlook": (2, 0)})
    monkeypatch.setenv("FLEET_STAND_IN_FAULTS", "0.2")
    monkeypatch.setattr("integrations.fleet.metrics.MAX_TOOL_ERROR_RATE", -1.0)  # every step alerts
    options: dict[str, Any] = {
        "train_data": tmp_path / "data/train.parquet",
        "eval_data": tmp_path / "data/validation.parquet",
        "tasks_file": tasks,
        "model_name": fleet_model,
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
    with serving_tinker(tmp_path / "state", fleet_model) as server:
        main([*arguments, "--max_steps=2"])
        main([*arguments, "--max_steps=3"])
        with server.client() as http:
            sessions = http.get("sessions").json()["sessions"]
            answers = [http.post("session_heartbeat", json={"session_id": name}) for name in sessions]
        assert [answer.status_code for answer in answers] == [410, 410]  # both runs finished their session
    run = Run(tmp_path / "fleet-tinker-grpo/fleet_tinker")
    steps = [row for row in run.metrics if "rollouts/total" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert sum(row["rollouts/invalid"] for row in steps) > 0
    for row in steps:
        assert row["rollouts/valid"] + row["rollouts/invalid"] == 8
        assert 0.5 <= row["reward/avg_raw_reward"] <= 1.0  # no lost grade counts as 0
    assert {"reward/github/signal_ratio", "advantage/std", "time/train", "throughput/tokens_total"} <= steps[0].keys()
    assert (run.folder / "evals/global_step_3/outlook.jsonl").exists()
    alerts = [request.body["text"] for request in slack_requests]
    assert {text.partition(":")[0] for text in alerts} >= {f"fleet_tinker, step {step}" for step in (1, 2, 3)}
    assert "environment/fleet_task/tool_error_rate is 0%" in alerts[-1]


def test_a_run_on_a_tinker_server_shows_screenshots(tmp_path: Path, openenv: Any) -> None:
    tasks = write_dataset(tmp_path, {"amazon": (0, 6)}, "computer_use")
    model = save_vision_model(tmp_path / "model", "idefics3", max_position_embeddings=8192)
    options: dict[str, Any] = {
        "train_data": tmp_path / "data/train.parquet",
        "tasks_file": tasks,
        "model_name": model,
        "batch_size": 2,
        "max_steps": 1,
        "max_turns": 2,
        "max_generate_length": 8,
        "max_input_length": 6000,
        "output_dir": tmp_path,
        "logger": "jsonl",
    }
    with serving_tinker(tmp_path / "state", model) as server:
        main([f"--{name}={value}" for name, value in options.items()])
        (request,) = server.rows(Kind.FORWARD_BACKWARD)
    message = pb.ForwardBackwardRequest.FromString(request.payload)
    assert all(any(chunk.HasField("image") for chunk in datum.model_input) for datum in message.data)
