"""Task files, and runs of a trainer with a tiny model."""

from pathlib import Path
from typing import Any

import yaml
from train_kit.datasets import prompt_row

from agent_kit.engines import TOKENIZER
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.entrypoints.tiny import tiny_qwen3

GENERATOR: dict[str, Any] = {
    "num_trajectories": 2,
    "max_iterations": 2,
    "max_prompt_length": 400,
    "sampling_params": {"temperature": 0.9, "max_tokens": 8, "stop": ["it's", "\\n", "\\'x\\"]},
    "val_config": {"num_trajectories": 3, "sampling_params": {"temperature": 0.5}},
    "masked_finish_reasons": [],
}


def write_task(folder: Path, **generator: Any) -> Path:
    task = {"task": "skyrl_agent.tasks.general_react.GeneralReactTask", "tools": ["finish"]}
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump({**task, "generator": GENERATOR | generator}))
    return path


def write_run(folder: Path, data_source: str = "nq") -> list[str]:
    """Write a model and four prompts; return the overrides of a run of two steps, `agents/run`."""
    model, data = folder / "model", folder / "train.jsonl"
    TOKENIZER.save_pretrained(model)
    tiny_qwen3(TOKENIZER, seed=0, context_length=1500).save_pretrained(model)
    rows = [
        prompt_row(f"What is {n}?", data_source=data_source, reward_spec={"ground_truth": {"target": [str(n)]}})
        for n in range(4)
    ]
    write_jsonl(data, rows)
    return [
        f"data.train_data={data}",
        f"data.val_data={data}",
        f"trainer.policy.model.path={model}",
        f"trainer.output_dir={folder / 'outputs'}",
        "trainer.project_name=agents",
        "trainer.run_name=run",
        "trainer.logger=[jsonl]",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.max_training_steps=2",
        "trainer.eval_interval=2",
    ]
