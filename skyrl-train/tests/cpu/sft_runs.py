"""Runs on a few rows of fixed data: their overrides, and what they log and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CHAT = {
    "messages": [
        {"role": "user", "content": "Play"},
        {"role": "assistant", "content": "123"},
        {"role": "user", "content": "Again, and longer"},
        {"role": "assistant", "content": "4567890"},
    ]
}
UNTIMED = ("timing/", "storage/", "trainer/tokens_per_second", "train/time(s)", "train/throughput", "system/")


def write_rows(folder: Path) -> None:
    """Write 11 training rows, some with two turns, and 3 validation rows."""
    rows = [{"prompt": f"{n} plus 1?", "response": f"It is {n + 1}" + " indeed" * (n % 4)} for n in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:10], CHAT]))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[10:], CHAT]))


def write_pairs(folder: Path) -> None:
    """Write 9 pairs of answers to train on and 3 to validate on."""
    rows = [
        {
            "prompt": f"{n} plus 1?",
            "chosen": f"It is {n + 1}" + " indeed" * (n % 4),
            "rejected": "I do not know" * (n % 3) or "No",
        }
        for n in range(12)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:9]))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[9:]))


def overrides(data: Path, model: Path, output_dir: Path, *others: str) -> list[str]:
    return [
        f"data.train_data='{data}/train.jsonl'",
        f"data.val_data='{data}/val.jsonl'",
        "data.max_length=200",
        f"trainer.policy.model.path='{model}'",
        f"trainer.output_dir='{output_dir}'",
        "trainer.run_name=test_run",
        "trainer.epochs=3",
        "trainer.train_batch_size=5",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.ckpt_interval=2",
        "trainer.eval_interval=2",
        "trainer.hf_save_interval=100",
        "trainer.logger=jsonl",
        *others,
    ]


def pair_overrides(data: Path, model: Path, output_dir: Path, *others: str) -> list[str]:
    """Return the overrides of a run of 4 steps on pairs."""
    return overrides(data, model, output_dir, "trainer.epochs=2", "trainer.train_batch_size=4", *others)


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Return the logged metrics without timings."""
    lines = (output_dir / "skyrl/test_run/metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(UNTIMED)} for line in lines]


def weights(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(output_dir / f"skyrl/test_run/export/global_step_{step}/policy/model.safetensors")
