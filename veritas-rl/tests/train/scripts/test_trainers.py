"""The recipes in their full form, up to the checks before a run."""

import shutil
import stat
import sys
from pathlib import Path

import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForCausalLM
from veritas_kit.recipes import MODELS, VERITAS, Recipes, read_config, write_tool

TRAIN = VERITAS / "train"
SFT, GRPO, RL_GRPO, OPENSPIEL = TRAINERS = (
    "lgc-v2-SFT-trainer.sh",
    "lgc-v2-GRPO-trainer.sh",
    "lgc-v2-RL-GRPO-trainer.sh",
    "openspiel-ppo-trainer.sh",
)
SCRIPTS = (*TRAINERS, "merge.sh", "merge-ppo.sh")


@pytest.fixture(scope="module", autouse=True)
def parquet(recipes: Recipes) -> Path:
    """The folder of the data of supervised fine-tuning."""
    folder = recipes.root / "train/parquet"
    folder.mkdir(exist_ok=True)
    for name in ("train", "val"):
        rows = [{"prompt": f"{name} {i}?", "response": "a"} for i in range(64)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def test_shellcheck_finds_nothing(recipes: Recipes) -> None:
    scripts = [f"train/scripts/{name}" for name in SCRIPTS]  # they source common.sh
    shellcheck = str(Path(sys.executable).parent / "shellcheck")
    result = recipes.shell([shellcheck, "-x", *scripts, "train/docker_run_verl.sh"])
    assert (result.returncode, result.stdout) == (0, "")


def test_scripts_are_executable_and_outputs_ignored_by_git() -> None:
    executable = {path.name for path in TRAIN.glob("**/*.sh") if path.stat().st_mode & stat.S_IXUSR}
    assert executable == {*SCRIPTS, "docker_run_verl.sh"}
    ignored = (VERITAS.parent / ".gitignore").read_text()
    for name in ("artifacts/", "models/", "outputs/", "parquet*/", "merged_model*/"):
        assert f"veritas-rl/train/{name}" in ignored


@pytest.mark.parametrize("script", TRAINERS)
def test_the_full_form_passes_the_checks_before_a_run(script: str, recipes: Recipes, tmp_path: Path) -> None:
    """OpenSpiel starts from an adapter, which keeps its rank, alpha and modules."""
    variables = {"HF_TOKEN": "x"}
    if script == OPENSPIEL:
        model = AutoModelForCausalLM.from_pretrained(recipes.root / "train/models" / MODELS[0])
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
        peft.get_peft_model(model, config).save_pretrained(tmp_path)
        variables["LORA_ADAPTER_PATH"] = str(tmp_path)
    before = set(recipes.root.rglob("*"))
    result = recipes.run(script, "--dry-run", **variables)
    assert result.returncode == 0, result.stderr
    assert f"models/{MODELS[0]} · " in result.stdout
    assert set(recipes.root.rglob("*")) == before, "a dry run leaves no files"


SETTINGS = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "script"),
    [("sft", SFT), ("sft with lora", SFT), ("openspiel", OPENSPIEL), ("grpo", GRPO), ("grpo with lora", GRPO)],
)
def test_settings_of_the_recipes(name: str, script: str, recipes: Recipes) -> None:
    before = set(recipes.root.rglob("*"))
    cfg = recipes.config(script, **({"ENABLE_LORA": "1", "gpu_count": "4"} if "lora" in name else {}))
    assert SETTINGS[name].items() <= cfg.items()
    assert "lora" not in name or cfg["trainer.placement.policy_num_gpus_per_node"] == 4
    run, rl = cfg["trainer.run_name"], "" if script == SFT else "RL/"
    assert cfg["trainer.ckpt_path"] == f"{recipes.root}/train/artifacts/{rl}checkpoints/{run}"
    assert cfg["trainer.output_dir"].startswith(f"{recipes.root}/train/outputs/20")
    assert set(recipes.root.rglob("*")) == before, "a configuration that is printed leaves no files"


def test_the_name_of_a_run_has_its_model_time_and_batch_size(recipes: Recipes) -> None:
    name = recipes.config(SFT)["trainer.run_name"]
    model, date, time, batch = name.rsplit("-", 4)[0], *name.split("-")[3:6]
    assert (model.split("-2")[0], len(date), len(time), batch) == ("trained-top-sn120", 8, 6, "batch_size")


def test_t09_without_lora_the_learning_rate_is_that_of_full_fine_tuning(recipes: Recipes, tmp_path: Path) -> None:
    """Without gpu_count, the recipe uses all visible GPUs."""
    tools = write_tool(tmp_path / "gpus", "nvidia-smi", "echo 'GPU 0: H100'", "echo 'GPU 1: H100'")
    cfg = recipes.config(OPENSPIEL, tools=tools, ENABLE_LORA="false")
    assert (cfg["trainer.policy.model.lora.rank"], cfg["trainer.policy.optimizer_config.lr"]) == (0, 6e-6)
    assert (cfg["trainer.placement.policy_num_gpus_per_node"], cfg["generator.num_inference_engines"]) == (2, 2)


def test_supervised_fine_tuning_needs_no_validation_rows(recipes: Recipes, parquet: Path, tmp_path: Path) -> None:
    """As after `convert_to_parquet --val-ratio 0`."""
    shutil.copy(parquet / "train.parquet", tmp_path)
    result = recipes.run(SFT, "--print-config", dataset_path=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path}/val.parquet does not exist: there is no validation loss" in result.stderr
    assert read_config(result.stdout)["data.val_data"] == []


def test_variables_and_overrides_are_read(recipes: Recipes) -> None:
    result = recipes.run(
        OPENSPIEL,
        "--print-config",
        "+data.custom_cls.config.adapter_config.num_tasks_per_case=200",
        "+data.custom_cls.config.adapter_config.max_random_steps=5",
        "+actor_rollout_ref.model.lora_rank=64",
        "trainer.save_freq=7",
        LAYERED_SUMMON="1",
        FSDP_STRATEGY="fsdp2",
        ROLLOUT_BACKEND="hf",
        gpu_count="4",
        AGENT_MODEL_REPO_ID="org/other",
        WANDB_PROJECT="mine",
        WANDB_EXP="first",
    )
    assert "actor_rollout_ref.rollout.n=12 is read as generator.n_samples_per_prompt=12" in result.stderr
    assert "actor_rollout_ref.rollout.layered_summon=true has no effect" in result.stderr
    cfg = read_config(result.stdout)
    expected = {
        "data.custom_cls.config.adapter_config.num_tasks_per_case": 200,
        "data.custom_cls.config.adapter_config.max_random_steps": 5,
        "trainer.policy.model.path": f"{recipes.root}/train/models/org/other",
        "trainer.policy.model.lora.rank": 64,
        "trainer.strategy": "fsdp2",
        "generator.backend": "hf",
        "trainer.project_name": "mine",
        "trainer.run_name": "first",
        "trainer.ckpt_interval": 7,
        "trainer.placement.policy_num_gpus_per_node": 4,
        "generator.num_inference_engines": 4,
    }
    assert expected.items() <= cfg.items()


def test_a_sourced_script_reads_variables_that_are_not_exported(recipes: Recipes) -> None:
    lines = "WANDB_PROJECT=mine\nENABLE_LORA=0\ncd train\n. scripts/openspiel-ppo-trainer.sh --print-config"
    cfg = read_config(recipes.shell(["bash", "-c", lines]).stdout)
    assert (cfg["trainer.project_name"], cfg["trainer.policy.model.lora.rank"]) == ("mine", 0)


def test_a_model_may_be_a_folder_below_home_with_a_slash_at_its_end(recipes: Recipes) -> None:
    home = recipes.root / "train"
    cfg = recipes.config(RL_GRPO, AGENT_MODEL_REPO_ID="~/models/org/other/", HOME=str(home))
    assert cfg["trainer.policy.model.path"] == f"{home}/models/org/other"
    assert cfg["trainer.run_name"].startswith("other-20")


@pytest.mark.parametrize(("script", "rate"), [(SFT, 2e-5), (GRPO, 6e-5), (OPENSPIEL, 6e-5)])
def test_recipes_run_in_any_folder_with_any_name_from_any_adapter(
    script: str, rate: float, recipes: Recipes, tmp_path: Path
) -> None:
    root, adapter = tmp_path / "jürgen's run (2), lr=1", tmp_path / "a [b]"
    root.symlink_to(recipes.root)
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).touch()
    variables = {"WANDB_PROJECT": "1e-5", "WANDB_EXP": "hex,go=7", "LORA_ADAPTER_PATH": str(adapter)}
    result = recipes.shell(["bash", f"{root}/train/scripts/{script}", "--print-config"], **variables)
    assert result.returncode == 0, result.stderr
    cfg = read_config(result.stdout)
    assert (cfg["trainer.project_name"], cfg["trainer.run_name"]) == ("1e-5", "hex,go=7")
    assert cfg["trainer.policy.model.path"] == f"{root}/train/models/rhuanmatias/trained-top-sn120"
    assert cfg["trainer.ckpt_path"].startswith(f"{root}/train/artifacts/")
    assert cfg["trainer.output_dir"].startswith(f"{root}/train/outputs/20")
    assert cfg["trainer.policy.model.lora.lora_path"] == str(adapter)
    assert cfg["trainer.policy.optimizer_config.lr"] == rate


def test_wandb_is_offline_without_a_key(recipes: Recipes) -> None:
    result = recipes.run(SFT, "--print-config", WANDB_DIR="train/artifacts/wandb/mine")
    assert "WANDB_API_KEY is not set" in result.stderr
    assert f"W&B logs to {recipes.root}/train/artifacts/wandb/mine;" in result.stderr
    assert "add WANDB_API_KEY=<key>" in result.stderr
    result = recipes.run(RL_GRPO, "--print-config", WANDB_API_KEY="0" * 40)
    assert (result.returncode, "WANDB_API_KEY" in result.stderr) == (0, False)


@pytest.mark.parametrize(
    ("script", "variables", "words"),
    [
        (OPENSPIEL, {"AGENT_MODEL_REPO_ID": "org/none"}, "HF_TOKEN is not set"),
        (OPENSPIEL, {"ENABLE_LORA": "maybe"}, "ENABLE_LORA=maybe must be 1 or 0"),
        (OPENSPIEL, {"LORA_ADAPTER_PATH": "train"}, "no adapter_config.json"),
        (OPENSPIEL, {"LORA_ADAPTER_PATH": "x", "ENABLE_LORA": "0"}, "merge it first"),
        (OPENSPIEL, {"ROLLOUT_BACKEND": "tgi", "FSDP_STRATEGY": "ddp"}, "generator.backend=tgi must be one of"),
        (GRPO, {"LORA_ADAPTER_PATH": "x", "ENABLE_LORA": "0"}, "merge it first"),
        (GRPO, {"ROLLOUT_BACKEND": "sglang"}, "start it with EXTRAS=ray,wandb,sglang"),
        (SFT, {"LORA_ADAPTER_PATH": "x", "ENABLE_LORA": "0"}, "merge it first"),
        (SFT, {"dataset_path": "train/none"}, "train/none/train.parquet does not exist"),
        (SFT, {"AGENT_MODEL_REPO_ID": "/none/model"}, "AGENT_MODEL_REPO_ID=/none/model is not a folder; use one, or a"),
        (SFT, {"AGENT_MODEL_REPO_ID": "~/none"}, "AGENT_MODEL_REPO_ID=~/none is not a folder"),
        (SFT, {"AGENT_MODEL_REPO_ID": "./none"}, "AGENT_MODEL_REPO_ID=./none is not a folder"),
        (SFT, {"AGENT_MODEL_REPO_ID": "../none", "HF_TOKEN": "x"}, "AGENT_MODEL_REPO_ID=../none is not a folder"),
    ],
)
def test_mistakes_are_answered(script: str, variables: dict[str, str], words: str, recipes: Recipes) -> None:
    result = recipes.run(script, "--dry-run", **variables)
    assert result.returncode == 1
    assert words in result.stderr
    assert "error: " in result.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_header_of_a_script(script: str, recipes: Recipes) -> None:
    header = (TRAIN / "scripts" / script).read_text().partition("\n(\n")[0].splitlines()[1:]
    text = "".join(line.removeprefix("#").removeprefix(" ") + "\n" for line in header)
    assert "bash train/scripts/" in text
    for command in (
        ["bash", f"train/scripts/{script}", "--tiny", "--help"],
        ["bash", "-c", f". train/scripts/{script} -h"],
    ):
        result = recipes.shell(command, AGENT_MODEL_REPO_ID="org/none", PATH="/usr/bin:/bin")
        assert (result.returncode, result.stdout, result.stderr) == (0, text, "")


@pytest.mark.parametrize("script", SCRIPTS)
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
