import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from train_kit import golden
from train_kit.rules import show_values

from skyrl_train.config import get_default_config, load_config, parse_cli, rewrite_overrides, to_yaml
from skyrl_train.errors import ConfigError


def test_overrides_are_applied(pytestconfig: pytest.Config) -> None:
    cases = golden.read("config/overrides")
    printed, remaining = {}, dict(cases)
    while remaining:  # a command line sets each section once
        argv: dict[str, str] = {}
        for override, (setting,) in remaining.items():
            argv.setdefault(".".join(setting.partition("=")[0].split(".")[:3]), override)
        cfg = parse_cli(list(argv.values()))
        for override in argv.values():
            printed[override] = show_values(cfg, remaining.pop(override))
    golden.compare("config/overrides", {override: printed[override] for override in cases}, pytestconfig)


def test_the_home_directory_needs_no_quotes() -> None:
    cfg = parse_cli(["data.train_data=[~/a.parquet,~/b.parquet]", "trainer.policy.model.path=~/model"])
    assert cfg.data.train_data == ["~/a.parquet", "~/b.parquet"]
    assert cfg.trainer.policy.model.path == str(Path.home() / "model")


def test_without_overrides_the_default_configuration_is_loaded() -> None:
    defaults = get_default_config()
    defaults.trainer.run_name = "r"
    assert parse_cli(["trainer.run_name=r"]) == load_config(defaults) == load_config({"trainer": {"run_name": "r"}})
    assert not GlobalHydra.instance().is_initialized()


def test_several_custom_keys_are_merged() -> None:
    argv = ["trainer.algorithm.custom={tau:0.3}", "trainer.algorithm.custom.beta=2", "+trainer.algorithm.custom.c=x"]
    assert parse_cli(argv).trainer.algorithm.custom == {"tau": 0.3, "beta": 2, "c": "x"}


def test_a_run_without_a_name_gets_a_new_one() -> None:
    assert re.fullmatch(r"skyrl-\d{8}-\d{6}", parse_cli([]).trainer.run_name)
    assert re.fullmatch(r"catch-\d{8}-\d{6}", parse_cli(["trainer.project_name=catch"]).trainer.run_name)


def test_wandb_variables_name_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"API_KEY": "k", "PROJECT": "bandit", "NAME": "first"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    trainer = parse_cli(["trainer.logger=wandb"]).trainer
    assert (trainer.project_name, trainer.run_name) == ("bandit", "first")
    trainer = parse_cli(["trainer.logger=wandb", "trainer.run_name=second"]).trainer
    assert (trainer.project_name, trainer.run_name) == ("bandit", "second")
    assert parse_cli(["trainer.logger=console"]).trainer.project_name == "skyrl"


FILE = """
trainer: {epochs: 7, run_name: from_file, logger: console, algorithm: {custom: {tau: 0.3}}}
generator: {n_samples_per_prompt: 4}
"""


def test_overrides_win_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    argv = ["trainer.epochs=2", "trainer.algorithm.custom.beta=1", "~generator.n_samples_per_prompt"]
    cfg = parse_cli(argv, file=tmp_path / "run.yaml")
    assert (cfg.trainer.epochs, cfg.trainer.run_name, cfg.trainer.logger) == (2, "from_file", ["console"])
    assert cfg.trainer.algorithm.custom == {"tau": 0.3, "beta": 1}
    assert cfg.generator.n_samples_per_prompt == load_config().generator.n_samples_per_prompt


@pytest.mark.parametrize("key", ["trainer", "trainer.epochs", "trainer.critic.model.path", "trainer.epochs=1"])
def test_deleting_what_a_file_does_not_set_leaves_the_default(key: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("generator: {n_samples_per_prompt: 4}")
    named = "trainer.run_name=r"
    cfg = parse_cli([f"~{key}", named], file=tmp_path / "run.yaml")
    assert cfg == parse_cli(["generator.n_samples_per_prompt=4", named])


def test_overrides_refer_to_the_settings_of_a_file_and_to_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {seed: 7, total_epochs: 7, output_dir: 'a b'}")
    argv = ["trainer.run_name='${trainer.seed}-${trainer.epochs}'", "~trainer.total_epochs"]
    cfg = parse_cli(argv, file=tmp_path / "run.yaml")
    assert (cfg.trainer.run_name, cfg.trainer.epochs, cfg.trainer.output_dir) == ("7-1", 1, "a b")
    (tmp_path / "run.yaml").write_text(to_yaml(cfg))
    assert parse_cli([], file=tmp_path / "run.yaml") == cfg


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file"),
        ("trainer: {epochs: ", "cannot read --config"),
        ("- trainer", "must be a mapping of sections"),
        ("trainer: {epoch: 3}", "did you mean trainer.epochs"),
        ("trainer: [1]", "trainer=[1] must be a section; set its keys one by one: trainer.<name>=<value>"),
        ("trainer: 5", "trainer=5 must be a section"),
        ("trainer: {policy: {model: x}}", "trainer.policy.model=x must be a section"),
    ],
)
def test_a_wrong_file_is_refused(text: str | None, expected: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    for argv in ([], ["trainer.policy.model.path=x"]):
        assert expected in find_error(argv, tmp_path / "run.yaml")


def find_error(argv: list[str], file: Path | None = None) -> str:
    return golden.catch(ConfigError, lambda: parse_cli(argv, file=file))


def test_a_wrong_command_line_is_refused_with_a_fix(pytestconfig: pytest.Config) -> None:
    printed = {line: [find_error(line.split())] for line in golden.read("config/command_lines")}
    golden.compare("config/command_lines", printed, pytestconfig)


def test_rewriting_keeps_flags_and_keys_of_hydra() -> None:
    argv = ["--cfg", "job", "-m", "hydra.verbose=true", "~trainer.epochs", "trainer.seed=1,2", "a.b=c d"]
    assert rewrite_overrides(argv) == [*argv[:-1], "++a.b=c d"]
    assert rewrite_overrides(["+trainer.seed=1", "+foo=1"]) == ["trainer.seed=1", "++foo=1"]
    assert rewrite_overrides(["trainer.algorithm.custom={a:1}"]) == ["++trainer.algorithm.custom={a:1}"]


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

REWRITING = "    sys.argv[1:] = rewrite_overrides(sys.argv[1:])\n"


def run_script(folder: Path, *argv: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(script)
    return subprocess.run(
        [sys.executable, "app.py", *argv], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_hydra_script_reads_the_packaged_configuration_and_writes_no_files(tmp_path: Path) -> None:
    argv = ["trainer.seed=7", "trainer.run_name=r", "actor_rollout_ref.rollout.n=2"]
    argv += ["environment.skyrl_gym.search.topk=3"]
    argv += ["trainer.algorithm.custom.tau=0.3", "trainer.algorithm.gdpo.weights={format:0.5}"]
    done = run_script(tmp_path, *argv)
    assert done.returncode == 0, done.stderr
    assert load_config(yaml.safe_load(done.stdout)) == parse_cli(argv)
    assert "actor_rollout_ref.rollout.n=2 is read as generator.n_samples_per_prompt=2" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_a_hydra_script_without_rewrite_overrides_accepts_additions_aliases_and_own_keys(tmp_path: Path) -> None:
    argv = ["+trainer.algorithm.custom.tau=0.3", "++trainer.algorithm.gdpo.weights.format=0.5", "trainer.run_name="]
    argv += ["trainer.algorithm.kl_estimator_type=k3+", "+trainer.algorithm.use_tis=true"]
    argv += ["trainer.algorithm.overlong_buffer.len=3", "+trainer.algorithm.overlong_buffer.penalty_factor=0.5"]
    argv += ["generator.inference_engine.max_num_seqs=4", "environment.skyrl_gym.judge.model=small"]
    script = SCRIPT.replace(REWRITING, "")
    assert script != SCRIPT
    done = run_script(tmp_path, *argv, script=script)
    assert done.returncode == 0, done.stderr
    cfg = load_config(yaml.safe_load(done.stdout))
    algorithm = cfg.trainer.algorithm
    assert (algorithm.custom, algorithm.gdpo.weights) == ({"tau": 0.3}, {"format": 0.5})
    assert (algorithm.kl_estimator_type, algorithm.off_policy_correction.tis_ratio_type) == ("k3+", "token")
    assert algorithm.overlong_buffer == (3, 0.5)
    assert cfg.generator.max_num_seqs == 4
    assert cfg.environment.skyrl_gym.env_config("judge") == {"model": "small"}
    assert cfg.trainer.run_name.startswith("skyrl-")


def test_a_mistake_ends_a_hydra_script_with_one_message(tmp_path: Path) -> None:
    script = SCRIPT.replace(REWRITING, "").replace("to_yaml, validate_cfg", "to_yaml")
    script = script.replace(
        "import sys\n", "import sys\nfrom skyrl_train.entrypoints.main_base import validate_cfg\n", 1
    )
    done = run_script(tmp_path, "trainer.epoch=3", script=script)
    assert done.returncode == 1
    assert done.stderr == "error: trainer.epoch=3: there is no key trainer.epoch; did you mean trainer.epochs?\n"


def test_a_hydra_script_can_sweep(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--multirun", "trainer.seed=1,2")
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count("seed: 1\n"), done.stdout.count("seed: 2\n")) == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app.py", "outputs"]
