"""The task of `make bench-real`: which of two numbers is larger? SmolLM2-135M-Instruct often names the wrong one."""

import json
import random
import re
from pathlib import Path
from typing import Any

from skyrl_train.dataset.order import EPOCHS_PER_SEED, EpochOrder

N_STEPS = 15
N_PROMPTS, N_SAMPLES, N_NEW = 4, 8, 16
"""Prompts per step, samples per prompt, and maximum new tokens per sample."""

SFT_ROWS = 16
"""Rows per step of supervised fine-tuning."""
NUMBERS = range(10, 100)


def write_rows(folder: Path, seed: int, *, is_sft: bool, n_steps: int = N_STEPS) -> None:
    """Write the rows of a run to train.jsonl, and to ordered.jsonl in the order in which SkyRL draws them."""
    n_rows = n_steps * (SFT_ROWS if is_sft else N_PROMPTS)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a != b]
    rows: list[dict[str, Any]] = []
    for a, b in random.Random(seed).sample(pairs, n_rows):
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": f"Which number is larger, {a} or {b}?"}]}
        rows.append(row | ({"response": f"{max(a, b)} is larger."} if is_sft else {"answer": max(a, b)}))
    order = EpochOrder(n_rows, lambda epoch: seed * EPOCHS_PER_SEED + epoch)(0).tolist()
    for name, ordered in (("train", rows), ("ordered", [rows[index] for index in order])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))


def reward(text: str, answer: int) -> float:
    """Return 1 if the last number of a reply is the answer, else 0."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == str(answer))
