"""Runs of agents: trajectories with scripted replies, and the files of runs of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from scripted_engine import ScriptedEngine, tokenizer

from skyrl_agent import AgentConfig, AgentRunner, AutoAgentRunner
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.generators.base import BatchMetadata, play, rollout_requests
from skyrl_train.models.tiny import tiny_qwen3
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory

TOKENIZER = tokenizer()
GENERAL = "skyrl_agent.tasks.general_react.GeneralReactTask"
ROW = {
    "prompt": [{"role": "user", "content": "What is the capital of France?"}],
    "data_source": "nq",
    "reward_spec": {"ground_truth": {"target": ["Paris"]}},
}


def runner(
    replies: Any, task: str = GENERAL, tools: tuple[Any, ...] = ("code_interpreter", "finish"), **settings: Any
) -> tuple[AgentRunner, ScriptedEngine]:
    dispatcher = settings.pop("dispatcher", {})
    engine = ScriptedEngine(TOKENIZER, replies, settings.pop("context_length", 1_000_000))
    cfg = AgentConfig.model_validate({"task": task, "tools": tools, "generator": settings, "dispatcher": dispatcher})
    return AutoAgentRunner.from_task(cfg, engine, TOKENIZER), engine


async def play_one(replies: Any, row: dict[str, Any] = ROW, **options: Any) -> tuple[Trajectory, ScriptedEngine]:
    agents, engine = runner(replies, **options)
    extras = {key: value for key, value in row.items() if key != "prompt"}
    prompt = DrawnPrompt(0, PromptRow("0", row.get("prompt") or [], None, extras), 0)
    sampling = agents.cfg.generator.sampling(is_training=True)
    (trajectory,) = await play(agents, rollout_requests([prompt], 1, ""), sampling, BatchMetadata(0, "train"))
    await agents.close()
    return trajectory, engine


TASK = {
    "task": "skyrl_agent.tasks.general_react.GeneralReactTask",
    "tools": ["finish"],
    "generator": {
        "num_trajectories": 2,
        "max_iterations": 2,
        "max_prompt_length": 400,
        "sampling_params": {"temperature": 0.9, "max_tokens": 8, "stop": ["it's", "\\n", "\\'x\\"]},
        "val_config": {"num_trajectories": 3, "sampling_params": {"temperature": 0.5}},
        "masked_finish_reasons": [],
    },
}


def write_task(tmp_path: Path, **settings: Any) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump({**TASK, "generator": {**TASK["generator"], **settings}}))  # type: ignore[dict-item]
    return path


def write_run(tmp_path: Path, data_source: str = "nq") -> list[str]:
    """Write a model and prompts; return the overrides of a run of two steps."""
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    tokenizer().save_pretrained(model)
    tiny_qwen3(tokenizer(), seed=0, context_length=1500).save_pretrained(model)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {n}?"}],
            "data_source": data_source,
            "reward_spec": {"ground_truth": {"target": [str(n)]}},
        }
        for n in range(4)
    ]
    write_jsonl(data, rows)
    return [
        f"data.train_data={data}",
        f"data.val_data={data}",
        f"trainer.policy.model.path={model}",
        f"trainer.output_dir={tmp_path / 'outputs'}",
        "trainer.project_name=agents",
        "trainer.run_name=run",
        "trainer.logger=[jsonl]",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.max_training_steps=2",
        "trainer.eval_interval=2",
    ]
