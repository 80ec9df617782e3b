"""The container of the recipes: docker_run_verl.sh and its Dockerfile."""

import getpass
import os
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from veritas_kit.recipes import VERITAS, Recipes, write_tool

SCRIPT = "./train/docker_run_verl.sh"


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """The folder of a stand-in for Docker, which has no daemon here.

    It logs its arguments and the token to $LOG, its environment to $LOG.env, and fails at the subcommand $FAILS.
    """
    return write_tool(
        tmp_path / "docker",
        "docker",
        'if [ "$1" = info ]; then echo "$SECURITY"; exit; fi',
        'printf "%s|" "$HF_TOKEN" "$@" >>"$LOG"',
        'echo >>"$LOG"',
        'env >"$LOG.env"',
        '[ "$1" != "$FAILS" ]',
    )


def dry_run(recipes: Recipes, *arguments: str, **variables: str) -> CompletedProcess[str]:
    return recipes.shell([SCRIPT, "--dry-run", *arguments], **variables)


@pytest.mark.parametrize(("folder", "command"), [(".", SCRIPT), ("train", "./docker_run_verl.sh")])
def test_the_container_mounts_the_recipes(folder: str, command: str, recipes: Recipes) -> None:
    result = recipes.shell(["bash", "-c", f"cd {folder} && {command} --dry-run"], HF_TOKEN="secret")
    build, run = result.stdout.splitlines()
    assert "--build-arg EXTRAS=ray\\,wandb" in build
    assert f"-f {recipes.root}/train/Dockerfile {recipes.root}/.." in build
    assert f"-v {recipes.root}:/workspace/veritas-rl -w /workspace/veritas-rl" in run
    assert "-e HF_TOKEN skyrl-veritas bash" in run
    assert "secret" not in result.stdout


def test_a_machine_with_a_gpu_has_vllm_in_its_image(recipes: Recipes, tmp_path: Path) -> None:
    build, run = dry_run(recipes, tools=write_tool(tmp_path / "gpus", "nvidia-smi")).stdout.splitlines()
    assert "--build-arg EXTRAS=ray\\,wandb\\,vllm" in build
    assert "--gpus all" in run


def test_flags_before_and_after_the_command(recipes: Recipes) -> None:
    result = dry_run(recipes, "--tiny", IMAGE="org/image:1")
    assert result.stdout.split()[-4:] == ["org/image:1", "bash", "train/scripts/lgc-v2-SFT-trainer.sh", "--tiny"]
    command = ["bash", "train/scripts/openspiel-ppo-trainer.sh", "--tiny", "--dry-run"]
    with recipes.dotenv("IMAGE='org/image:2' # ours\nHF_TOKEN=secret\n"):
        result = dry_run(recipes, *command, IMAGE="", HF_TOKEN="")
    assert result.stdout.split()[-5:] == ["org/image:2", *command], result.stderr
    assert "-e HF_TOKEN" in result.stdout
    assert "secret" not in result.stdout


@pytest.mark.parametrize(
    ("flags", "words"), [(["--tiny", "bash"], "--tiny takes no command"), (["-it"], "there is no flag -it")]
)
def test_wrong_flags_are_refused(flags: list[str], words: str, recipes: Recipes) -> None:
    result = dry_run(recipes, *flags)
    assert (result.returncode, result.stdout) == (1, "")
    assert words in result.stderr


def test_docker_gets_the_arguments_of_the_container(recipes: Recipes, docker: Path, tmp_path: Path) -> None:
    variables = {"LOG": str(tmp_path / "log"), "HF_TOKEN": "secret", "WANDB_TAGS": "a b", "FAILS": ""}
    command, root = ["bash", "-c", f"{SCRIPT} bash -c 'echo $HOME; true'"], recipes.root
    assert recipes.shell(command, docker, **variables, EXTRAS="ray,vllm").returncode == 0
    build, run = (tmp_path / "log").read_text().splitlines()
    arguments = "--build-arg|EXTRAS=ray,vllm|--build-arg|PIP_EXTRA_INDEX_URL"
    assert build == f"secret|build|-t|skyrl-veritas|{arguments}|-f|{root}/train/Dockerfile|{root}/..|"
    assert run.startswith(
        f"secret|run|--rm|--init|--shm-size=16g|--ipc=host|--network=host|-v|{root}:/workspace/veritas-rl|"
    )
    user = f"|--user|{os.getuid()}:{os.getgid()}|-e|USER={getpass.getuser()}|-e|HOME=/tmp|"
    assert f"{user}-e|HF_TOKEN|-e|WANDB_TAGS|skyrl-veritas|bash|-c|echo $HOME; true|" in run
    assert recipes.shell(command, docker, **variables | {"FAILS": "build"}).returncode == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 3
    assert recipes.shell(command, docker, **variables, SECURITY="[name=rootless]").returncode == 0
    assert "--user" not in (tmp_path / "log").read_text().splitlines()[-1]


def test_the_container_gets_all_settings(recipes: Recipes, docker: Path, tmp_path: Path) -> None:
    (names,) = recipes.call('printf "%s\\0" "${SETTINGS[*]}"')
    values = {name: f"my {name}" for name in names.split()}
    values |= {"TARGET_DIR": f"{recipes.root}/train/merged model", "LORA_ADAPTER_PATH": "/models/adapter"}
    result = recipes.shell([SCRIPT, "ls"], docker, **values, LOG=str(tmp_path / "log"))
    assert result.returncode == 0, result.stderr
    passed = (tmp_path / "log").read_text().splitlines()[-1].split("|")
    assert [name for flag, name in pairwise(passed) if flag == "-e" and "=" not in name] == list(values)
    inside = dict(line.partition("=")[::2] for line in (tmp_path / "log.env").read_text().splitlines())
    values["TARGET_DIR"] = "/workspace/veritas-rl/train/merged model"
    assert {name: inside[name] for name in values} == values


def test_the_image_copies_files_that_exist() -> None:
    for name in ("skyrl-gym", "skyrl-report", "skyrl-train", "constraints.txt"):
        assert (VERITAS.parent / name).exists()
        assert f"!{name}" in (VERITAS / "train/Dockerfile.dockerignore").read_text().split()
