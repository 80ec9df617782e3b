"""Mistakes T1 to T15 of earlier recipes, which cannot happen here.

| mistake | where it is tested |
| --- | --- |
| T1: one name of Go's board size, T2: of latent tic-tac-toe | `skyrl-gym/tests/envs/openspiel/test_cases.py` |
| T3: moves without text | `…/test_moves.py` |
| T4: tasks that are chance events, T5: equal tasks | `…/test_tasks.py` |
| T6: illegal replies with a reward | `…/test_env.py` |
| T7: rewards outside of 0 to 1 | `…/test_rewards.py` |
| T9: learning rate without LoRA | `train/scripts/test_trainers.py` |
| T11: columns of parquet files | `data_processing/test_convert_to_parquet.py` |
| T12: responses without an EOS token | `skyrl-train/tests/cpu/dataset/test_supervised.py` |
| T13: trained validation tasks | `skyrl-gym/tests/tasks/test_families.py` |
| T15: verl's names of options | `skyrl-train/tests/cpu/compat/verl/test_command.py` |

T8, T10 and T14 are here.
"""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from train_kit.runs import Run
from transformers import AutoModelForCausalLM
from veritas_kit.recipes import VERITAS, Recipes

from skyrl_gym.tasks.dataset import OpenSpielDataset
from skyrl_train.compat.cli import main as skyrl
from skyrl_train.compat.verl.command import read_command
from skyrl_train.config import load_config
from skyrl_train.config.cli import parse
from skyrl_train.dataset.prompts import CustomDataset

TOOLS = VERITAS / "train/tools"
MODEL = "train/models/org/other"


def test_t08_overrides_reach_the_adapter() -> None:
    options = [f"data.custom_cls.path={TOOLS}/openspiel_adapter.py", "data.custom_cls.name=OpenSpielDataset"]
    options += ["+data.custom_cls.config.adapter_config.num_tasks_per_case=7"]
    options += ["+data.custom_cls.config.adapter_config.cases=['hex(board_size=5)','othello']"]
    options += [f"custom_reward_function.path={TOOLS}/reward-manager.py", "algorithm.adv_estimator=grpo"]
    program, overrides = read_command(["main_ppo", *options])
    cfg = parse(overrides, program.schema)
    train, validation = (CustomDataset(cfg, None, split) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert 0 < len(train) <= 14
    assert {row.data_source for row in train} <= {"openspiel_hex", "openspiel_othello"}
    assert len(train) + len(validation) <= 14
    with pytest.raises(ValueError, match="no option 'num_task_per_case'"):
        OpenSpielDataset(config={"custom_cls": {"config": {"adapter_config": {"num_task_per_case": 7}}}})


def test_t10_a_merge_changes_weights(recipes: Recipes, tmp_path: Path) -> None:
    """The adapter of alpha 0, which earlier tools wrote, is refused."""
    model = AutoModelForCausalLM.from_pretrained(recipes.root / MODEL)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "merged/lora_adapter")

    def merge(target: str) -> int:
        tool = ["python", "train/tools/merge_adapter_into_base.py", "--base_model", MODEL]
        files = ["--adapter_model", str(tmp_path / "merged"), "--output_dir", str(tmp_path / target)]
        return recipes.shell([*tool, *files]).returncode

    assert merge("full") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (recipes.root / MODEL, tmp_path / "full"))
    assert sum(not torch.equal(before[name], after[name]) for name in before) == 2
    adapter = tmp_path / "merged/lora_adapter/adapter_config.json"
    adapter.write_text(json.dumps({**json.loads(adapter.read_text()), "lora_alpha": 0}))
    assert merge("nothing") == 1
    assert not (tmp_path / "nothing").exists()


VERL_METRICS = {
    "actor": "pg_loss kl_loss kl_coef entropy pg_clipfrac pg_clipfrac_lower grad_norm lr",
    "critic": "score/mean score/max score/min rewards/mean advantages/mean",
    "response_length": "mean max min clip_ratio",
    "prompt_length": "mean max min",
    "rollout_corr": "k3_kl",
    "timing_s": "step gen adv update_actor update_weights testing",
    "timing_per_token_ms": "gen adv update_actor",
    "perf": "total_num_tokens time_per_step throughput cpu_memory_used_gb",
    "training": "global_step",
    "val-core": "operation/reward/mean@1",
    "train": "policy_loss kl_loss reward advantage entropy learning_rate global_step",
    "rollout": "throughput",
    "system": "memory_usage",
}


def test_t14_metrics_have_the_names_of_verl_and_of_the_recipes(recipes: Recipes, tmp_path: Path) -> None:
    options = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={recipes.root / MODEL}"]
    options += [f"data.custom_cls.path={TOOLS}/dataset-manager.py", "data.custom_cls.name=LGCV2DynamicDataset"]
    options += ["+data.custom_cls.config.task_types=[operation]", "+data.custom_cls.config.num_val_tasks=2"]
    options += [f"custom_reward_function.path={TOOLS}/reward-manager.py", "trainer.logger=jsonl", "trainer.seed=1"]
    options += ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.save_freq=-1"]
    options += ["actor_rollout_ref.rollout.n=2", "data.max_response_length=4", "data.max_prompt_length=2000"]
    options += ["trainer.total_training_steps=1", "trainer.experiment_name=run", "trainer.project_name=p"]
    options += ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.test_freq=1", f"trainer.output_dir={tmp_path}"]
    assert skyrl(["verl", "main_ppo", *options]) == 0
    before, row = Run(tmp_path / "p/run").metrics
    names = {f"{group}/{name}" for group, text in VERL_METRICS.items() for name in text.split()}
    assert names - row.keys() == set()
    assert before["val-core/operation/reward/mean@1"] == before["eval/operation/avg_score"]
    assert row["actor/pg_loss"] == row["train/policy_loss"] == row["policy/policy_loss"]
    assert row["response_length/mean"] == row["generate/avg_num_tokens"] <= row["response_length/max"] == 4
    assert row["critic/score/mean"] == row["reward/avg_raw_reward"]
    assert row["response_length/clip_ratio"] > 0
    assert row["perf/total_num_tokens"] == pytest.approx(row["perf/throughput"] * row["perf/time_per_step"])
    assert row["perf/total_num_tokens"] == 4 * (row["response_length/mean"] + row["prompt_length/mean"])
    assert not load_config().trainer.log_verl_metrics
