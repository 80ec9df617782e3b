import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from train_kit.models import SMALL
from train_kit.runs import expect_error, train
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, LlamaConfig, PreTrainedConfig

from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.entrypoints import memory_plan
from skyrl_train.entrypoints.describe_plan import describe_plan
from skyrl_train.entrypoints.memory_plan import forecast_here, plan_run
from skyrl_train.plan import RunPlan
from skyrl_train.plan.forecast import format_bytes
from skyrl_train.plan.hardware import Hardware

N_PARAMETERS = 193_920
"""Parameters of the tiny model."""

VLLM = "generator.backend=vllm"
TWO_NODES = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=4"]


@pytest.fixture
def configure(catch_run: list[str]) -> Callable[..., SkyRLConfig]:
    """Return the configuration of a run of Catch with further overrides; packages of engines need not be installed."""
    return lambda *overrides: load_config(OmegaConf.from_dotlist([*catch_run, *overrides]))


@pytest.fixture
def describe(configure: Callable[..., SkyRLConfig]) -> Callable[..., str]:
    """Return the plan of a run of Catch with further overrides."""
    return lambda *overrides: describe_plan(plan_run(configure(*overrides)))


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    catch_run: list[str], tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    train(*catch_run, "--dry-run")
    plan = capsys.readouterr().out
    assert f"policy       {tiny_model_path} · {N_PARAMETERS:,} parameters · float32" in plan
    assert "(8 rows)" in plan
    assert "steps        2 (1 epoch × 2 batches)" in plan
    assert "4 prompts × 5 samples = 20 trajectories, 1 optimizer step" in plan
    assert "≤ 5 turns of ≤ 1 token after a prompt of ≤ 512 tokens" in plan
    assert "processes    1: training and generation in this one" in plan
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_does_not_fit_is_planned_and_refused_before_it_loads(
    catch_run: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(memory_plan, "this_machine", lambda n_ranks: Hardware("CPU", None, 300e6))
    shortage = "the update takes 7"
    tried = [*catch_run, "trainer.preflight=warn", "trainer.max_training_steps=1"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
        message = expect_error(*tried, "trainer.ckpt_interval=1", "--dry-run")
    assert "0 bytes free or in removable checkpoints but needs 71,762,944: a checkpoint takes 2,327,040" in message
    assert "and 67,108,864 must stay free" in message
    assert "of the host at the peak (update), 300 MB free; details: skyrl plan\n" in capsys.readouterr().out
    for option in ([], ["--dry-run"]):
        message = expect_error(*catch_run, *option)
        assert message.startswith(f"error: {shortage}")
        assert "Set trainer.preflight=warn to run anyway" in message
    assert "Loaded the policy" not in caplog.text
    train(*tried)
    assert caplog.text.index(shortage) < caplog.text.index("Loaded the policy")


@pytest.mark.parametrize("settings", [[], ["trainer.placement.policy_num_gpus_per_node=2"]], ids=["here", "ranks"])
def test_a_gpu_that_does_not_report_its_memory_has_no_forecast(
    settings: list[str],
    configure: Callable[..., SkyRLConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ranks on Ray have GPUs of their own, and this process must not take memory of one."""
    contexts: list[bool] = []

    def fail() -> tuple[int, int]:
        contexts.append(True)
        raise RuntimeError("CUDA error: out of memory")

    cfg = configure(*settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000000-0000-0000-0000-000000000000")  # on no machine
    with caplog.at_level("INFO"):
        assert forecast_here(plan_run(cfg)) is None
    assert "The free memory of the GPUs is unknown" in caplog.text
    assert contexts == [True] * (not settings)


def test_trained_weights_count_in_float32_and_sizes_are_unknown_before_a_download(
    describe: Callable[..., str], tiny_model_path: Path
) -> None:
    plan = describe("trainer.policy.model.dtype=bfloat16", "trainer.ckpt_interval=1")
    assert f"policy       {tiny_model_path} · {N_PARAMETERS:,} parameters · bfloat16, trained in float32" in plan
    assert f"reference    {tiny_model_path} · {N_PARAMETERS:,} parameters · bfloat16\n" in plan
    assert f"memory       {format_bytes((16 + 2) * N_PARAMETERS)} for weights, gradients and optimizer" in plan
    assert f"disk         {format_bytes(12 * N_PARAMETERS)} per checkpoint" in plan
    plan = describe("trainer.ref.model.path=owner/unknown")
    assert "reference    owner/unknown · size unknown before the download" in plan
    assert "memory       unknown before the download" in plan


@pytest.mark.parametrize(
    ("settings", "processes", "policy_share", "reference_share"),
    [
        ([], "18 on Ray: this one, engine, ", 1 / 8, 1 / 8),
        (["trainer.policy.fsdp_config.fsdp_size=4"], "18 on Ray: this one, engine, ", 1 / 4, 1 / 8),
        (
            ["trainer.strategy=megatron", "trainer.policy.megatron_config.tensor_model_parallel_size=4"],
            "18 on Ray: this one, engine, ",
            1 / 4,
            1,
        ),
        (["generator.num_inference_engines=2"], "19 on Ray: this one, 2 engines, ", 1 / 8, 1 / 8),
    ],
)
def test_processes_and_what_each_of_them_holds(
    settings: list[str], processes: str, policy_share: float, reference_share: float, describe: Callable[..., str]
) -> None:
    plan = describe(*TWO_NODES, *settings)
    assert f"{processes}ranks (nodes × per node) policy 2 × 4, reference 2 × 4" in plan
    policy, reference = (4 * n * N_PARAMETERS / 1000 for n in (4 * policy_share, reference_share))
    assert f"per process  policy {policy:.3g} KB, reference {reference:.3g} KB; engine" in plan


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (GemmaConfig(**SMALL), [], "trainer.strategy=megatron does not support a GemmaForCausalLM"),
        (
            LlamaConfig(**SMALL),
            ["lora.rank=2", r"lora.target_modules='model\.layers\.1\..*_proj'"],
            "has no matrix of the layers 0 to 0, and each of the trainer.policy.megatron_config.pipeline_model_",
        ),
    ],
    ids=["model", "stage"],
)
def test_a_plan_refuses_what_megatron_does_not_compute(
    catch_run: list[str],
    tiny_model_path: Path,
    tmp_path: Path,
    config: PreTrainedConfig,
    settings: list[str],
    message: str,
) -> None:
    path = tmp_path / "model"
    config.vocab_size = 500
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(path)
    settings = [f"trainer.policy.model.{setting}" for setting in (f"path={path}", *settings)]
    run = [*catch_run, *settings, "trainer.placement.policy_num_gpus_per_node=2", "--dry-run"]
    train(*run)
    stages = "trainer.policy.megatron_config.pipeline_model_parallel_size=2"
    assert message in expect_error(*run, "trainer.strategy=megatron", stages)


@pytest.mark.parametrize(
    ("n_ranks", "cluster", "is_refused"),
    [(2, "local", True), (1, "local", False), (2, "192.0.2.1:6379", False)],  # whose processes may wait for longer
)
def test_a_dry_run_refuses_weight_syncs_that_ranks_would_not_wait_for(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch, n_ranks: int, cluster: str, is_refused: bool
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    settings = ["trainer.placement.launcher=ray", f"trainer.placement.policy_num_gpus_per_node={n_ranks}"]
    command = [*catch_run, *settings, "generator.weight_sync_timeout_seconds=571", "--dry-run"]
    if not is_refused:
        train(*command)
        return
    message = "weight_sync_timeout_seconds=571 must be at least 30 s less than SKYRL_WORKER_NCCL_TIMEOUT_IN_S=600"
    assert message in expect_error(*command)


def test_the_weights_of_an_engine_count_by_its_dtype_and_devices(
    configure: Callable[..., SkyRLConfig], describe: Callable[..., str]
) -> None:
    def engine_bytes(*overrides: str, has_gpu: bool = False) -> float:
        return RunPlan(configure(*overrides), has_gpu).engine_bytes

    n_gpus = "trainer.placement.policy_num_gpus_per_node=8"
    assert engine_bytes(VLLM, has_gpu=True) == 2 * N_PARAMETERS
    assert engine_bytes(VLLM, "trainer.bf16=false", has_gpu=True) == 4 * N_PARAMETERS
    on_ray = "trainer.placement.launcher=ray"
    assert engine_bytes(on_ray, has_gpu=True) == 4 * N_PARAMETERS, "an embedded engine has the dtype of the policy"
    sizes = [f"generator.inference_engine_{name}_parallel_size=2" for name in ("tensor", "pipeline", "data")]
    assert engine_bytes(VLLM, n_gpus, *sizes) == N_PARAMETERS
    assert f"; engine {format_bytes(N_PARAMETERS)}\n" in describe(VLLM, n_gpus, *sizes)
