"""`make bench-sequence`: memory and processor time of a training step on two ranks, with and without sequence
parallelism.

Both variants train on two long rows. Without sequence parallelism, each rank gets one row. With it, the ranks process
one row after the other, half of its tokens each. The script writes `sequence_parallel.md` next to this file.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
from harness import conditions
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.algorithms.objectives import CrossEntropyObjective
from skyrl_train.config import OptimizerConfig
from skyrl_train.launch.process import ProcessRank, start_ranks
from skyrl_train.models.loading import load_model
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import ModelSpec, OptimizerSpec
from skyrl_train.workers.group import WorkerGroup

HERE = Path(__file__).parent
VOCABULARY = 4096
LENGTHS = (2048, 4096, 8192)
SIZES = (1, 2)


def write_model(folder: str) -> None:
    """Write a random model of four layers."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=max(LENGTHS),
        )
    ).save_pretrained(folder)


def save_nothing(folder: str) -> None:
    """Do nothing: there is no tokenizer to save."""


def make_spec(path: str, size: int) -> ModelSpec:
    return ModelSpec(
        role="policy",
        load=partial(load_model, path, dtype=torch.float32, device=torch.device("cpu")),
        save_tokenizer=save_nothing,
        optimizer=OptimizerSpec(OptimizerConfig(lr=1e-5, weight_decay=0.0), n_steps=100),
        sequence_parallel_size=size,
        max_rows_train=1,
    )


def make_batch(length: int) -> TrainingBatch:
    """Return two random rows, trained from their second token on."""
    tokens = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
    return TrainingBatch(
        sequences=tokens,
        attention_mask=torch.ones_like(tokens),
        loss_mask=torch.ones(2, length - 1),
        draws=torch.arange(2),
    )


def memory(rank: ProcessRank, counter: str) -> int:
    """Return a counter of a rank's resident memory: VmRSS (current) or VmHWM (peak)."""
    lines = Path(f"/proc/{rank._process.pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{counter}:"))
    return int(line.split()[1]) * 1024


def processor_seconds(ranks: Sequence[ProcessRank]) -> float:
    """Return the processor seconds of all ranks so far. Other processes disturb them less than wall-clock seconds."""
    times = [psutil.Process(rank._process.pid).cpu_times() for rank in ranks]
    return sum(t.user + t.system for t in times)


async def measure(path: str, size: int, length: int, n_steps: int) -> tuple[int, float, float]:
    """Return the memory that a step adds on a rank, the processor seconds of all ranks, and the loss."""
    ranks = start_ranks(2)
    try:
        group = WorkerGroup(make_spec(path, size), ranks, CrossEntropyObjective())
        await group.load()
        await group.update(make_batch(32))  # imports, and the optimizer's state
        before = [memory(rank, "VmRSS") for rank in ranks]
        seconds = []
        for _ in range(n_steps):
            started = processor_seconds(ranks)
            loss = (await group.update(make_batch(length))).numbers()["loss"]
            seconds.append(processor_seconds(ranks) - started)
        peak = max(memory(rank, "VmHWM") - n for rank, n in zip(ranks, before, strict=True))
        return peak, statistics.median(seconds), loss
    finally:
        for rank in ranks:
            await rank.close()


def main() -> int:
    """Measure every length and size, and write the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=3)
    options = arguments.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"  # freed memory is returned immediately
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for length in LENGTHS:
            results = [asyncio.run(measure(folder, size, length, options.steps)) for size in SIZES]
            (whole, whole_seconds, whole_loss), (half, half_seconds, half_loss) = results
            assert abs(whole_loss - half_loss) < 1e-4, (whole_loss, half_loss)
            lines.append(
                f"| {length:,} | {whole / 1e6:.0f} MB | {half / 1e6:.0f} MB | {half / whole:.2f} | "
                f"{whole_seconds:.2f} s | {half_seconds:.2f} s | {half_seconds / whole_seconds:.2f} |"
            )
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    (HERE / "sequence_parallel.md").write_text(
        f"""# Sequence parallelism

`make bench-sequence`, {options.steps} steps each, {conditions()}.

A step of fine-tuning on two rows with two ranks on CPUs, gloo between them, float32, four layers of width 256 with
eight heads. Memory is the largest growth of a rank's resident memory during the step. Time is the processor time of
both ranks. With size 1, each rank computes one row. With size 2, both compute half of the tokens of each row, one row
after the other.

| tokens of a row | memory, size 1 | memory, size 2 | ratio | step, size 1 | step, size 2 | ratio |
|---|---|---|---|---|---|---|
{table}
""",
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
