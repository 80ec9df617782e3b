"""Command lines of verl, read as overrides."""

import pytest
from train_kit import golden

from skyrl_train.compat.verl.command import find_torchrun_flags, read_command
from skyrl_train.compat.verl.programs import MAIN_PPO, PROGRAMS, VerlProgram
from skyrl_train.config import changed_settings
from skyrl_train.config.base import value_at, with_value
from skyrl_train.config.cli import parse
from skyrl_train.config.loading import Schema, resolve
from skyrl_train.config.problems import show
from skyrl_train.errors import ConfigError

CORRECTION = "trainer.algorithm.off_policy_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
REJECTION = "algorithm.rollout_correction.rollout_rs"

GRPO = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet
data.val_files=test.parquet data.train_batch_size=32 data.max_response_length=256 data.filter_overlong_prompts=True
data.truncation=left actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.clip_ratio=0.3
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.rollout.n=8
+actor_rollout_ref.model.lora_rank=64 trainer.critic_warmup=0 trainer.resume_mode=disable trainer.save_freq=20
"""


def refuse(*options: str, program: str = "main_ppo") -> str:
    with pytest.raises(ConfigError) as caught:
        read_command([program, *options])
    return str(caught.value)


SFT = """
torchrun --standalone --nnodes=1 --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer
data.train_files=a.parquet data.micro_batch_size_per_gpu=8 data.max_length=2048 optim.lr=2e-6
model.partial_pretrain=org/model model.fsdp_config.model_dtype=bf16 optim.betas=[0.9,0.98]
"""
OPTIONS_OF_SFT = """
sft_trainer data.train_files=a data.shuffle=True data.seed=3 engine.model_dtype=bf16 optim.warmup_style=constant
optim.lr_warmup_steps=-1 trainer.checkpoint.save_contents=[model] model.fsdp_config.forward_prefetch=True
"""
OPTIONS = [
    "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
    f"{REJECTION}=token {REJECTION}_threshold=4.0",
    f"{REJECTION}_threshold_lower=0.999 {REJECTION}_threshold=1.002 {REJECTION}=geometric",
    f"{REJECTION}=seq_sum_k1 {REJECTION}_threshold='0.4_3.0'",
    f"{REJECTION}=null {REJECTION}_threshold=2.0",
    f"{OVERLONG}.enable=True {OVERLONG}.len=100 {OVERLONG}.penalty_factor=0.5 {OVERLONG}.log=False "
    "reward_model.reward_manager=dapo reward_model.reward_kwargs.max_resp_len=512",
    f"{OVERLONG}.enable=False {OVERLONG}.len=100",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16 actor_rollout_ref.ref.fsdp_config.model_dtype=bf16",
    "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=-1 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
    "data.image_key=images actor_rollout_ref.nccl_timeout=600 trainer.rollout_data_dir=null "
    "actor_rollout_ref.rollout.multi_turn.enable=False actor_rollout_ref.rollout.multi_turn.format=hermes "
    "actor_rollout_ref.model.override_config={} ray_kwargs.ray_init.num_cpus=8",
    "data.seed=null",
]


def describe(command: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is logged while a command is read, and how its configuration differs from our defaults."""
    caplog.clear()
    program, overrides = read_command(command.split())
    cfg = parse([*overrides, "trainer.run_name=r"], program.schema)
    defaults = resolve(with_value(program.schema.root(), "trainer.run_name", "r"), program.schema)
    changes = changed_settings(defaults.model_dump(mode="json"), cfg.model_dump(mode="json"))
    return [*(f"log: {message}" for message in caplog.messages), *(f"set: {change}" for change in changes)]


def test_commands_and_options_are_read(caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config) -> None:
    plain = "main_ppo algorithm.adv_estimator=grpo"
    printed = {" ".join(command.split()): describe(command, caplog) for command in (plain, GRPO, SFT, OPTIONS_OF_SFT)}
    for options in OPTIONS:  # lists only what the options change
        printed[options] = [line for line in describe(f"{plain} {options}", caplog) if line not in printed[plain]]
    golden.compare("compat/verl_commands", printed, pytestconfig)


REFUSED = f"""
reward_model.enable=True data.shuffle=False trainer.critic_warmup=10 trainer.rollout_data_dir=x
actor_rollout_ref.rollout.nn=3 actor_rollout_ref.actor.quantum=3 hydra.sweep.dir=x trainer.balance_batch=[
{REJECTION}=seq_max_k2 {REJECTION}=token algorithm.rollout_correction.bypass_mode=True
custom_reward_function.reward_kwargs.k=1 actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent actor_rollout_ref.rollout.temprature=1
data.shufle=True data.colour=1 data.image_key=pictures data.video_key=clips actor_rollout_ref.rollout.zeal=0
"""


def test_an_option_without_a_counterpart_is_refused_with_a_fix(pytestconfig: pytest.Config) -> None:
    printed = {option: [refuse(option)] for option in REFUSED.split()}
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


LAST_WINS = """
trainer.epochs=1 → trainer.epochs=1
trainer.policy.model.lora.alpha=16 → trainer.policy.model.lora.alpha=16
trainer.ckpt_interval=10 → trainer.ckpt_interval=10
trainer.ckpt_interval=20 → trainer.ckpt_interval=20
trainer.save_freq=20 → trainer.ckpt_interval=20
trainer={epochs:3} → trainer.epochs=3
trainer.placement.policy_num_gpus_per_node=2 → trainer.placement.policy_num_gpus_per_node=2
trainer.algorithm={use_kl_loss:true} → trainer.algorithm.use_kl_loss=true
~trainer.epochs → trainer.epochs=1
~trainer.eval_interval → trainer.eval_interval=5
~trainer.algorithm.use_kl_loss → trainer.algorithm.use_kl_loss=true
~trainer.save_freq → trainer.ckpt_interval=10
"""  # some are our defaults, which differ from those of verl and of the recipe
LAST_WINS_IN_SFT = """
-m verl.trainer.sft_trainer model.partial_pretrain=a model.path=b → trainer.policy.model.path=b
-m verl.trainer.sft_trainer model.path=b model.partial_pretrain=a → trainer.policy.model.path=a
--nproc_per_node=2 -m verl.trainer.sft_trainer trainer.n_gpus_per_node=4 → trainer.placement.policy_num_gpus_per_node=4
--nproc_per_node=2 --nproc_per_node=3 -m verl.trainer.sft_trainer → trainer.placement.policy_num_gpus_per_node=3
"""


def test_the_last_of_several_options_wins_in_any_spelling() -> None:
    commands = [f"{RECIPE} {case}" for case in LAST_WINS.strip().splitlines()]
    commands += [f"torchrun {case}" for case in LAST_WINS_IN_SFT.strip().splitlines()]
    for case in commands:
        command, _, expected = case.partition(" → ")
        key = expected.partition("=")[0]
        program, overrides = read_command([*command.split(), "data.train_files=a"])
        assert f"{key}={show(value_at(parse(overrides, program.schema), key))}" == expected, case


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


@pytest.mark.parametrize(
    ("options", "n_engines"),
    [
        ("", 1),
        ("trainer.n_gpus_per_node=4", 4),
        ("trainer.n_gpus_per_node=4 trainer.n_gpus_per_node=2", 2),
        ("trainer.nnodes=2 trainer.n_gpus_per_node=4", 8),
        (
            "trainer.nnodes=2 trainer.n_gpus_per_node=5 actor_rollout_ref.rollout.name=vllm "
            "generator.run_engines_locally=true actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            4,
        ),
        ("trainer.placement.policy_num_gpus_per_node=4 generator.num_inference_engines=1", 1),
        ("trainer={placement:{policy_num_gpus_per_node:3}}", 3),
        ("trainer.n_gpus_per_node=4 ~trainer.n_gpus_per_node", 1),
        ("trainer.n_gpus_per_node=4 trainer.placement.colocate_all=false", 1),
    ],
)
def test_engines_fill_the_gpus_of_the_policy(options: str, n_engines: int, caplog: pytest.LogCaptureFixture) -> None:
    _, overrides = read_command(["main_ppo", *options.split()])
    numbers = [text.partition("=")[2] for text in overrides if text.startswith("generator.num_inference_engines=")]
    assert int(numbers[-1] if numbers else 1) == n_engines
    (line,) = (line for line in caplog.messages if line.startswith("verl's defaults:"))
    assert (f"generator.num_inference_engines={n_engines}" in line) == (n_engines > 1)


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


LAUNCHER = "torchrun --nnodes 2 --node_rank=1 --master_addr=10.0.0.1 --master_port 1234 --nproc-per-node=4 -m"
LAUNCHERS = [
    f"{LAUNCHER} verl.trainer.fsdp_sft_trainer",
    f"{LAUNCHER} verl.trainer.main_ppo",
    "ray job submit --working-dir . -- python3 -m verl.trainer.main_ppo",
    f"env NCCL_DEBUG=INFO {LAUNCHER} verl.trainer.fsdp_sft_trainer",
    "env/bin/python3.11 -m verl.trainer.main_ppo",
    "main_ppo",
]


def test_the_log_says_what_becomes_of_the_launcher(
    caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    printed = {}
    for command in LAUNCHERS:
        caplog.clear()
        read_command(command.split())
        printed[command] = [line for line in caplog.messages if not line.startswith("verl's defaults:")]
    golden.compare("compat/verl_launchers", printed, pytestconfig)


def test_the_flags_of_torchrun_are_those_of_the_ranks() -> None:
    command = f"{LAUNCHER} verl.trainer.fsdp_sft_trainer data.train_files=a".split()
    program, overrides = read_command(command)
    placement = parse(overrides, program.schema).trainer.placement
    assert (placement.launcher, placement.size("policy")) == ("torchrun", (2, 4))
    assert find_torchrun_flags(command) == ["--node_rank=1", "--master_addr=10.0.0.1", "--master_port", "1234"]
