"""Command lines, as users write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from skyrl_train.config import get_default_config, load_config, parse_cli, rewrite_overrides
from skyrl_train.config.base import value_at
from skyrl_train.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.epochs=3", "trainer.epochs", 3),
        ("+trainer.epochs=3", "trainer.epochs", 3),
        ("++trainer.epochs=3", "trainer.epochs", 3),
        ("trainer.policy.optimizer_config.lr=1e-5", "trainer.policy.optimizer_config.lr", 1e-5),
        ("trainer.logger=tensorboard", "trainer.logger", ["tensorboard"]),
        ("trainer.logger='console'", "trainer.logger", ["console"]),
        ('trainer.logger=["console","jsonl"]', "trainer.logger", ["console", "jsonl"]),
        ("data.train_data=['$HOME/a.parquet','b c.parquet']", "data.train_data", ["$HOME/a.parquet", "b c.parquet"]),
        ("data.train_data=$HOME/a.parquet", "data.train_data", ["$HOME/a.parquet"]),
        ("trainer.policy.model.path=Qwen/Qwen3-0.6B-Base", "trainer.policy.model.path", "Qwen/Qwen3-0.6B-Base"),
        ("trainer.resume_mode=null", "trainer.resume_mode", "none"),
        ("trainer.resume_mode=none", "trainer.resume_mode", "none"),
        ("trainer.bf16=False", "trainer.bf16", False),
        ("generator={max_turns:3}", "generator.max_turns", 3),
        ("generator.sampling_params.stop=['</a>','x=y']", "generator.sampling_params.stop", ["</a>", "x=y"]),
        ("trainer.run_name=run-${trainer.seed}", "trainer.run_name", "run-42"),
        ("~trainer.epochs", "trainer.epochs", 1),
        ("environment.skyrl_gym.search.topk=3", "environment.skyrl_gym.search", {"topk": 3}),
        ("+environment.skyrl_gym.search.topk=3", "environment.skyrl_gym.search", {"topk": 3}),
        ("environment.skyrl_gym.max_env_workers=0", "environment.skyrl_gym.max_env_workers", 0),
        ("actor_rollout_ref.rollout.n=7", "generator.n_samples_per_prompt", 7),
        ("+trainer.total_epochs=7", "trainer.epochs", 7),
        ("hydra.verbose=true", "trainer.epochs", 1),
    ],
)
def test_an_override_arrives(override: str, key: str, value: object) -> None:
    assert value_at(parse_cli([override]), key) == value


def test_no_override_is_the_default() -> None:
    assert parse_cli([]) == load_config(get_default_config()) == load_config()


GSM8K = """data.train_data=['$HOME/data/gsm8k/train.parquet'] data.val_data=['$HOME/data/gsm8k/validation.parquet']
trainer.algorithm.advantage_estimator=grpo trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct trainer.strategy=fsdp2
trainer.placement.colocate_all=true trainer.placement.policy_num_gpus_per_node=4 trainer.eval_batch_size=1024
trainer.eval_before_train=true trainer.eval_interval=5 trainer.ckpt_interval=10 generator.backend=vllm
generator.num_inference_engines=4 generator.inference_engine_tensor_parallel_size=1 generator.weight_sync_backend=nccl
environment.env_class=gsm8k trainer.logger=wandb trainer.project_name=gsm8k trainer.run_name=gsm8k_test"""

CATCH = """generator.batched=true trainer.logger=tensorboard trainer.policy.model.path=Qwen/Qwen3-0.6B-Base
trainer.train_batch_size=64 trainer.policy_mini_batch_size=16 trainer.critic_mini_batch_size=16
trainer.eval_batch_size=64 generator.gpu_memory_utilization=0.4"""


@pytest.mark.parametrize("command", [GSM8K, CATCH])
def test_a_published_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    cfg = parse_cli(command.split())
    assert cfg.trainer.run_name in ("gsm8k_test", "test_run")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["trainer.epochs"],
            "trainer.epochs is not an override; write trainer.epochs=<value>, without spaces around =",
        ),
        (["--epochs"], "--epochs is not an override; write trainer.epochs=<value>, without spaces around ="),
        (["--batched=true"], "--batched=true is not an override; write generator.batched=true"),
        (["--trainer.epochs=3"], "--trainer.epochs=3 is not an override; write trainer.epochs=3"),
        (["--multirun"], "--multirun is not an override; write multirun=<value>, without spaces around ="),
        (
            ["trainer.logger=console,jsonl"],
            "trainer.logger=console,jsonl asks for a sweep of several runs, and this is one run; "
            "a list is written trainer.logger=[console,jsonl]",
        ),
        (
            ["data.train_data=~/a.parquet"],
            "data.train_data=~/a.parquet cannot be read (token recognition error at: '~'); "
            "quote the value: \"data.train_data='~/a.parquet'\"",
        ),
        (
            ["trainer.epoch=3"],
            "trainer.epoch=3: there is no key trainer.epoch; did you mean trainer.epochs?",
        ),
        (
            ["~trainer.nothing"],
            "these overrides cannot be applied: ~trainer.nothing "
            "(Could not delete from config. 'trainer.nothing' does not exist.)",
        ),
    ],
)
def test_a_wrong_command_line_is_answered(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cli(argv)
    assert str(caught.value) == expected


def test_all_problems_of_a_command_line_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cli(["trainer.epochs=three", "+trainer.epoch=3", "foo.bar=1", "environment.skyrl_gym.search=3"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems in the configuration:"
    assert {line.split("=")[0] for line in lines[1:]} == {
        "  - trainer.epochs",
        "  - trainer.epoch",
        "  - foo.bar",
        "  - environment.skyrl_gym.search",
    }


def test_rewriting_leaves_flags_and_hydras_own_keys() -> None:
    argv = ["--cfg", "job", "-m", "hydra.verbose=true", "~trainer.epochs", "trainer.seed=1,2", "a.b=c d"]
    assert rewrite_overrides(argv) == [*argv[:-1], "++a.b=c d"]
    assert rewrite_overrides(["+trainer.seed=1", "+foo=1"]) == ["trainer.seed=1", "++foo=1"]


def test_parsing_leaves_no_hydra_behind() -> None:
    parse_cli([])
    assert not GlobalHydra.instance().is_initialized()


SCRIPT = """
import sys
import hydra
from hydra.core.global_hydra import GlobalHydra
from skyrl_train.config import config_dir, get_default_config, parse_cli, rewrite_overrides, to_yaml, validate_cfg

@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg):
    assert parse_cli(["trainer.epochs=9"]).trainer.epochs == 9  # a configuration inside a run
    assert get_default_config().trainer.epochs == 1
    assert GlobalHydra.instance().is_initialized()  # and the run's own Hydra is back
    print(to_yaml(validate_cfg(cfg)))

if __name__ == "__main__":
    sys.argv[1:] = rewrite_overrides(sys.argv[1:])
    main()
"""


def run_script(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(SCRIPT)
    path = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "app.py", *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_users_hydra_script_reads_our_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    argv = ["trainer.seed=7", "actor_rollout_ref.rollout.n=2", "environment.skyrl_gym.search.topk=3"]
    done = run_script(tmp_path, *argv)
    assert done.returncode == 0, done.stderr
    assert load_config(yaml.safe_load(done.stdout)) == parse_cli(argv)
    assert "actor_rollout_ref.rollout.n=2 is read as generator.n_samples_per_prompt=2" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_a_users_hydra_script_answers_a_mistyped_key(tmp_path: Path) -> None:
    done = run_script(tmp_path, "trainer.epoch=3")
    assert done.returncode != 0
    assert "trainer.epoch=3: there is no key trainer.epoch; did you mean trainer.epochs?" in done.stderr


def test_a_users_hydra_script_can_sweep(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--multirun", "trainer.seed=1,2")
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count("seed: 1\n"), done.stdout.count("seed: 2\n")) == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app.py", "outputs"]
