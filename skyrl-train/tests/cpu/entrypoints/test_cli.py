from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from train_kit.models import SMALL
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, LlamaConfig, PreTrainedConfig

from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.entrypoints.cli import main
from skyrl_train.entrypoints.forecast import forecast_engine_bytes, format_bytes, plan_models
from skyrl_train.entrypoints.plan import describe_plan


def test_env_check_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": [{"role": "user", "content": "6 * 7?"}], "reward_spec": {"ground_truth": "42"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert main(["env", "check", "multiply", "--data", str(tmp_path / "rows.jsonl")]) == 0
    assert "multiply: 11 passed, 0 failed" in capsys.readouterr().out


def test_train_runs(catch_run: list[str], tmp_path: Path) -> None:
    assert main(["train", *catch_run, "trainer.max_training_steps=1", "trainer.eval_interval=-1"]) == 0
    assert (tmp_path / "skyrl/test_run/report.html").is_file()


def test_generate_runs(catch_run: list[str], tmp_path: Path) -> None:
    assert main(["generate", *catch_run]) == 0
    assert (tmp_path / "skyrl/test_run/evals/eval_only/aggregated_results.jsonl").is_file()


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2)])
def test_the_commands_are_listed(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    output = "".join(capsys.readouterr())
    for command in ("train", "generate", "env", "tiny", "report"):
        assert f"\n  {command} " in output


def test_a_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "No such command 'trian'. Did you mean 'train'" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"skyrl {metadata.version('skyrl-train')}\n"


def test_help_lists_sections_and_explains_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "\n  trainer.policy.optimizer_config  " in capsys.readouterr().out
    assert main(["train", "--help", "trainer.policy.optimizer_config", "trainer.epochs"]) == 0
    output = capsys.readouterr().out
    assert "trainer.policy.optimizer_config.lr=1e-06  a number >= 0 and <= 1000\n    Learning rate" in output
    assert "trainer.epochs=1  an integer >= 1" in output
    assert main(["train", "--help", "trainer.epoch"]) == 1
    assert "there is no key or section trainer.epoch; did you mean trainer.epochs?" in capsys.readouterr().err


def test_keys_are_completed_level_by_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_SKYRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "skyrl train trainer.policy.")
    monkeypatch.setenv("COMP_CWORD", "2")
    main([])
    names = ["fsdp_config.", "megatron_config.", "model.", "optimizer_config.", "sequence_parallel_size="]
    assert sorted(capsys.readouterr().out.split()) == [f"trainer.policy.{name}" for name in names]


def test_the_configuration_is_printed(catch_run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *catch_run, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert load_config(printed).trainer.train_batch_size == 4


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    catch_run: list[str], tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *catch_run, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    n_parameters = AutoModelForCausalLM.from_pretrained(tiny_model_path).num_parameters()
    assert f"policy       {tiny_model_path} · {n_parameters:,} parameters · float32" in plan
    assert "(8 rows)" in plan
    assert "steps        2 (1 epoch × 2 batches)" in plan
    assert "4 prompts × 5 samples = 20 trajectories, 1 optimizer step" in plan
    assert "≤ 5 turns of ≤ 1 token after a prompt of ≤ 512 tokens" in plan
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_refuses_data_that_does_not_fill_a_batch(
    catch_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    batch = ["trainer.train_batch_size=16", "trainer.policy_mini_batch_size=16"]
    assert main(["train", *catch_run, *batch, "--dry-run"]) == 1
    error = capsys.readouterr().err
    assert "data.train_data has 8 usable rows, fewer than trainer.train_batch_size=16; lower the batch size" in error


def test_a_plan_counts_trained_weights_in_float32(
    catch_run: list[str], tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n_parameters = AutoModelForCausalLM.from_pretrained(tiny_model_path).num_parameters()
    run = ["train", *catch_run, "trainer.policy.model.dtype=bfloat16", "trainer.ckpt_interval=1", "--dry-run"]
    assert main(run) == 0
    plan = capsys.readouterr().out
    assert f"policy       {tiny_model_path} · {n_parameters:,} parameters · bfloat16, trained in float32" in plan
    assert f"reference    {tiny_model_path} · {n_parameters:,} parameters · bfloat16\n" in plan
    assert f"memory       {format_bytes((16 + 2) * n_parameters)} for weights, gradients and optimizer" in plan
    assert f"disk         {format_bytes(12 * n_parameters)} per checkpoint" in plan


def test_a_plan_of_several_processes_says_what_each_of_them_holds(
    catch_run: list[str], tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=4"]
    assert main(["train", *catch_run, *placement, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "18 on Ray: this one, engine, ranks (nodes × per node) policy 2 × 4, reference 2 × 4" in plan
    n_bytes = 4 * AutoModelForCausalLM.from_pretrained(tiny_model_path).num_parameters()
    assert f"per process  policy {4 * n_bytes / 8 / 1000:.3g} KB, reference {n_bytes / 8 / 1000:.3g} KB; engine" in plan
    assert main(["train", *catch_run, *placement, "trainer.policy.fsdp_config.fsdp_size=4", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert f"per process  policy {4 * n_bytes / 4 / 1000:.3g} KB, reference {n_bytes / 8 / 1000:.3g} KB; engine" in plan
    megatron = ["trainer.strategy=megatron", "trainer.policy.megatron_config.tensor_model_parallel_size=4"]
    assert main(["train", *catch_run, *placement, *megatron, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert f"per process  policy {4 * n_bytes / 4 / 1000:.3g} KB, reference {n_bytes / 1000:.3g} KB; engine" in plan
    assert main(["train", *catch_run, *placement, "generator.num_inference_engines=2", "--dry-run"]) == 0
    assert "19 on Ray: this one, 2 engines, ranks (nodes × per node) policy 2 × 4" in capsys.readouterr().out
    assert main(["train", *catch_run, "--dry-run"]) == 0
    assert "processes    1: training and generation in this one" in capsys.readouterr().out


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (GemmaConfig(**SMALL), [], "trainer.strategy=megatron does not support a GemmaForCausalLM"),
        (
            LlamaConfig(**SMALL),
            ["lora.rank=2", "lora.target_modules=[q_proj,lm_head]"],
            "has no adapter for the head lm_head; leave it out of trainer.policy.model.lora.target_modules",
        ),
        (
            LlamaConfig(**SMALL),
            ["lora.rank=2", r"lora.target_modules='model\.layers\.1\..*_proj'"],
            "has no matrix of the layers 0 to 0, and each of the trainer.policy.megatron_config.pipeline_model_",
        ),
    ],
    ids=["model", "head", "stage"],
)
def test_a_plan_refuses_what_megatron_does_not_compute(
    catch_run: list[str],
    tiny_model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: PreTrainedConfig,
    settings: list[str],
    message: str,
) -> None:
    path = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(path)
    settings = [f"trainer.policy.model.{setting}" for setting in (f"path={path}", *settings)]
    run = ["train", *catch_run, *settings, "trainer.placement.policy_num_gpus_per_node=2", "--dry-run"]
    assert main(run) == 0
    capsys.readouterr()
    stages = "trainer.policy.megatron_config.pipeline_model_parallel_size=2"
    assert main([*run, "trainer.strategy=megatron", stages]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("n_ranks", "cluster", "is_refused"),
    [(2, "local", True), (1, "local", False), (2, "192.0.2.1:6379", False)],  # whose processes may wait for longer
)
def test_a_dry_run_refuses_weight_syncs_that_ranks_would_not_wait_for(
    catch_run: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    n_ranks: int,
    cluster: str,
    is_refused: bool,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    settings = ["trainer.placement.launcher=ray", f"trainer.placement.policy_num_gpus_per_node={n_ranks}"]
    command = [*catch_run, *settings, "generator.weight_sync_timeout_seconds=571"]
    assert main(["train", *command, "--dry-run"]) == is_refused
    message = "weight_sync_timeout_seconds=571 must be at least 30 s less than SKYRL_WORKER_NCCL_TIMEOUT_IN_S=600"
    assert (message in capsys.readouterr().err) == is_refused


def test_a_plan_counts_the_weights_of_an_engine_by_its_dtype_and_devices(
    catch_run: list[str], tiny_model_path: Path
) -> None:
    n_parameters = AutoModelForCausalLM.from_pretrained(tiny_model_path).num_parameters()

    def configure(*overrides: str) -> SkyRLConfig:
        return load_config(OmegaConf.from_dotlist([*catch_run, *overrides]))

    def engine_bytes(*overrides: str, has_gpu: bool = False) -> float:
        cfg = configure(*overrides)
        return forecast_engine_bytes(cfg, plan_models(cfg)[0], has_gpu=has_gpu)

    assert "optimizer; activations and the key-value cache come on top" in describe_plan(configure())
    vllm, n_gpus = "generator.backend=vllm", "trainer.placement.policy_num_gpus_per_node=8"
    size = format_bytes(4 * n_parameters)
    assert f"; activations, {size} for the engine's weights, and the key-value" in describe_plan(configure(vllm))
    assert engine_bytes(vllm, has_gpu=True) == 2 * n_parameters
    assert engine_bytes(vllm, "trainer.bf16=false", has_gpu=True) == 4 * n_parameters
    assert engine_bytes(has_gpu=True) == 4 * n_parameters, "the embedded engine computes with the policy's dtype"
    sizes = [f"generator.inference_engine_{name}_parallel_size=2" for name in ("tensor", "pipeline", "data")]
    assert engine_bytes(vllm, n_gpus, *sizes) == n_parameters
    assert f"; engine {format_bytes(n_parameters)}\n" in describe_plan(configure(vllm, n_gpus, *sizes))


def test_a_plan_counts_the_host_memory_of_idle_models_and_engines(catch_run: list[str], tiny_model_path: Path) -> None:
    n_parameters = AutoModelForCausalLM.from_pretrained(tiny_model_path).num_parameters()

    def plan(*overrides: str) -> str:
        return describe_plan(load_config(OmegaConf.from_dotlist([*catch_run, *overrides])))

    def expected(shares: float, staying: float) -> str:
        return (
            f"offloading   {format_bytes(shares * n_parameters)} in host memory on each node for what is idle; "
            f"{format_bytes(staying * n_parameters)} of the policy's weights stay on each device beside the engine\n"
        )

    on, vllm = "trainer.placement.offload_idle=true", "generator.backend=vllm"
    gpus = [on, "trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=4"]
    inline = plan(on, vllm)
    assert expected(12 + 4 + 4, 4) in inline, "the policy, the reference and the engine"
    assert expected(8 + 4, 4) in plan(on, vllm, "trainer.algorithm.use_kl_loss=false"), "the weights of the policy stay"
    assert "vLLM · 80% of the memory beside the policy's weights" in inline
    rounded = plan(on, vllm, "trainer.policy.model.dtype=bfloat16")
    assert expected(12 + 2 + 2, 4) in rounded, "weights of the policy are trained in float32"
    sharded = plan(*gpus)
    assert expected(4 * ((12 + 4) / 8 + 4), 4 / 8) in sharded
    assert "all share the policy's devices, and are offloaded while idle" in sharded
    assert "offloading" not in plan(*gpus[1:]), "there is no GPU"
    assert "offloading" not in plan(vllm)


def test_a_plan_does_not_guess_the_size_of_a_model_that_is_not_here(
    catch_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *catch_run, "trainer.ref.model.path=owner/unknown", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "reference    owner/unknown · size unknown before the download" in plan
    assert "memory       unknown before the download" in plan


def test_a_tiny_model_is_written_once(catch_data: Path, tmp_path: Path) -> None:
    folder, data = tmp_path / "tiny", catch_data / "train.parquet"
    assert main(["tiny", str(folder), "--data", str(data)]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert main(["tiny", str(folder)]) == 1


def test_a_report_is_written_for_an_unfinished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "reward/avg_raw_reward": 0.5}\n')
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run/report.html")
    assert "avg_raw_reward" in (tmp_path / "run/report.html").read_text()
    assert main(["report", str(tmp_path / "nothing")]) == 1
    assert "has no metrics.jsonl" in capsys.readouterr().err


ENVIRONMENT = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Length(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.bonus = env_config.bonus

    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=self.bonus + len(action), done=True, metadata={})
"""


def test_an_environment_of_a_module_needs_no_registration(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "length_env.py").write_text(ENVIRONMENT)
    row = {"prompt": [{"role": "user", "content": "State"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    monkeypatch.syspath_prepend(tmp_path)
    data = [f"data.{name}=['{tmp_path}/rows.jsonl']" for name in ("train_data", "val_data")]
    settings = ["environment.env_class=length_env:Length", "environment.skyrl_gym.Length.bonus=100"]
    assert main(["train", *catch_run, *data, *settings, "trainer.max_training_steps=1"]) == 0
    last = json.loads((tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/avg_raw_reward"] >= 100
