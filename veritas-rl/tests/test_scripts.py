"""The scripts of `train/`, in their full form, up to the checks before a run."""

from __future__ import annotations

import getpass
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from recipe_shell import Recipes
from transformers import AutoModelForCausalLM

from skyrl_train.config.cli import compose_config, rewrite_overrides

TRAIN = Path(__file__).parents[1] / "train"
SCRIPTS = [*sorted(TRAIN.glob("scripts/*.sh")), TRAIN / "docker_run_verl.sh"]
TRAINERS = ["lgc-v2-SFT-trainer.sh", "lgc-v2-GRPO-trainer.sh", "lgc-v2-RL-GRPO-trainer.sh", "openspiel-ppo-trainer.sh"]

CHOOSE_MODEL = 'read_arguments; choose_model >&2; printf "%s\\0" "$MODEL"'


@pytest.fixture(scope="module", autouse=True)
def parquet(recipes: Recipes) -> None:
    """The data of supervised fine-tuning."""
    folder = recipes.root / "train/parquet"
    folder.mkdir(exist_ok=True)
    for name in ("train", "val"):
        rows = [{"prompt": f"{name} {i}?", "response": "a"} for i in range(64)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


@contextmanager
def dotenv(recipes: Recipes, text: str) -> Iterator[None]:
    """Give the recipes a .env file within the context."""
    file = recipes.root / ".env"
    file.write_text(text)
    try:
        yield
    finally:
        file.unlink()


def call(recipes: Recipes, code: str, *arguments: str, **variables: str) -> list[str]:
    """Run code that uses the functions of common.sh; return what it prints, split at NUL."""
    result = recipes.shell(["bash", "-c", f". train/scripts/common.sh; {code}", "bash", *arguments], **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1]


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
    is_sourced = script.name == "common.sh"
    assert bool(script.stat().st_mode & stat.S_IXUSR) != is_sourced


@pytest.mark.parametrize("script", TRAINERS)
def test_the_full_form_passes_the_checks_before_a_run(script: str, recipes: Recipes) -> None:
    result = recipes.run(script, "--dry-run", HF_TOKEN="x")
    assert result.returncode == 0, result.stderr
    assert "models/rhuanmatias/trained-top-sn120 · " in result.stdout
    assert not (recipes.root / "train/artifacts").exists()
    assert not (recipes.root / "train/outputs").exists()


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


@pytest.mark.parametrize("script", ["lgc-v2-SFT-trainer.sh", "lgc-v2-GRPO-trainer.sh"])
def test_all_recipes_train_adapters(script: str, recipes: Recipes, tmp_path: Path) -> None:
    """By default, those of the puzzles train all weights."""
    rates = (2e-6, 2e-5) if "SFT" in script else (6e-6, 6e-5)
    policy = settings(recipes, script)["trainer"]["policy"]
    assert (policy["model"]["lora"]["rank"], policy["optimizer_config"]["lr"]) == (0, rates[0])
    policy = settings(recipes, script, ENABLE_LORA="1")["trainer"]["policy"]
    lora = policy["model"]["lora"]
    assert (lora["rank"], lora["alpha"], lora["target_modules"]) == (32, 32, "all-linear")
    assert policy["optimizer_config"]["lr"] == rates[1]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    policy = settings(recipes, script, LORA_ADAPTER_PATH=str(tmp_path))["trainer"]["policy"]
    assert (policy["model"]["lora"]["lora_path"], policy["optimizer_config"]["lr"]) == (str(tmp_path), rates[1])


def test_supervised_fine_tuning_needs_no_validation_rows(recipes: Recipes, tmp_path: Path) -> None:
    """As after `convert_to_parquet --val-ratio 0`."""
    shutil.copy(recipes.root / "train/parquet/train.parquet", tmp_path)
    result = recipes.run("lgc-v2-SFT-trainer.sh", "--dry-run", dataset_path=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path}/val.parquet does not exist: there is no validation loss" in result.stderr
    assert "val data" not in result.stdout


@pytest.fixture
def gpus(tmp_path: Path) -> str:
    """A PATH with a stand-in for `nvidia-smi` on a machine with three GPUs, one of them divided."""
    command = tmp_path / "gpus/nvidia-smi"
    command.parent.mkdir()
    lines = ["GPU 0: H100 (UUID: GPU-0)", "  MIG 1g.10gb Device 0: (UUID: MIG-0)", "GPU 1: H100", "GPU 2: H100"]
    command.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines)]))
    command.chmod(0o755)
    return os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.mark.parametrize(
    ("variables", "n_gpus"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 1),
        ({"gpu_count": "2"}, 2),
    ],
)
def test_reinforcement_learning_takes_the_visible_gpus(
    variables: dict[str, str], n_gpus: int, recipes: Recipes, gpus: str
) -> None:
    cfg = settings(recipes, "openspiel-ppo-trainer.sh", PATH=gpus, **variables)
    assert cfg["trainer"]["placement"]["policy_num_gpus_per_node"] == n_gpus
    assert cfg["generator"]["num_inference_engines"] == n_gpus


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


def test_a_model_may_be_a_folder_below_home_with_a_slash_at_its_end(recipes: Recipes) -> None:
    home = recipes.root / "train"
    cfg = settings(recipes, "lgc-v2-RL-GRPO-trainer.sh", AGENT_MODEL_REPO_ID="~/models/org/other/", HOME=str(home))
    assert cfg["trainer"]["policy"]["model"]["path"] == f"{home}/models/org/other"
    assert cfg["trainer"]["run_name"].startswith("other-20")


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
        ("lgc-v2-GRPO-trainer.sh", {"LORA_ADAPTER_PATH": "/none"}, "there is no such folder"),
        ("lgc-v2-GRPO-trainer.sh", {"LORA_ADAPTER_PATH": "x", "ENABLE_LORA": "0"}, "merge it first"),
        ("lgc-v2-SFT-trainer.sh", {"LORA_ADAPTER_PATH": "/none"}, "there is no such folder"),
        ("lgc-v2-GRPO-trainer.sh", {"ROLLOUT_BACKEND": "sglang"}, "start it with EXTRAS=ray,wandb,sglang"),
        ("lgc-v2-SFT-trainer.sh", {"dataset_path": "train/none"}, "train/none/train.parquet does not exist"),
        ("merge.sh", {"CHECKPOINT_BASE": "train/none"}, "train/none does not exist; set CHECKPOINT_BASE"),
    ],
)
def test_mistakes_are_answered(script: str, variables: dict[str, str], words: str, recipes: Recipes) -> None:
    result = recipes.run(script, "--dry-run", **variables)
    assert result.returncode == 1
    assert words in result.stderr
    assert "error: " in result.stderr


@pytest.mark.parametrize("name", ["/none/model", "~/none", "./none", "../none"])
def test_a_model_folder_that_does_not_exist_is_named(name: str, recipes: Recipes) -> None:
    """It is not a name on the Hub, and needs no token."""
    for token in ("", "x"):
        result = recipes.run("lgc-v2-SFT-trainer.sh", "--dry-run", AGENT_MODEL_REPO_ID=name, HF_TOKEN=token)
        assert result.returncode == 1
        assert f"AGENT_MODEL_REPO_ID={name} is not a folder; use one, or a name on the Hub" in result.stderr


@pytest.mark.parametrize("script", [*TRAINERS, "merge.sh", "merge-ppo.sh"])
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


def test_merge_names_the_runs_that_have_checkpoints(recipes: Recipes, tmp_path: Path) -> None:
    (tmp_path / "run-1/global_step_3").mkdir(parents=True)
    result = recipes.run("merge-ppo.sh", "--dry-run", CHECKPOINT_BASE=str(tmp_path))
    assert result.returncode == 1
    assert f"set CHECKPOINT_BASE to the folder of a run's checkpoints:\n{tmp_path}/run-1" in result.stderr
    result = recipes.run("merge.sh", "--dry-run", CHECKPOINT_BASE=f"{tmp_path}/run-1", GLOBAL_STEP="3")
    assert f"would merge {tmp_path}/run-1/global_step_3 into {recipes.root}/train/merged_model" in result.stderr


def test_merge_reads_a_folder_of_checkpoints_that_is_a_link(recipes: Recipes, tmp_path: Path) -> None:
    (tmp_path / "runs/run-1/global_step_3").mkdir(parents=True)
    links = [tmp_path / name for name in ("link to run-1", "link to runs")]
    for link, target in zip(links, ("runs/run-1", "runs"), strict=True):
        link.symlink_to(tmp_path / target)
    result = recipes.run("merge.sh", "--dry-run", CHECKPOINT_BASE=str(links[0]))
    assert f"would merge {links[0]} into" in result.stderr
    result = recipes.run("merge.sh", "--dry-run", CHECKPOINT_BASE=str(links[1]))
    assert f"set CHECKPOINT_BASE to the folder of a run's checkpoints:\n{links[1]}/run-1" in result.stderr


@pytest.mark.parametrize("flag", ["--tiny", "--dry-run"])
def test_the_target_of_a_merge_may_end_with_a_slash(flag: str, recipes: Recipes, tmp_path: Path) -> None:
    """A partial folder beside it would be within it otherwise."""
    (tmp_path / "run/global_step_3").mkdir(parents=True)
    variables = {"CHECKPOINT_BASE": f"{tmp_path}/run", "TARGET_DIR": f"{tmp_path}/merged/"}
    result = recipes.run("merge.sh", flag, "--dry-run", **variables)
    assert result.stderr.endswith(f" into {tmp_path}/merged\n")


@pytest.mark.parametrize("script", ["merge.sh", "merge-ppo.sh"])
def test_merge_keeps_a_target_that_exists(script: str, recipes: Recipes, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    model.touch()
    for flags in (["--tiny"], ["--tiny", "--dry-run"], ["--dry-run"], []):
        result = recipes.run(script, *flags, TARGET_DIR=str(tmp_path))
        assert result.returncode == 1, result.stderr
        assert f"error: {tmp_path} already exists; set TARGET_DIR to a new folder" in result.stderr
        assert model.exists()


def test_merge_neither_deletes_nor_trains_in_a_dry_run(recipes: Recipes) -> None:
    earlier = recipes.root / "train/merged_model_tiny/model.safetensors"
    earlier.parent.mkdir()
    earlier.touch()
    before = set(recipes.root.rglob("*"))
    result = recipes.run("merge.sh", "--tiny", "--dry-run", GLOBAL_STEP="50", CHECKPOINT_BASE="none")
    assert result.returncode == 0, result.stderr
    assert f"would train a tiny model and merge its checkpoint into {earlier.parent}" in result.stderr
    assert set(recipes.root.rglob("*")) == before
    earlier.unlink()
    earlier.parent.rmdir()


def test_an_adapter_keeps_its_rank_alpha_and_modules(recipes: Recipes, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(recipes.root / "train/models/org/other")
    peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])).save_pretrained(tmp_path)
    variables = {"AGENT_MODEL_REPO_ID": "org/other", "LORA_ADAPTER_PATH": str(tmp_path)}
    result = recipes.run("openspiel-ppo-trainer.sh", "--dry-run", **variables)
    assert result.returncode == 0, result.stderr


def test_variables_of_a_dotenv_file_are_read_and_not_run(recipes: Recipes) -> None:
    lines = ["# settings", "export WANDB_PROJECT='from a file'", 'NOTE="$(touch hacked)"', "ENABLE_LORA=0 # off\r"]
    with dotenv(recipes, "\n".join([*lines, "", "ROLLOUT_BACKEND=tgi"])):
        cfg = settings(recipes, "openspiel-ppo-trainer.sh", ROLLOUT_BACKEND="hf")
    assert cfg["trainer"]["project_name"] == "from a file"
    assert cfg["trainer"]["policy"]["model"]["lora"]["rank"] == 0
    assert not list(recipes.root.rglob("hacked"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"hf_x" # mine', "hf_x"),
        ('"hf_x" ', "hf_x"),
        ("'hf_x'#mine", "hf_x"),
        (' "a # b"\r', "a # b"),
        ("abc  # two blanks", "abc"),
        ("abc \t", "abc"),
        (" abc", "abc"),
        (" # nothing", ""),
        ("a#b", "a#b"),
        (r'"{\"a\": \"\\\$\n\"}"', r'{"a": "\$\n"}'),
        ("'it\"s'", 'it"s'),
        ("two words", "two words"),
        ("''", ""),
    ],
)
def test_values_of_a_dotenv_file_have_no_quotes_blanks_and_comments(text: str, value: str, recipes: Recipes) -> None:
    with dotenv(recipes, f"KEY={text}\n"):
        assert call(recipes, 'load_settings; printf "%s\\0" "$KEY"') == [value]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('HF_TOKEN="secret', "the value of HF_TOKEN does not end with its quote; write HF_TOKEN='value'"),
        ("HF_TOKEN='it's secret'", "the value of HF_TOKEN does not end with its quote"),
        ('HF_TOKEN="a" secret', "the value of HF_TOKEN does not end with its quote"),
        ("HF_TOKEN: secret", "line 2 is not NAME=value"),
        ("HF_TOKEN = secret", "line 2 is not NAME=value"),
    ],
)
def test_a_mistake_in_a_dotenv_file_is_named_without_the_value(line: str, words: str, recipes: Recipes) -> None:
    with dotenv(recipes, f"# settings\n{line}\n"):
        result = recipes.run("merge.sh")
    assert result.returncode == 1
    assert words in result.stderr
    assert "secret" not in result.stderr


def test_a_setting_that_is_empty_does_not_hide_that_of_the_dotenv_file(recipes: Recipes) -> None:
    code = (
        'load_settings; printf "%s\\0" "$HF_TOKEN" "$GAME_TYPES" "${CUDA_VISIBLE_DEVICES-unset}" "${WANDB_EXP-unset}"'
    )
    variables = {"HF_TOKEN": "", "GAME_TYPES": "", "CUDA_VISIBLE_DEVICES": "", "WANDB_EXP": ""}
    with dotenv(recipes, "HF_TOKEN=hf_x\nGAME_TYPES=hex\nCUDA_VISIBLE_DEVICES=1\n"):  # pragma: allowlist secret
        assert call(recipes, code, **variables) == ["hf_x", "", "", "unset"]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order mark"])
def test_a_setting_of_the_dotenv_file_that_is_empty_counts_as_unset(mark: str, recipes: Recipes) -> None:
    code = 'load_settings; env | grep -e ^WANDB_ -e ^HF_TOKEN -e ^GAME_TYPES; printf "\\0"'
    with dotenv(recipes, f"{mark}HF_TOKEN=x\nWANDB_TAGS=\nWANDB_RUN_ID=''\nGAME_TYPES=\n"):
        (exported,) = call(recipes, code)
    assert sorted(exported.splitlines()) == ["GAME_TYPES=", "HF_TOKEN=x"]


@pytest.mark.parametrize("script", ["lgc-v2-SFT-trainer.sh", "lgc-v2-RL-GRPO-trainer.sh"])
def test_a_relative_folder_of_wandb_is_below_the_recipes(script: str, recipes: Recipes) -> None:
    result = recipes.run(script, "--print-config", WANDB_DIR="train/artifacts/wandb/mine")
    assert f"W&B logs to {recipes.root}/train/artifacts/wandb/mine;" in result.stderr


def test_any_value_is_an_option_of_hydra(recipes: Recipes) -> None:
    values = ["7", "1e-5", "null", "", "lr=6e-5", "hex,go", "/home/jürgen/x", "/data/run (2)/", "it's", '"a"', "[a]"]
    values += ["a\\", "a\\\\", "a\\b", "\\'", "x\\\\'y\\", "${x}", "\\${x}'", "a ${oc.env:HOME}\\\\", "~/x", "a  b#c"]
    texts = call(recipes, 'for v; do format_option trainer.run_name "$v"; printf "\\0"; done', *values)
    for value, text in zip(values, texts, strict=True):
        composed = compose_config(rewrite_overrides([text]))
        assert composed.trainer.run_name == value, text


@pytest.mark.parametrize("script", ["lgc-v2-SFT-trainer.sh", "lgc-v2-RL-GRPO-trainer.sh", "openspiel-ppo-trainer.sh"])
def test_recipes_run_in_any_folder_and_with_any_name(script: str, recipes: Recipes, tmp_path: Path) -> None:
    root = tmp_path / "jürgen's run (2), lr=1"
    root.symlink_to(recipes.root)
    adapter = tmp_path / "a [b]"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).touch()
    variables = {"WANDB_PROJECT": "1e-5", "WANDB_EXP": "hex,go=7", "LORA_ADAPTER_PATH": str(adapter)}
    result = recipes.shell(["bash", f"{root}/train/scripts/{script}", "--print-config"], **variables)
    assert result.returncode == 0, result.stderr
    trainer = yaml.safe_load(result.stdout)["trainer"]
    assert (trainer["project_name"], trainer["run_name"]) == ("1e-5", "hex,go=7")
    assert trainer["policy"]["model"]["path"] == f"{root}/train/models/rhuanmatias/trained-top-sn120"
    assert trainer["ckpt_path"].startswith(f"{root}/train/artifacts/")
    assert trainer["output_dir"].startswith(f"{root}/train/outputs/20")
    assert trainer["policy"]["model"]["lora"]["lora_path"] == str(adapter)


def test_runs_of_the_same_second_have_different_names_and_folders(recipes: Recipes) -> None:
    code = """
        MODEL_NAME=model
        for i in 1 2 3; do
            (name_run SFT 8 2>/dev/null; printf '%s\\0%s\\0' "$WANDB_EXP" "$OUTPUTS") &
        done
        wait
    """
    names = call(recipes, code)
    assert len(set(names)) == 6
    for name, folder in zip(names[::2], names[1::2], strict=True):
        assert Path(folder).is_dir()
        assert "".join(Path(folder).parts[-2:]).replace("-", "") == "".join(name.split("-")[1:3])
        Path(folder).rmdir()


def test_a_configuration_that_is_printed_leaves_no_files(recipes: Recipes) -> None:
    before = set(recipes.root.rglob("*"))
    settings(recipes, "openspiel-ppo-trainer.sh")
    assert set(recipes.root.rglob("*")) == before


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
        assert "--build-arg EXTRAS=ray\\,wandb" in build
        assert f"-f {recipes.root}/train/Dockerfile {recipes.root}/.." in build
        assert f"-v {recipes.root}:/workspace/veritas-rl -w /workspace/veritas-rl" in run
        assert "-e HF_TOKEN skyrl-veritas bash" in run
        assert "secret" not in result.stdout
    result = recipes.shell(["./train/docker_run_verl.sh", "--dry-run", "--tiny"], IMAGE="org/image:1")
    assert result.stdout.split()[-4:] == ["org/image:1", "bash", "train/scripts/lgc-v2-SFT-trainer.sh", "--tiny"]


def test_flags_after_the_command_of_a_container_are_its_own(recipes: Recipes) -> None:
    command = ["bash", "train/scripts/openspiel-ppo-trainer.sh", "--tiny", "--dry-run"]
    with dotenv(recipes, "IMAGE='org/image:2' # ours\nHF_TOKEN=secret\n"):
        result = recipes.shell(["./train/docker_run_verl.sh", "--dry-run", *command], IMAGE="", HF_TOKEN="")
    assert result.stdout.split()[-5:] == ["org/image:2", *command], result.stderr
    assert "-e HF_TOKEN" in result.stdout
    assert "secret" not in result.stdout
    for flags, words in ((["--tiny", *command], "--tiny takes no command"), (["-it"], "there is no flag -it")):
        result = recipes.shell(["./train/docker_run_verl.sh", "--dry-run", *flags])
        assert (result.returncode, result.stdout) == (1, "")
        assert words in result.stderr


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
    cfg = settings(recipes, "lgc-v2-SFT-trainer.sh", **variables)
    assert cfg["trainer"]["policy"]["model"]["path"] == "org/new"  # nothing is downloaded without a run
    failed = recipes.run("lgc-v2-SFT-trainer.sh", **variables, STATUS="1")
    assert failed.returncode == 1
    assert "org/new could not be downloaded; rerun to resume" in failed.stderr
    assert not folder.exists()
    for _ in range(2):
        assert call(recipes, CHOOSE_MODEL, **variables, STATUS="0") == [str(folder)]
    assert (tmp_path / "log").read_text() == f"secret download org/new --local-dir {folder}.partial\n" * 2


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_model_that_two_recipes_download_is_used_by_both(status: str, recipes: Recipes, tmp_path: Path) -> None:
    """A stand-in for the Hub's command ends after another recipe's download, which has renamed the folder."""
    hf = tmp_path / "bin/hf"
    hf.parent.mkdir()
    lines = ["#!/bin/sh", 'mkdir -p "$4"', 'touch "$4/late"', 'cp -r train/models/org/other "${4%.partial}"']
    hf.write_text("\n".join([*lines, f"exit {status}"]))
    hf.chmod(0o755)
    folder = recipes.root / f"train/models/org/shared-{status}"
    path = os.pathsep.join([str(hf.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"AGENT_MODEL_REPO_ID": f"org/{folder.name}", "HF_TOKEN": "secret", "PATH": path}
    assert call(recipes, CHOOSE_MODEL, **variables) == [str(folder)]
    assert {file.name for file in folder.iterdir()} == {
        file.name for file in (recipes.root / "train/models/org/other").iterdir()
    }
    assert not folder.with_name(f"{folder.name}.partial").exists()


@pytest.fixture
def docker(tmp_path: Path) -> str:
    """A PATH with a stand-in for Docker, which has no daemon here: it logs its arguments and the token, and fails on
    request."""
    command = tmp_path / "docker/docker"
    command.parent.mkdir()
    lines = ["#!/bin/sh", 'if [ "$1" = info ]; then echo "$SECURITY"; exit; fi']
    lines += ['printf "%s|" "$HF_TOKEN" "$@" >>"$LOG"', 'echo >>"$LOG"', 'env >"$LOG.env"', '[ "$1" != "$FAILS" ]']
    command.write_text("\n".join(lines))
    command.chmod(0o755)
    return os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])


def test_docker_gets_the_arguments_of_the_container(recipes: Recipes, docker: str, tmp_path: Path) -> None:
    variables = {"PATH": docker, "LOG": str(tmp_path / "log"), "HF_TOKEN": "secret", "WANDB_TAGS": "a b", "FAILS": ""}
    command = "./train/docker_run_verl.sh bash -c 'echo $HOME; true'"
    assert recipes.shell(["bash", "-c", command], **variables, EXTRAS="ray,vllm").returncode == 0
    build, run = (tmp_path / "log").read_text().splitlines()
    root = recipes.root
    arguments = "--build-arg|EXTRAS=ray,vllm|--build-arg|PIP_EXTRA_INDEX_URL"
    assert build == f"secret|build|-t|skyrl-veritas|{arguments}|-f|{root}/train/Dockerfile|{root}/..|"
    assert run.startswith(
        f"secret|run|--rm|--init|--shm-size=16g|--ipc=host|--network=host|-v|{root}:/workspace/veritas-rl|"
    )
    user = f"|--user|{os.getuid()}:{os.getgid()}|-e|USER={getpass.getuser()}|-e|HOME=/tmp|"
    assert f"{user}-e|HF_TOKEN|-e|WANDB_TAGS|skyrl-veritas|bash|-c|echo $HOME; true|" in run
    assert recipes.shell(["bash", "-c", command], **variables | {"FAILS": "build"}).returncode == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 3
    assert recipes.shell(["bash", "-c", command], **variables, SECURITY="[name=rootless]").returncode == 0
    assert "--user" not in (tmp_path / "log").read_text().splitlines()[-1]


def test_a_machine_with_a_gpu_has_vllm_in_its_image(recipes: Recipes, gpus: str) -> None:
    result = recipes.shell(["./train/docker_run_verl.sh", "--dry-run"], PATH=gpus)
    build, run = result.stdout.splitlines()
    assert "--build-arg EXTRAS=ray\\,wandb\\,vllm" in build
    assert "--gpus all" in run


def test_the_container_gets_all_settings(recipes: Recipes, docker: str, tmp_path: Path) -> None:
    (names,) = call(recipes, 'printf "%s\\0" "${SETTINGS[*]}"')
    values = {name: f"my {name}" for name in names.split()}
    values |= {"TARGET_DIR": f"{recipes.root}/train/merged model", "LORA_ADAPTER_PATH": "/models/adapter"}
    result = recipes.shell(["./train/docker_run_verl.sh", "ls"], **values, PATH=docker, LOG=str(tmp_path / "log"))
    assert result.returncode == 0, result.stderr
    passed = (tmp_path / "log").read_text().splitlines()[-1].split("|")
    assert [name for flag, name in pairwise(passed) if flag == "-e" and "=" not in name] == list(values)
    inside = dict(line.partition("=")[::2] for line in (tmp_path / "log.env").read_text().splitlines())
    values["TARGET_DIR"] = "/workspace/veritas-rl/train/merged model"
    assert {name: inside[name] for name in values} == values


def test_the_image_copies_files_that_exist() -> None:
    for name in ("skyrl-gym", "skyrl-train", "constraints.txt"):
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
