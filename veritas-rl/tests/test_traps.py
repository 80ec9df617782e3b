"""Mistakes T1 to T15 of earlier recipes, which cannot happen here.

T9 is in `test_scripts.py`, T15 in `skyrl-train/tests/cpu/config/test_verl.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import peft
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from veritas_kit.recipes import VERITAS, Recipes

from data_processing import convert_to_parquet, generate_dataset
from skyrl_gym.envs.entry_point import load_from_file
from skyrl_gym.tasks import DynamicEnvDataset, compute_score, task_family, task_row
from skyrl_gym.tasks.dataset import OpenSpielDataset
from skyrl_train.config import load_config
from skyrl_train.config.cli import parse
from skyrl_train.config.sft import SFTDataConfig
from skyrl_train.config.verl import read_command
from skyrl_train.dataset.custom import CustomDataset
from skyrl_train.dataset.supervised import ConversationEncoder, SupervisedDataset
from skyrl_train.entrypoints.cli import main as skyrl

TOOLS = VERITAS / "train/tools"
MODEL = "train/models/org/other"


def openspiel(split: str = "train", **options: object) -> OpenSpielDataset:
    return OpenSpielDataset(config={"custom_cls": {"config": {"adapter_config": options}}}, split=split)  # type: ignore[arg-type]


def prompt(dataset: DynamicEnvDataset, index: int = 0) -> str:
    return str(dataset[index]["prompt"][0]["content"])


def score(reply: str, dataset: DynamicEnvDataset, index: int = 0) -> float:
    row = dataset[index]
    return compute_score(row["data_source"], reply, "", row["extra_info"])


def test_t01_the_board_size_of_go_has_both_names() -> None:
    assert prompt(openspiel(cases=["go(go_board_size=9)"])) == prompt(openspiel(cases=["go(board_size=9)"]))
    cases = load_from_file(str(TOOLS / "openspiel_adapter.py"), "DEFAULT_CASES_BOARD_SIZES")
    assert len(cases) == 16
    assert len(openspiel(cases=cases, num_tasks_per_case=20)) > 100


def test_t02_latent_tic_tac_toe_is_a_known_game() -> None:
    assert prompt(openspiel(cases=["latent_tic_tac_toe"])) == prompt(openspiel(cases=["latent_ttt"]))


def test_t03_legal_moves_are_readable() -> None:
    text = prompt(openspiel(cases=["hex(board_size=5)"]))
    assert re.search(r"\b[a-e][1-5]\b", text)
    assert "Action(id" not in text


@pytest.mark.parametrize("case", ["leduc_poker", "liars_dice", "backgammon"])
def test_t04_no_task_is_a_chance_event(case: str) -> None:
    family = task_family("openspiel", {"cases": [case], "max_random_steps": 0})
    row = task_row(family, family.generate(0), "train")
    assert "random event" not in row["prompt"][0]["content"]
    assert family.score(family.solve(family.generate(0)), family.generate(0)) > 0


def test_t05_tasks_of_a_case_differ() -> None:
    dataset = openspiel(cases=["hex(board_size=5)"])
    assert len({prompt(dataset, index) for index in range(len(dataset))}) > 90


@pytest.mark.parametrize("reply", ["", "a", "I would play here", "<think>a1", "z9", "99999"])
def test_t06_only_a_legal_move_is_legal(reply: str) -> None:
    dataset = openspiel(cases=["hex(board_size=5)"], reward_mode="legal")
    family = task_family("openspiel", {"cases": ["hex(board_size=5)"], "reward_mode": "legal"})
    assert score(family.solve(family.generate(dataset.task_id(0))), dataset) == 1
    assert score(reply, dataset) == 0


@pytest.mark.parametrize("case", ["leduc_poker", "gin_rummy", "hearts", "cribbage", "hex(board_size=5)"])
def test_t07_outcomes_are_between_0_and_1(case: str) -> None:
    family = task_family("openspiel", {"cases": [case], "n_playouts": 1})
    for task_id in range(3):
        task = family.generate(task_id)
        assert 0 <= family.score(family.solve(task), task) <= 1


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
        openspiel(num_task_per_case=7)


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


def test_t11_the_format_of_parquet_is_read(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    flags = ["--env", "lgc-v2", "--task-types", "operation", "--num-samples", "10", "--output", str(tasks)]
    assert generate_dataset.main(flags) == 0
    columns = {}
    for kind in ("sft", "rl"):
        assert (
            convert_to_parquet.main(["--input", str(tasks), "--out-dir", str(tmp_path / kind), "--format", kind]) == 0
        )
        columns[kind] = set(pq.read_schema(tmp_path / kind / "train.parquet").names)
    assert "response" in columns["sft"] - columns["rl"]
    assert "reward_model" in columns["rl"] - columns["sft"]


def test_t12_the_response_and_its_eos_token_are_trained(recipes: Recipes, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(recipes.root / MODEL)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "6 * 7?", "response": "42"}))
    encoder = ConversationEncoder(tokenizer, {}, [tokenizer.eos_token_id])
    ((segment,),) = SupervisedDataset([str(rows)], encoder, SFTDataConfig(train_data=[str(rows)]))[0]
    trained = [token for token, mask in zip(segment.response_ids, segment.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == f"42{tokenizer.eos_token}"


@pytest.mark.parametrize("env", ["lgc-v2", "openspiel"])
def test_t13_validation_tasks_are_few_and_not_trained(env: str) -> None:
    adapter_config = {"task_types": ["operation"]} if env == "lgc-v2" else {"cases": ["hex(board_size=5)"]}
    config = {"custom_cls": {"config": {"env": env, "adapter_config": adapter_config}}}
    train, validation = DynamicEnvDataset(config=config), DynamicEnvDataset(config=config, split="validation")
    assert 0 < len(validation) <= 256
    trained = {prompt(train, index) for index in range(min(len(train), 300))}
    assert not trained & {prompt(validation, index) for index in range(len(validation))}


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
    before, row = map(json.loads, (tmp_path / "p/run/metrics.jsonl").read_text().splitlines())
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
