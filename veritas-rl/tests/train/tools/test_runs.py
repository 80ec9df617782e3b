"""GRPO on tasks that are generated while it trains, with the tools of the recipes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from train_kit.runs import Run, run_of
from veritas_kit.logs import assert_logged
from veritas_kit.recipes import VERITAS

from skyrl_gym.envs.entry_point import load_from_file
from skyrl_gym.tasks import DynamicEnvDataset, task_family
from skyrl_train.entrypoints.main_base import main
from skyrl_train.entrypoints.tiny import tiny_qwen3, train_tokenizer

TOOLS = VERITAS / "train/tools"
PUZZLES = "+data.custom_cls.config.task_types=[operation]"
Train = Callable[..., Run]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of puzzles and of positions."""
    folder = tmp_path_factory.mktemp("model")
    puzzles = task_family("lgc-v2", {"task_types": ["operation"]})
    positions = task_family("openspiel", {"cases": ["tic_tac_toe"]})
    tasks = [(puzzles, puzzles.generate(puzzles.block(i)[0])) for i in range(30)]
    tasks += [(positions, positions.generate(i)) for i in range(30)]
    tokenizer = train_tokenizer(
        [
            [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": family.solve(task)}]
            for family, task in tasks
        ]
    )
    tokenizer.save_pretrained(folder)
    tiny_qwen3(tokenizer, seed=0, head_dim=16).save_pretrained(folder)
    return folder


@pytest.fixture
def train(model: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A function that trains two steps in a folder, as the recipes do."""
    monkeypatch.chdir(TOOLS.parent)  # paths of tools are relative to it

    def run(folder: Path, *more: str) -> Run:
        overrides = [
            "algorithm.adv_estimator=grpo",
            "data.custom_cls.path=tools/dataset-manager.py",
            "data.custom_cls.name=LGCV2DynamicDataset",
            "custom_reward_function.path=tools/reward-manager.py",
            "custom_reward_function.name=compute_lgc_v2_score",
            "data.train_files=[]",
            "data.val_files=[]",
            f"actor_rollout_ref.model.path={model}",
            f"trainer.output_dir={folder}",
            "trainer.run_name=run",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.logger=jsonl",
            "trainer.max_training_steps=2",
            "trainer.max_prompt_length=1024",
            "trainer.eval_interval=2",
            "+data.custom_cls.config.num_val_tasks=4",
            "generator.n_samples_per_prompt=4",
            "generator.sampling_params.max_generate_length=8",
            "trainer.dump_trajectories=true",
            *more,
        ]
        main(overrides)
        return run_of(overrides)

    return run


def played_ids(run: Run, *steps: int) -> list[int]:
    return [row["env_extras"]["extra_info"]["task_id"] for step in steps for row in run.trajectories(step)]


def test_two_steps_on_puzzles_and_a_resume(train: Train, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", PUZZLES)
    assert whole.steps == [0, 1, 2]
    assert all(step["generate/n_invalid"] == 0 for step in whole.metrics[1:])
    assert "eval/operation/avg_score" in whole.metrics[-1]
    train_ids = played_ids(whole, 1, 2)
    assert len(set(train_ids)) == 8
    family = task_family("lgc-v2", {"task_types": ["operation"]})
    assert {family.split_of(task_id) for task_id in train_ids} == {"train"}
    train(tmp_path / "parts", PUZZLES, "trainer.max_training_steps=1", "trainer.ckpt_interval=1")
    assert played_ids(train(tmp_path / "parts", PUZZLES), 1, 2) == train_ids


def test_positions_with_a_nested_option_and_a_reward_function_that_logs_to_wandb(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MY_SETTING", "of this machine")
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import wandb\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        '    wandb.log({"custom/reward_breakdown": 0.25})\n    return 0.25\n'
    )
    run = train(
        tmp_path,
        "data.custom_cls.path=tools/openspiel_adapter.py",
        "data.custom_cls.name=OpenSpielDataset",
        "+data.custom_cls.config.adapter_config.cases=[tic_tac_toe]",
        "+data.custom_cls.config.adapter_config.num_tasks_per_case=40",
        "+data.custom_cls.config.adapter_config.reward_mode=legal",
        f"custom_reward_function.path={reward}",
        "custom_reward_function.name=compute_score",
        "trainer.logger=[jsonl,wandb]",
        "trainer.wandb_environment=[MY_SETTING,MISSING]",
        "trainer.max_training_steps=1",
    )
    assert run.metrics[-1]["generate/n_invalid"] == 0
    assert run.metrics[-1]["reward/avg_raw_reward"] == 0.25
    assert set(played_ids(run, 1)) <= set(range(40))
    assert_logged(tmp_path, b"custom/reward_breakdown", b"environment_variables", b"of this machine")


def test_the_tools_have_the_names_of_the_recipes() -> None:
    assert load_from_file(str(TOOLS / "dataset-manager.py"), "LGCV2DynamicDataset") is DynamicEnvDataset
    score = load_from_file(str(TOOLS / "reward-manager.py"), "compute_lgc_v2_score")
    assert score is load_from_file(str(TOOLS / "reward-manager.py"), "compute_score")
    cases = load_from_file(str(TOOLS / "openspiel_adapter.py"), "DEFAULT_CASES_BOARD_SIZES")
    assert len(cases) == 16
    assert DynamicEnvDataset(
        config={"custom_cls": {"config": {"env": "openspiel", "adapter_config": {"cases": cases}}}}
    )
