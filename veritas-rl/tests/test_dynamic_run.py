"""GRPO on tasks that are generated while it trains, with the tools of `train/tools/`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from wandb_logs import assert_logged

from skyrl_gym.envs.entry_point import load_from_file
from skyrl_gym.tasks import DynamicEnvDataset, task_family
from skyrl_train.entrypoints.main_base import main
from skyrl_train.models.tiny import tiny_qwen3, train_tokenizer

TRAIN = Path(__file__).parents[1] / "train"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of puzzles and of positions."""
    folder = tmp_path_factory.mktemp("model")
    families = [
        task_family("lgc-v2", {"task_types": ["operation"]}),
        task_family("openspiel", {"cases": ["tic_tac_toe"]}),
    ]
    tasks = [
        (family, family.generate(i if family.task_ids else family.block(i)[0]))
        for family in families
        for i in range(30)
    ]
    conversations = [
        [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": family.solve(task)}]
        for family, task in tasks
    ]
    tokenizer = train_tokenizer(conversations)
    tokenizer.save_pretrained(folder)
    tiny_qwen3(tokenizer, seed=0, head_dim=16).save_pretrained(folder)
    return folder


def run(model_path: Path, tmp_path: Path, *more: str) -> list[dict[str, float]]:
    """Train two steps as the recipes do, and return the metrics of all steps."""
    main(
        [
            "algorithm.adv_estimator=grpo",
            "data.custom_cls.path=tools/dataset-manager.py",
            "data.custom_cls.name=LGCV2DynamicDataset",
            "custom_reward_function.path=tools/reward-manager.py",
            "custom_reward_function.name=compute_lgc_v2_score",
            "data.train_files=[]",
            "data.val_files=[]",
            f"actor_rollout_ref.model.path={model_path}",
            f"trainer.output_dir={tmp_path}",
            "trainer.project_name=veritas",
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
    )
    return [json.loads(line) for line in (tmp_path / "veritas/run/metrics.jsonl").read_text().splitlines()]


def played_ids(tmp_path: Path) -> list[int]:
    files = sorted((tmp_path / "veritas/run/trajectories").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row["env_extras"]["extra_info"]["task_id"] for row in rows]


def test_two_steps_on_puzzles_and_a_resume(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TRAIN)
    puzzles = "+data.custom_cls.config.task_types=[operation]"
    metrics = run(model_path, tmp_path / "whole", puzzles)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all(row["generate/n_invalid"] == 0 for row in metrics[1:])
    assert "eval/operation/avg_score" in metrics[-1]
    train_ids = played_ids(tmp_path / "whole")
    assert len(set(train_ids)) == 8
    family = task_family("lgc-v2", {"task_types": ["operation"]})
    assert {family.split_of(task_id) for task_id in train_ids} == {"train"}
    run(model_path, tmp_path / "parts", puzzles, "trainer.max_training_steps=1", "trainer.ckpt_interval=1")
    run(model_path, tmp_path / "parts", puzzles)
    assert played_ids(tmp_path / "parts") == train_ids


def test_two_steps_on_positions_with_a_nested_option(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TRAIN)
    metrics = run(
        model_path,
        tmp_path,
        "data.custom_cls.path=tools/openspiel_adapter.py",
        "data.custom_cls.name=OpenSpielDataset",
        "+data.custom_cls.config.adapter_config.cases=[tic_tac_toe]",
        "+data.custom_cls.config.adapter_config.num_tasks_per_case=40",
        "+data.custom_cls.config.adapter_config.reward_mode=legal",
    )
    assert metrics[-1]["generate/n_invalid"] == 0
    assert set(played_ids(tmp_path)) <= set(range(40))


def test_a_reward_function_may_log_to_wandb(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TRAIN)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MY_SETTING", "of this machine")
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import wandb\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        '    wandb.log({"custom/reward_breakdown": 0.25})\n    return 0.25\n'
    )
    function = [f"custom_reward_function.path={reward}", "custom_reward_function.name=compute_score"]
    tracking = ["trainer.logger=[jsonl,wandb]", "trainer.wandb_environment=[MY_SETTING,MISSING]"]
    metrics = run(model_path, tmp_path, "+data.custom_cls.config.task_types=[operation]", *function, *tracking)
    assert metrics[-1]["generate/n_invalid"] == 0
    assert_logged(tmp_path, b"custom/reward_breakdown", b"environment_variables", b"of this machine")


def test_the_tools_have_the_names_of_the_recipes() -> None:
    tools = TRAIN / "tools"
    assert load_from_file(str(tools / "dataset-manager.py"), "LGCV2DynamicDataset") is DynamicEnvDataset
    score = load_from_file(str(tools / "reward-manager.py"), "compute_lgc_v2_score")
    assert score is load_from_file(str(tools / "reward-manager.py"), "compute_score")
    cases = load_from_file(str(tools / "openspiel_adapter.py"), "DEFAULT_CASES_BOARD_SIZES")
    assert len(cases) == 16
    assert DynamicEnvDataset(
        config={"custom_cls": {"config": {"env": "openspiel", "adapter_config": {"cases": cases}}}}
    )
