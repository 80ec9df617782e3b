"""Every environment of skyrl-gym, played by an untrained model in the real agent loop."""

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_kit.servers import MCP_SERVER, run_model_server
from train_kit.datasets import prompt_row
from train_kit.runs import read_lines, small_run, train
from transformers import PreTrainedTokenizerBase

from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.entrypoints.tiny import tiny_qwen3

TESTED_ELSEWHERE = {"browser", "openenv", "verifiers"}
"""Environments covered by their own tests: they need a browser, a server and a package."""


class Parrot:
    """An environment for TRL's `environment_factory`."""

    reward = 0.0

    def reset(self, **row: Any) -> str:
        return "Say something."

    def say(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: the text to repeat
        """
        self.reward = 1.0
        return text


def score_length(solution_str: str, **_: Any) -> float:
    """Return a reward in [0, 1] that grows with the reply."""
    return min(len(solution_str) / 100, 1.0)


ROWS: dict[str, dict[str, Any]] = {
    "aime": {"reward_model": {"ground_truth": "42"}},
    "answer": {"reward_spec": {"method": "math", "ground_truth": "42"}},
    "gsm8k": {"reward_spec": {"ground_truth": "42"}},
    "gsm8k_multi_turn": {"reward_spec": {"ground_truth": "42"}},
    "gymnasium": {},
    "ifeval": {
        "reward_spec": {
            "ground_truth": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
        }
    },
    "judge": {"reward_spec": {"ground_truth": "42"}},
    "lcb": {"reward_spec": {"ground_truth": json.dumps([{"input": "", "output": "1", "testtype": "stdin"}])}},
    "mcp": {"reward_spec": {"ground_truth": "milk"}},
    "multiply": {"reward_spec": {"ground_truth": "42"}},
    "reply": {},
    "reward_function": {"reward_spec": {"ground_truth": "42"}},
    "search": {"reward_spec": {"ground_truth": {"target": ["Fuji"]}}},
    "searchcode": {"reward_spec": {"ground_truth": "42"}},
    "text2sql": {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "SELECT 1"}},
    "textarena": {},
    "trl": {},
}
"""Columns of a row for each environment, except those of OpenSpiel."""


@pytest.fixture
def judge_file(tmp_path: Path) -> Iterator[Path]:
    """A file with one judge, who accepts every reply."""
    with run_model_server() as server:
        server.answer = lambda messages: "correct: yes"
        (tmp_path / "judge.yaml").write_text(json.dumps({"judges": [{"model": "judge", "base_url": server.url}]}))
        yield tmp_path / "judge.yaml"


@pytest.fixture
def overrides(tiny_tokenizer: PreTrainedTokenizerBase, judge_file: Path, tmp_path: Path) -> list[str]:
    """Overrides for an evaluation of a randomly initialized model on all environments."""
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    tiny_tokenizer.save_pretrained(model)
    tiny_qwen3(tiny_tokenizer, seed=0, context_length=8192).save_pretrained(model)
    database = tmp_path / "spider/database/shop/shop.sqlite"
    database.parent.mkdir(parents=True)
    sqlite3.connect(database).close()
    games = OpenSpielTasks(TaskConfig.from_options({"cases": ["tic_tac_toe"], "num_tasks_per_case": 1}))
    rows = [prompt_row("Begin.", name, **columns) for name, columns in ROWS.items()]
    rows += [*games.rows([0]), *games.game_rows([0])]
    write_jsonl(data, [row | {"data_source": row["env_class"]} for row in rows])
    settings = [
        "trainer.max_prompt_length=4096",
        "generator.max_turns=3",
        "generator.max_input_length=8000",
        "generator.eval_n_samples_per_prompt=2",
        "generator.eval_sampling_params.max_generate_length=12",
        "generator.eval_sampling_params.temperature=1",
        f"environment.skyrl_gym.reward_function.path='{__file__}'",
        "environment.skyrl_gym.reward_function.name=score_length",
        f"environment.skyrl_gym.text2sql.db_path='{tmp_path}'",
        f"environment.skyrl_gym.judge.path='{judge_file}'",
        "environment.skyrl_gym.gymnasium.id=FrozenLake-v1",
        "environment.skyrl_gym.textarena.env_id=TicTacToe-v0",
        "environment.skyrl_gym.textarena.num_players=2",
        f"environment.skyrl_gym.trl.factory={__name__}:Parrot",
        f"environment.skyrl_gym.mcp.servers.notes.command='{sys.executable}'",
        f"environment.skyrl_gym.mcp.servers.notes.args=['{MCP_SERVER}']",
    ]
    return small_run(tmp_path, *settings, model=model, data=data, val_data=data)


def test_an_untrained_model_plays_every_environment(overrides: list[str]) -> None:
    folder = train(*overrides, command="generate").folder / "evals/eval_only"
    (metrics,) = read_lines(folder / "aggregated_results.jsonl")
    played = {file.stem for file in folder.iterdir()} - {"aggregated_results"}
    assert played == set(BUILT_IN) - TESTED_ELSEWHERE
    failed = {name: row["error"] for name in played for row in read_lines(folder / f"{name}.jsonl") if row["error"]}
    assert failed == {}
    assert metrics["eval/generate/n_invalid"] == 0
    assert metrics["eval/judge/avg_score"] == 1
    assert all(-1 <= metrics[f"eval/{name}/avg_score"] <= 1 for name in played)
