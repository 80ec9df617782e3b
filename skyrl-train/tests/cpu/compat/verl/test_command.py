"""Command lines of verl, read as overrides."""

import pytest
from train_kit import golden
from train_kit.rules import show_values

from skyrl_train.compat.verl.command import find_torchrun_flags, read_command
from skyrl_train.compat.verl.programs import MAIN_PPO, PROGRAMS, VerlProgram
from skyrl_train.config import changed_settings
from skyrl_train.config.base import with_value
from skyrl_train.config.cli import parse
from skyrl_train.config.loading import Schema, resolve
from skyrl_train.errors import ConfigError


def refuse(*options: str, program: str = "main_ppo") -> str:
    return golden.catch(ConfigError, lambda: read_command([program, *options]))


def describe(command: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is logged while a command is read, and how its configuration differs from our defaults."""
    caplog.clear()
    program, overrides = read_command(command.split())
    cfg = parse([*overrides, "trainer.run_name=r"], program.schema)
    defaults = resolve(with_value(program.schema.root(), "trainer.run_name", "r"), program.schema)
    changes = changed_settings(defaults.model_dump(mode="json"), cfg.model_dump(mode="json"))
    return [*(f"log: {message}" for message in caplog.messages), *(f"set: {change}" for change in changes)]


def test_commands_and_options_are_read(caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config) -> None:
    """A case without a program has the options of a plain command, and lists only what they change."""
    plain = "main_ppo algorithm.adv_estimator=grpo"
    defaults, printed = describe(plain, caplog), {}
    for case in golden.read("compat/verl_commands"):
        if "=" in case.split()[0]:
            printed[case] = [line for line in describe(f"{plain} {case}", caplog) if line not in defaults]
        else:
            printed[case] = describe(case, caplog)
    golden.compare("compat/verl_commands", printed, pytestconfig)


def test_an_option_without_a_counterpart_is_refused_with_a_fix(pytestconfig: pytest.Config) -> None:
    printed = {option: [refuse(option)] for option in golden.read("compat/verl_options")}
    assert all(option.partition("=")[0] in sentence for option, (sentence,) in printed.items())
    assert refuse("reward_model.enable=True", "data.shuffle=False").startswith("2 problems in the configuration:")
    golden.compare("compat/verl_options", printed, pytestconfig)


def test_an_option_that_is_refused_can_be_overridden() -> None:
    _, overrides = read_command(["main_ppo", "trainer.critic_warmup=10", "trainer.critic_warmup=0"])
    assert not any("critic_warmup" in text for text in overrides)
    for last in ("trainer.critic_warmup=10", "~trainer.critic_warmup"):
        with pytest.raises(ConfigError, match=r"trainer\.critic_warmup"):
            parse(read_command(["main_ppo", "trainer.critic_warmup=0", last])[1], MAIN_PPO.schema)


def test_a_command_without_a_program_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains none of verl's programs main_ppo, fsdp_sft_trainer"):
        read_command(["main_eval", "data.path=x"])


@pytest.mark.parametrize(
    ("options", "expected", "absent"),
    [
        (["hydra.run.dir=runs/1"], "trainer.output_dir=runs/1", "hydra"),
        (["hydra.run.dir='/data/run (2)'"], "trainer.output_dir='/data/run (2)'", "hydra"),
        (["trainer.algorithm.use_kl_loss=true"], "trainer.epochs=30", "trainer.algorithm.use_kl_loss=false"),
        (["trainer.total_epochs=2"], "trainer.algorithm.use_kl_loss=false", "trainer.epochs=30"),
        ([], "trainer.epochs=30", "trainer.algorithm.value_clip"),
        (["critic.model.path=m"], "trainer.algorithm.value_clip=0.5", "trainer.algorithm.kl_cov"),
    ],
)
def test_options_become_overrides_and_replace_the_defaults_of_verl(
    options: list[str], expected: str, absent: str
) -> None:
    overrides = read_command(["main_ppo", *options])[1]
    assert expected in overrides
    assert not [text for text in overrides if text.startswith(absent)]


RECIPE = """main_ppo algorithm.adv_estimator=grpo data.train_files=a actor_rollout_ref.model.lora_rank=32
actor_rollout_ref.model.lora_alpha=32 trainer.save_freq=50 trainer.total_epochs=10 trainer.n_gpus_per_node=1"""


def test_the_last_of_several_options_wins_in_any_spelling(pytestconfig: pytest.Config) -> None:
    """Cases without a program are appended to a recipe's options. Some expect our defaults, not verl's."""
    printed = {}
    for case, settings in golden.read("compat/verl_last_wins").items():
        command = case if case.startswith("torchrun ") else f"{RECIPE} {case}"
        program, overrides = read_command([*command.split(), "data.train_files=a"])
        printed[case] = show_values(parse(overrides, program.schema), settings)
    golden.compare("compat/verl_last_wins", printed, pytestconfig)


@pytest.mark.parametrize("option", ["trainer.n_gpus_per_node=many", "~trainer.nnodes", "trainer.n_gpus_per_node=0"])
def test_a_number_of_gpus_that_is_none_is_left_to_its_own_error(option: str) -> None:
    assert not [text for text in read_command([*RECIPE.split(), option])[1] if "num_inference_engines" in text]


def test_a_key_that_cannot_be_deleted_is_named_without_the_rest_of_the_command_line() -> None:
    program, overrides = read_command([*RECIPE.split(), "~trainer.balance_batch"])
    with pytest.raises(ConfigError) as caught:
        parse(overrides, program.schema)
    assert str(caught.value).startswith("~trainer.balance_batch: there is no key trainer.balance_batch to delete; ")


def test_the_default_warm_up_of_verl_gives_way_to_a_number_of_steps() -> None:
    command = "fsdp_sft_trainer data.train_files=a trainer.policy.optimizer_config.num_warmup_steps=20"
    program, overrides = read_command(command.split())
    optimizer = parse(overrides, program.schema).trainer.policy.optimizer_config
    assert (optimizer.num_warmup_steps, optimizer.warmup_ratio) == (20, 0)


@pytest.mark.parametrize("program", PROGRAMS.values())
def test_the_tables_are_disjoint_and_name_keys(program: VerlProgram) -> None:
    schema: Schema = program.schema
    ours = schema.fields.keys() | schema.aliases.keys() | schema.without_effect.keys()
    for table in (program.fixed, program.refused, program.conditional, program.combined):
        assert not [key for key in ours for option in table if key == option or key.startswith(f"{option}.")]
    assert not program.fixed.keys() & program.refused.keys()
    derived = program.derive(
        {
            "trainer.critic.model.path": "m",
            "trainer.algorithm.policy_loss_type": "kl_cov",
            "trainer.algorithm.off_policy_correction.tis_ratio_type": "sequence",
            "trainer.placement.policy_num_gpus_per_node": 2,
        }
    )
    for key, value in {**program.defaults, **derived}.items():
        default = schema.fields[key].get_default()
        assert (list(default) if isinstance(default, tuple) else default) != value


def test_engines_fill_the_gpus_of_the_policy(caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config) -> None:
    printed = {}
    for command in golden.read("compat/verl_engines"):
        caplog.clear()
        _, overrides = read_command(command.split())
        settings = [text for text in overrides if text.startswith("generator.num_inference_engines=")]
        printed[command] = settings[-1:] or ["generator.num_inference_engines=1"]
        (line,) = (line for line in caplog.messages if line.startswith("verl's defaults:"))
        assert (printed[command][0] in line) == bool(settings and not settings[-1].endswith("=1"))
    golden.compare("compat/verl_engines", printed, pytestconfig)


def test_options_of_an_engine_are_read_if_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    section = "actor_rollout_ref.rollout.engine_kwargs"
    options = [f"{section}.vllm.block_size=32", f"+{section}.sglang.page_size=1", f"+{section}.vllm.swap_space=null"]
    _, overrides = read_command(["main_ppo", "actor_rollout_ref.rollout.name=vllm", *options])
    assert [text for text in overrides if "engine_init_kwargs" in text] == [
        "generator.engine_init_kwargs.block_size=32"
    ]
    assert f"{section}.vllm.block_size=32 is read as generator.engine_init_kwargs.block_size=32" in caplog.messages
    assert f"{section}.sglang.page_size=1 has no effect: the engine is vllm" in caplog.messages
    assert f"{section}.vllm.swap_space=null has no effect: the engine has its own default" in caplog.messages


def test_the_log_says_what_becomes_of_the_launcher(
    caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    printed = {}
    for command in golden.read("compat/verl_launchers"):
        caplog.clear()
        read_command(command.split())
        printed[command] = [line for line in caplog.messages if not line.startswith("verl's defaults:")]
    golden.compare("compat/verl_launchers", printed, pytestconfig)


def test_the_flags_of_torchrun_are_those_of_the_ranks() -> None:
    flags = "--node_rank=1 --master_addr=10.0.0.1 --master_port 1234"
    launcher = f"torchrun --nnodes 2 {flags} --nproc-per-node=4"
    command = f"{launcher} -m verl.trainer.fsdp_sft_trainer data.train_files=a".split()
    program, overrides = read_command(command)
    placement = parse(overrides, program.schema).trainer.placement
    assert (placement.launcher, placement.size("policy")) == ("torchrun", (2, 4))
    assert find_torchrun_flags(command) == flags.split()
