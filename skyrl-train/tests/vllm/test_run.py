"""Runs with rollouts sampled by vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from train_kit.models import experts_of_vllm
from train_kit.processes import killing
from transformers import PretrainedConfig, PreTrainedModel

from skyrl_train.entrypoints import main_base, main_generate

TRAIN_FOLDER = Path(__file__).parents[2]
GSM8K = """
   trainer.algorithm.advantage_estimator="grpo"
   trainer.strategy=fsdp2
   trainer.placement.colocate_all=true
   trainer.placement.policy_num_gpus_per_node=2
   trainer.eval_batch_size=1024
   trainer.eval_before_train=true
   trainer.eval_interval=5
   trainer.ckpt_interval=10
   generator.backend=vllm
   generator.num_inference_engines=2
   generator.inference_engine_tensor_parallel_size=1
   generator.weight_sync_backend=nccl
   environment.env_class=gsm8k
   trainer.logger="wandb"
   trainer.project_name="gsm8k"
   trainer.run_name="gsm8k_test"
   trainer.train_batch_size=4
   trainer.policy_mini_batch_size=4
   trainer.max_training_steps=2
   generator.n_samples_per_prompt=2
   generator.sampling_params.max_generate_length=8
"""
SaveModel = Callable[[PretrainedConfig], Path]


@pytest.fixture
def run(catch_run: list[str], tmp_path: Path) -> list[str]:
    return [*catch_run, "generator.backend=vllm", "trainer.policy.optimizer_config.lr=0.001"]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("offload_idle", ["auto", "true"])
def test_training_updates_the_weights_of_vllm_after_each_step(
    offload_idle: str, run: list[str], tmp_path: Path
) -> None:
    main_base.main([*run, f"trainer.placement.offload_idle={offload_idle}"])
    folder = tmp_path / "skyrl/test_run"
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "generator.backend" not in (folder / "train.log").read_text()
    for row in rows[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row["policy/grad_norm"] > 0
        assert row["environment/avg_steps"] == 5


@pytest.mark.timeout(600)
def test_an_asynchronous_run_replaces_vllm_if_it_is_killed(
    run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "trainer.epochs=3",
    ]
    folder = tmp_path / "skyrl/test_run"
    with killing("EngineCore", folder):
        main_base.main([*run, *settings])
    assert "was lost and is replaced: vLLM's process ended" in caplog.text
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["sync/verified_copies"] == 1 for row in rows)
    assert rows[0]["sync/logprob_gap"] < 1e-4
    assert {row["async/staleness_max"] for row in rows[1:]} == {0, 1}
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])


def test_a_mixture_of_experts_trains(run: list[str], tmp_path: Path, save_model: SaveModel) -> None:
    model = save_model(experts_of_vllm(0.02))
    main_base.main([*run, f"trainer.policy.model.path='{model}'", "generator.n_samples_per_prompt=32"])
    rows = metrics(tmp_path / "skyrl/test_run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["sync/logprob_gap"] < 1e-3
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-3
        assert row["policy/grad_norm"] > 0


def test_an_engine_in_bfloat16_gets_half_of_the_bytes_of_a_policy_in_float32(
    run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: PreTrainedModel
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    settings = ["trainer.placement.launcher=ray", "+generator.engine_init_kwargs.dtype=bfloat16"]
    try:
        main_base.main([*run, *settings])
    finally:
        ray.shutdown()
    for row in metrics(tmp_path / "skyrl/test_run"):
        assert row["sync/megabytes"] == pytest.approx(2 * tiny_model.num_parameters() / 1e6, rel=0.01)
        assert 1e-3 < row["sync/logprob_gap"] < 0.1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("settings", "max_share", "max_gap"),
    [
        (["trainer.policy.model.lora.rank=4", "trainer.policy.optimizer_config.lr=0.01"], 0.4, 1e-3),
        (
            [
                "generator.weight_sync_delta=true",
                "trainer.policy.model.dtype=bfloat16",
                "trainer.policy.optimizer_config.lr=1e-5",
            ],
            0.2,
            0.1,
        ),
    ],
)
def test_vllm_in_an_actor_receives_only_what_changed(
    run: list[str],
    settings: list[str],
    max_share: float,
    max_gap: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    try:
        main_base.main([*run, "trainer.placement.launcher=ray", "trainer.epochs=2", *settings])
    finally:
        ray.shutdown()
    first, *others = metrics(tmp_path / "skyrl/test_run")
    assert [row["step"] for row in others] == [1, 2, 3, 4]
    for row in others:
        assert row["sync/megabytes"] < max_share * first["sync/megabytes"]
        assert row["sync/verified_copies"] == 1
        assert row["sync/logprob_gap"] < max_gap
        assert row["policy/rollout_train_logprobs_abs_diff_mean"] < max_gap
        assert row["policy/grad_norm"] > 0
    if "lora" in settings[0]:
        assert 0 < others[0]["policy/adapter_norm"] < others[-1]["policy/adapter_norm"]


def test_a_run_trains_with_vllms_own_sampler(run: list[str], tmp_path: Path) -> None:
    main_base.main([*run, "generator.vllm.sampler=native", "trainer.run_name=native"])
    rows = metrics(tmp_path / "skyrl/native")
    assert rows[-1]["step"] > 0
    assert all(row["sync/logprob_gap"] < 1e-4 for row in rows)
    assert all(row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4 for row in rows[1:])


def test_evaluations_equal_those_of_the_embedded_engine(run: list[str], tmp_path: Path) -> None:
    sampled = ["generator.eval_sampling_params.temperature=1", "generator.eval_n_samples_per_prompt=4"]
    for backend in ("hf", "vllm"):
        main_generate.main([*run, *sampled, f"generator.backend={backend}", f"trainer.run_name={backend}"])
    embedded, vllm = ((tmp_path / "skyrl" / name / "evals/eval_only/synthetic_catch.jsonl") for name in ("hf", "vllm"))
    replies = [[json.loads(line)["output_response"] for line in path.open()] for path in (embedded, vllm)]
    assert len(replies[0]) == 16
    assert replies[0] == replies[1]


@pytest.mark.timeout(600)
def test_ranks_and_two_vllm_engines_in_actors_train_like_one_process_though_one_is_killed(
    run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    folder = tmp_path / "skyrl/ray"
    engines = ["trainer.placement.policy_num_gpus_per_node=2", "generator.num_inference_engines=2"]
    engines += ["trainer.placement.offload_idle=true"]
    try:
        with killing("EngineCore", folder):
            main_base.main([*run, *engines, "trainer.run_name=ray"])
    finally:
        ray.shutdown()
    assert "was lost and is replaced: vLLM's process ended" in caplog.text
    assert all(row["sync/verified_copies"] == 2 for row in metrics(folder))
    main_base.main([*run, "trainer.run_name=inline"])
    on_ray, inline = (metrics(tmp_path / "skyrl" / name) for name in ("ray", "inline"))
    for row, expected in zip(on_ray, inline, strict=True):
        for name, value in expected.items():
            if name.startswith(("policy/", "reward/", "environment/", "loss/")):
                assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.mark.timeout(600)
def test_the_quick_start_of_skyrl_on_two_ranks_and_two_engines(tiny_model_path: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "WANDB_MODE": "offline", "RAY_ADDRESS": "local"}
    prepare = ["examples.gsm8k.gsm8k_dataset", "--output_dir", f"{tmp_path}/data/gsm8k", "--source", "sample"]
    data = [
        f"data.{key}_data=['$HOME/data/gsm8k/{name}.parquet']"
        for key, name in (("train", "train"), ("val", "validation"))
    ]
    model = f"trainer.policy.model.path={tiny_model_path}"
    overrides = [word.replace('"', "") for word in GSM8K.split()]
    for module in (
        prepare,
        ["skyrl_train.entrypoints.main_base", *data, model, *overrides, f"trainer.output_dir={tmp_path}"],
    ):
        subprocess.run([sys.executable, "-m", *module], cwd=TRAIN_FOLDER, env=environment, check=True)
    folder = tmp_path / "gsm8k/gsm8k_test"
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/all/avg_score" in rows[0]
    for row in rows[1:]:
        assert row["sync/verified_copies"] == 2
        assert row["sync/logprob_gap"] < 1e-3
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 1
