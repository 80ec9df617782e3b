"""Settings, names and options that all recipes share: common.sh."""

import os
from pathlib import Path

import pytest
from veritas_kit.recipes import Recipes, write_tool

from skyrl_train.compat.skyrl.hydra_scripts import rewrite_overrides
from skyrl_train.config.cli import compose_config

CHOOSE_MODEL = 'read_arguments; choose_model >&2; printf "%s\\0" "$MODEL"'


def test_variables_of_a_dotenv_file_are_read_and_not_run(recipes: Recipes) -> None:
    lines = ["# settings", "export WANDB_PROJECT='from a file'", 'NOTE="$(touch hacked)"', "ENABLE_LORA=0 # off\r"]
    with recipes.dotenv("\n".join([*lines, "", "ROLLOUT_BACKEND=tgi"])):
        cfg = recipes.config("openspiel-ppo-trainer.sh", ROLLOUT_BACKEND="hf")
    assert cfg["trainer.project_name"] == "from a file"
    assert cfg["trainer.policy.model.lora.rank"] == 0
    assert cfg["generator.backend"] == "hf", "the environment wins"
    assert not (recipes.root / "hacked").exists()


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
    with recipes.dotenv(f"KEY={text}\n"):
        assert recipes.call('load_settings; printf "%s\\0" "$KEY"') == [value]


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
    with recipes.dotenv(f"# settings\n{line}\n"):
        result = recipes.run("merge.sh")
    assert result.returncode == 1
    assert words in result.stderr
    assert "secret" not in result.stderr


def test_an_empty_variable_does_not_hide_the_setting_of_the_dotenv_file(recipes: Recipes) -> None:
    code = (
        'load_settings; printf "%s\\0" "$HF_TOKEN" "$GAME_TYPES" "${CUDA_VISIBLE_DEVICES-unset}" "${WANDB_EXP-unset}"'
    )
    variables = {"HF_TOKEN": "", "GAME_TYPES": "", "CUDA_VISIBLE_DEVICES": "", "WANDB_EXP": ""}
    with recipes.dotenv("HF_TOKEN=hf_x\nGAME_TYPES=hex\nCUDA_VISIBLE_DEVICES=1\n"):  # pragma: allowlist secret
        assert recipes.call(code, **variables) == ["hf_x", "", "", "unset"]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order mark"])
def test_an_empty_setting_of_the_dotenv_file_counts_as_unset(mark: str, recipes: Recipes) -> None:
    code = 'load_settings; env | grep -e ^WANDB_ -e ^HF_TOKEN -e ^GAME_TYPES; printf "\\0"'
    with recipes.dotenv(f"{mark}HF_TOKEN=x\nWANDB_TAGS=\nWANDB_RUN_ID=''\nGAME_TYPES=\n"):
        (exported,) = recipes.call(code)
    assert sorted(exported.splitlines()) == ["GAME_TYPES=", "HF_TOKEN=x"]


def test_any_value_is_an_option_of_hydra(recipes: Recipes) -> None:
    values = ["7", "1e-5", "null", "", "lr=6e-5", "hex,go", "/home/jürgen/x", "/data/run (2)/", "it's", '"a"', "[a]"]
    values += ["a\\", "a\\\\", "a\\b", "\\'", "x\\\\'y\\", "${x}", "\\${x}'", "a ${oc.env:HOME}\\\\", "~/x", "a  b#c"]
    code = 'i=0; for v; do format_option "+data.custom_cls.config.k$i" "$v"; i=$((i + 1)); printf "\\0"; done'
    composed = compose_config(rewrite_overrides(recipes.call(code, *values)))
    assert [composed.data.custom_cls.config[f"k{i}"] for i in range(len(values))] == values


def test_runs_of_the_same_second_have_different_names_and_folders(recipes: Recipes) -> None:
    code = """
        MODEL_NAME=model
        for i in 1 2 3; do
            (name_run SFT 8 2>/dev/null; printf '%s\\0%s\\0' "$WANDB_EXP" "$OUTPUTS") &
        done
        wait
    """
    names = recipes.call(code)
    assert len(set(names)) == 6
    for name, folder in zip(names[::2], names[1::2], strict=True):
        assert Path(folder).is_dir()
        assert "".join(Path(folder).parts[-2:]).replace("-", "") == "".join(name.split("-")[1:3])
        Path(folder).rmdir()


@pytest.mark.parametrize(
    ("variables", "n_gpus"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 1),
    ],
)
def test_visible_gpus_are_counted(variables: dict[str, str], n_gpus: int, recipes: Recipes, tmp_path: Path) -> None:
    """A stand-in for `nvidia-smi` lists three GPUs, one of them divided."""
    lines = ["GPU 0: H100 (UUID: GPU-0)", "  MIG 1g.10gb Device 0: (UUID: MIG-0)", "GPU 1: H100", "GPU 2: H100"]
    tools = write_tool(tmp_path / "gpus", "nvidia-smi", *(f"echo '{line}'" for line in lines))
    assert recipes.call('printf "%s\\0" "$(count_gpus)"', tools=tools, **variables) == [str(n_gpus)]


def test_a_model_is_downloaded_whole_and_once(recipes: Recipes, tmp_path: Path) -> None:
    """A stand-in for the Hub's command, for want of a network, copies a model and fails on request."""
    lines = ['echo "$HF_TOKEN $*" >>"$LOG"', 'mkdir -p "$4"', 'cp -r train/models/org/other/. "$4"', "exit $STATUS"]
    hf = write_tool(tmp_path / "bin", "hf", *lines)
    folder = recipes.root / "train/models/org/new"
    variables = {"AGENT_MODEL_REPO_ID": "org/new", "HF_TOKEN": "secret", "LOG": str(tmp_path / "log")}
    cfg = recipes.config("lgc-v2-GRPO-trainer.sh", tools=hf, **variables)
    assert cfg["trainer.policy.model.path"] == "org/new", "nothing is downloaded without a run"
    failed = recipes.run("lgc-v2-GRPO-trainer.sh", tools=hf, **variables, STATUS="1")
    assert failed.returncode == 1
    assert "org/new could not be downloaded; rerun to resume" in failed.stderr
    assert not folder.exists()
    for _ in range(2):
        assert recipes.call(CHOOSE_MODEL, tools=hf, **variables, STATUS="0") == [str(folder)]
    assert (tmp_path / "log").read_text() == f"secret download org/new --local-dir {folder}.partial\n" * 2


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_model_that_two_recipes_download_is_used_by_both(status: str, recipes: Recipes, tmp_path: Path) -> None:
    """A stand-in for the Hub's command ends after another recipe's download, which has renamed the folder."""
    lines = ['mkdir -p "$4"', 'touch "$4/late"', 'cp -r train/models/org/other "${4%.partial}"', f"exit {status}"]
    hf = write_tool(tmp_path / "bin", "hf", *lines)
    folder = recipes.root / f"train/models/org/shared-{status}"
    variables = {"AGENT_MODEL_REPO_ID": f"org/{folder.name}", "HF_TOKEN": "secret"}
    assert recipes.call(CHOOSE_MODEL, tools=hf, **variables) == [str(folder)]
    assert set(os.listdir(folder)) == set(os.listdir(recipes.root / "train/models/org/other"))
    assert not folder.with_name(f"{folder.name}.partial").exists()
