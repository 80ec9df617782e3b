"""The scripts of `train/`, in their full form, up to the checks before a run."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from recipe_shell import Recipes

TRAIN = Path(__file__).parents[1] / "train"
SCRIPTS = [*sorted(TRAIN.glob("scripts/*.sh")), TRAIN / "docker_run_verl.sh"]
TRAINERS = ["lgc-v2-SFT-trainer.sh", "lgc-v2-GRPO-trainer.sh", "lgc-v2-RL-GRPO-trainer.sh", "openspiel-ppo-trainer.sh"]


@pytest.fixture(scope="module", autouse=True)
def parquet(recipes: Recipes) -> None:
    """The data of supervised fine-tuning."""
    folder = recipes.root / "train/parquet"
    folder.mkdir(exist_ok=True)
    for name in ("train", "val"):
        rows = [{"prompt": f"{name} {i}?", "response": "a"} for i in range(64)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def settings(recipes: Recipes, script: str, *arguments: str, **variables: str) -> dict:
    """Return the configuration that a script starts a run with."""
    result = recipes.run(script, *arguments, "--print-config", **variables)
    assert result.returncode == 0, result.stderr
    cfg: dict = yaml.safe_load(result.stdout)
    return cfg


def test_shellcheck_finds_nothing(recipes: Recipes) -> None:
    scripts = [str(path.relative_to(TRAIN.parent)) for path in SCRIPTS if path.name != "common.sh"]  # checked with them
    result = recipes.shell([str(Path(sys.executable).parent / "shellcheck"), "-x", *scripts])
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_executed(script: Path) -> None:
    assert script.name == "common.sh" or script.stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize("script", TRAINERS)
def test_the_full_form_passes_the_checks_before_a_run(script: str, recipes: Recipes) -> None:
    result = recipes.run(script, "--dry-run", HF_TOKEN="x")
    assert result.returncode == 0, result.stderr
    assert "models/rhuanmatias/trained-top-sn120 · " in result.stdout
    assert not (recipes.root / "train/artifacts").exists()


def test_the_defaults_of_sft_are_those_of_the_recipe(recipes: Recipes) -> None:
    cfg = settings(recipes, "lgc-v2-SFT-trainer.sh")
    trainer, optimizer = cfg["trainer"], cfg["trainer"]["policy"]["optimizer_config"]
    assert cfg["data"]["max_length"] == 2048
    assert (trainer["train_batch_size"], trainer["micro_train_batch_size_per_gpu"], trainer["epochs"]) == (32, 8, 10)
    assert (trainer["ckpt_interval"], trainer["eval_interval"]) == (50, 50)
    assert (optimizer["lr"], optimizer["adam_betas"], optimizer["weight_decay"]) == (2e-6, [0.9, 0.98], 0.05)
    assert trainer["policy"]["model"]["dtype"] == "bfloat16"
    assert trainer["placement"]["policy_num_gpus_per_node"] == 2
    assert trainer["project_name"] == "Qwen3-4B-Instruct"
    model, date, time, batch = trainer["run_name"].rsplit("-", 4)[0], *trainer["run_name"].split("-")[3:6]
    assert (model.split("-2")[0], len(date), len(time), batch) == ("trained-top-sn120", 8, 6, "batch_size")
    assert trainer["ckpt_path"] == f"{recipes.root}/train/artifacts/checkpoints/{trainer['run_name']}"
    assert trainer["output_dir"].startswith(f"{recipes.root}/train/outputs/20")


def test_the_defaults_of_openspiel_are_those_of_the_recipe(recipes: Recipes) -> None:
    cfg = settings(recipes, "openspiel-ppo-trainer.sh")
    model, generator = cfg["trainer"]["policy"]["model"], cfg["generator"]
    assert (model["lora"]["rank"], model["lora"]["alpha"], model["lora"]["target_modules"]) == (32, 32, "all-linear")
    assert cfg["trainer"]["policy"]["optimizer_config"]["lr"] == 6e-5
    assert (generator["n_samples_per_prompt"], cfg["trainer"]["train_batch_size"]) == (12, 32)
    assert cfg["trainer"]["ckpt_path"].startswith(f"{recipes.root}/train/artifacts/RL/checkpoints/")
    assert cfg["trainer"]["log_verl_metrics"] is True


@pytest.mark.parametrize("value", ["0", "false"])
def test_t09_without_lora_the_learning_rate_is_that_of_full_fine_tuning(value: str, recipes: Recipes) -> None:
    policy = settings(recipes, "openspiel-ppo-trainer.sh", ENABLE_LORA=value)["trainer"]["policy"]
    assert (policy["model"]["lora"]["rank"], policy["optimizer_config"]["lr"]) == (0, 6e-6)


def test_variables_and_overrides_are_read(recipes: Recipes) -> None:
    cfg = settings(
        recipes,
        "openspiel-ppo-trainer.sh",
        "+data.custom_cls.config.adapter_config.num_tasks_per_case=200",
        "+data.custom_cls.config.adapter_config.max_random_steps=5",
        "+actor_rollout_ref.model.lora_rank=64",
        "trainer.save_freq=7",
        LAYERED_SUMMON="1",
        FSDP_STRATEGY="fsdp2",
        ROLLOUT_BACKEND="hf",
        gpu_count="1",
        AGENT_MODEL_REPO_ID="org/other",
        WANDB_PROJECT="mine",
        WANDB_EXP="first",
    )
    assert cfg["data"]["custom_cls"]["config"]["adapter_config"] == {"num_tasks_per_case": 200, "max_random_steps": 5}
    assert cfg["trainer"]["policy"]["model"]["path"] == f"{recipes.root}/train/models/org/other"
    assert cfg["trainer"]["policy"]["model"]["lora"]["rank"] == 64
    assert (cfg["trainer"]["strategy"], cfg["generator"]["backend"]) == ("fsdp2", "hf")
    assert (cfg["trainer"]["project_name"], cfg["trainer"]["run_name"]) == ("mine", "first")
    assert cfg["trainer"]["ckpt_interval"] == 7


def test_a_line_says_what_an_option_became(recipes: Recipes) -> None:
    result = recipes.run("openspiel-ppo-trainer.sh", "--print-config", LAYERED_SUMMON="1")
    assert "actor_rollout_ref.rollout.n=12 is read as generator.n_samples_per_prompt=12" in result.stderr
    assert "actor_rollout_ref.rollout.layered_summon=true has no effect" in result.stderr


@pytest.mark.parametrize(
    ("script", "variables", "words"),
    [
        ("openspiel-ppo-trainer.sh", {"AGENT_MODEL_REPO_ID": "org/none"}, "HF_TOKEN is not set"),
        ("openspiel-ppo-trainer.sh", {"ENABLE_LORA": "maybe"}, "ENABLE_LORA=maybe must be 1 or 0"),
        ("openspiel-ppo-trainer.sh", {"LORA_ADAPTER_PATH": "/none"}, "there is no such folder"),
        ("openspiel-ppo-trainer.sh", {"LORA_ADAPTER_PATH": "train"}, "no adapter_config.json"),
        ("openspiel-ppo-trainer.sh", {"LORA_ADAPTER_PATH": "x", "ENABLE_LORA": "0"}, "merge it first"),
        ("openspiel-ppo-trainer.sh", {"ROLLOUT_BACKEND": "tgi"}, "generator.backend=tgi must be one of"),
        (
            "openspiel-ppo-trainer.sh",
            {"FSDP_STRATEGY": "ddp"},
            "trainer.strategy=ddp must be one of fsdp2, fsdp, megatron",
        ),
        ("lgc-v2-SFT-trainer.sh", {"dataset_path": "train/none"}, "train/none/train.parquet does not exist"),
        ("merge.sh", {"CHECKPOINT_BASE": "train/none"}, "train/none does not exist; set CHECKPOINT_BASE"),
    ],
)
def test_mistakes_are_answered(script: str, variables: dict[str, str], words: str, recipes: Recipes) -> None:
    result = recipes.run(script, "--dry-run", **variables)
    assert result.returncode == 1
    assert words in result.stderr
    assert "error: " in result.stderr


def test_merge_names_the_runs_that_have_checkpoints(recipes: Recipes, tmp_path: Path) -> None:
    (tmp_path / "run-1/global_step_3").mkdir(parents=True)
    result = recipes.run("merge-ppo.sh", "--dry-run", CHECKPOINT_BASE=str(tmp_path))
    assert result.returncode == 1
    assert f"set CHECKPOINT_BASE to the folder of a run's checkpoints:\n{tmp_path}/run-1" in result.stderr
    result = recipes.run("merge.sh", "--dry-run", CHECKPOINT_BASE=f"{tmp_path}/run-1", GLOBAL_STEP="3")
    assert f"would merge {tmp_path}/run-1/global_step_3 into {recipes.root}/train/merged_model" in result.stderr


def test_variables_of_a_dotenv_file_are_read_and_not_run(recipes: Recipes, tmp_path: Path) -> None:
    lines = ["# settings", "export WANDB_PROJECT='from a file'", 'NOTE="$(touch hacked)"', "ENABLE_LORA=0 # off\r"]
    (recipes.root / ".env").write_text("\n".join([*lines, "", "ROLLOUT_BACKEND=tgi"]))
    try:
        cfg = settings(recipes, "openspiel-ppo-trainer.sh", ROLLOUT_BACKEND="hf")
    finally:
        (recipes.root / ".env").unlink()
    assert cfg["trainer"]["project_name"] == "from a file"
    assert cfg["trainer"]["policy"]["model"]["lora"]["rank"] == 0
    assert not list(recipes.root.rglob("hacked"))


@pytest.mark.parametrize("script", [*TRAINERS, "merge.sh", "merge-ppo.sh"])
def test_a_shell_that_sources_a_script_stays_as_it_is(script: str, recipes: Recipes) -> None:
    """Neither a failure of the script nor its own settings change it."""
    lines = [
        "export AGENT_MODEL_REPO_ID=org/none dataset_path=x CHECKPOINT_BASE=x",
        "state() { shopt; set +o; pwd; trap; compgen -v | grep -v -e BASH_ -e PIPESTATUS; }",
        "state > before",
        f". train/scripts/{script} --dry-run",
        "echo status $?",
        "state > after",
        "diff before after && echo same",
    ]
    result = recipes.shell(["bash", "-c", "\n".join(lines)])
    assert result.stdout == "status 1\nsame\n", result.stderr


def test_a_sourced_script_reads_variables_that_are_not_exported(recipes: Recipes) -> None:
    lines = "WANDB_PROJECT=mine\nENABLE_LORA=0\ncd train\n. scripts/openspiel-ppo-trainer.sh --print-config"
    result = recipes.shell(["bash", "-c", lines])
    cfg = yaml.safe_load(result.stdout)
    assert (cfg["trainer"]["project_name"], cfg["trainer"]["policy"]["model"]["lora"]["rank"]) == ("mine", 0)


def test_the_container_mounts_the_recipes(recipes: Recipes) -> None:
    for folder, command in ((".", "./train/docker_run_verl.sh"), ("train", "./docker_run_verl.sh")):
        result = recipes.shell(["bash", "-c", f"cd {folder} && {command} --dry-run"], HF_TOKEN="secret")
        build, run = result.stdout.splitlines()
        assert f"-f {recipes.root}/train/Dockerfile {recipes.root}/.." in build
        assert f"-v {recipes.root}:/workspace/veritas-rl -w /workspace/veritas-rl" in run
        assert "-e HF_TOKEN skyrl-veritas bash" in run
        assert "secret" not in result.stdout
    result = recipes.shell(["./train/docker_run_verl.sh", "--dry-run", "--tiny"], IMAGE="org/image:1")
    assert result.stdout.split()[-4:] == ["org/image:1", "bash", "train/scripts/lgc-v2-SFT-trainer.sh", "--tiny"]


def test_a_model_is_downloaded_whole_and_once(recipes: Recipes, tmp_path: Path) -> None:
    """A stand-in for the Hub's command, for want of a network, copies a model and fails on request."""
    hf = tmp_path / "bin/hf"
    hf.parent.mkdir()
    lines = ["#!/bin/sh", 'echo "$HF_TOKEN $*" >>"$LOG"', 'mkdir -p "$4"', 'cp -r train/models/org/other/. "$4"']
    hf.write_text("\n".join([*lines, "exit $STATUS"]))
    hf.chmod(0o755)
    folder = recipes.root / "train/models/org/new"
    variables = {"AGENT_MODEL_REPO_ID": "org/new", "HF_TOKEN": "secret", "LOG": str(tmp_path / "log")}
    variables["PATH"] = os.pathsep.join([str(hf.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    failed = recipes.run("lgc-v2-SFT-trainer.sh", "--print-config", **variables, STATUS="1")
    assert failed.returncode == 1
    assert "org/new could not be downloaded; rerun to resume" in failed.stderr
    assert not folder.exists()
    for _ in range(2):
        cfg = settings(recipes, "lgc-v2-SFT-trainer.sh", **variables, STATUS="0")
        assert cfg["trainer"]["policy"]["model"]["path"] == str(folder)
    assert (tmp_path / "log").read_text() == f"secret download org/new --local-dir {folder}.partial\n" * 2


def test_docker_gets_the_arguments_of_the_container(recipes: Recipes, tmp_path: Path) -> None:
    """A stand-in for Docker, which has no daemon here, records its arguments and the token, and fails on request."""
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text('#!/bin/sh\nprintf "%s|" "$HF_TOKEN" "$@" >>"$LOG"\necho >>"$LOG"\n[ "$1" != "$FAILS" ]\n')
    docker.chmod(0o755)
    variables = {"LOG": str(tmp_path / "log"), "HF_TOKEN": "secret", "WANDB_TAGS": "a b", "FAILS": ""}
    command = f"PATH={docker.parent}:$PATH ./train/docker_run_verl.sh bash -c 'echo $HOME; true'"
    assert recipes.shell(["bash", "-c", command], **variables).returncode == 0
    build, run = (tmp_path / "log").read_text().splitlines()
    root = recipes.root
    assert build == f"secret|build|-t|skyrl-veritas|-f|{root}/train/Dockerfile|{root}/..|"
    assert run.startswith(
        f"secret|run|--rm|--init|--shm-size=16g|--ipc=host|--network=host|-v|{root}:/workspace/veritas-rl|"
    )
    assert "|-e|HF_TOKEN|-e|WANDB_TAGS|skyrl-veritas|bash|-c|echo $HOME; true|" in run
    assert recipes.shell(["bash", "-c", command], **variables | {"FAILS": "build"}).returncode == 1
    assert (tmp_path / "log").read_text().splitlines()[2:] == [build]
    for name in ("skyrl-gym", "skyrl-train", "constraints.txt"):  # what the image copies
        assert (TRAIN.parents[1] / name).exists()
        assert f"!{name}" in (TRAIN / "Dockerfile.dockerignore").read_text().split()


def test_outputs_are_ignored_by_git() -> None:
    ignored = (TRAIN.parents[1] / ".gitignore").read_text()
    for name in ("artifacts/", "models/", "outputs/", "parquet*/", "merged_model*/"):
        assert f"veritas-rl/train/{name}" in ignored


def test_the_processes_of_a_recipe_are_those_of_gpu_count(recipes: Recipes) -> None:
    for script in ("openspiel-ppo-trainer.sh", "lgc-v2-SFT-trainer.sh"):
        cfg = settings(recipes, script, gpu_count="4")
        assert cfg["trainer"]["placement"]["policy_num_gpus_per_node"] == 4


def test_wandb_is_offline_without_a_key(recipes: Recipes) -> None:
    result = recipes.run("lgc-v2-SFT-trainer.sh", "--dry-run")
    assert "WANDB_API_KEY is not set: W&B logs to" in result.stderr
    assert "add WANDB_API_KEY=<key>" in result.stderr
    result = recipes.run("lgc-v2-SFT-trainer.sh", "--dry-run", WANDB_API_KEY="0" * 40)
    assert "WANDB_API_KEY" not in result.stderr
    assert os.path.basename(sys.executable).startswith("python")
