"""`make bench-scaling`: cost per token as one property of a workload grows, memory over many steps, and start-up.

Each curve changes one value of the base workload and measures the update and generation in processor seconds of one
thread. Other processes disturb them less than wall-clock seconds. The script writes `curves.md` next to this file.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet
import torch
from harness import conditions
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_report.page import report_run
from skyrl_report.run_folder import RunFolder
from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.entrypoints.tiny import write_tiny_model
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.models.fused import fuse_operations
from skyrl_train.models.memory import default_max_tokens
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.tracking import Tracking, log_to_file
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.split import split

HERE = Path(__file__).parent
N_STEPS = 1000


@dataclass(frozen=True)
class Workload:
    """`n_groups` prompts with `group_size` conversations each."""

    n_groups: int = 8
    group_size: int = 8
    n_prompt: int = 64
    n_turns: int = 1
    n_new: int = 32
    n_observed: int = 32
    vocab_size: int = 1024

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens."""
        return self.n_groups * self.group_size * self.n_turns * self.n_new


CURVES = {
    "group_size": [1, 2, 4, 8, 16, 32],
    "n_groups": [2, 4, 8, 16, 32],
    "n_new": [16, 32, 64, 128, 256],
    "n_prompt": [16, 64, 256, 1024],
    "n_turns": [1, 2, 4, 8, 16],
    "vocab_size": [1024, 8192, 32_768, 151_936],
}

STARTS = [(n_rows, suffix) for n_rows in (1000, 100_000, 1_000_000) for suffix in (".jsonl", ".parquet")]
"""(number of rows, file format) of the training data for runs of one step."""


class NoTokenizer:
    """A tokenizer for runs that decode nothing."""

    eos_token_id = None


def make_model(vocab_size: int) -> Qwen3ForCausalLM:
    """Return a random model of four layers, as a run would load it."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            eos_token_id=None,
            bos_token_id=None,
            attn_implementation="sdpa",
        )
    ).eval()
    fuse_operations(model)
    return model


def make_batch(workload: Workload) -> TrainingBatch:
    """Return a batch of random rows. Their sampled tokens are trained."""
    rng = torch.Generator().manual_seed(0)
    w = workload
    length = w.n_turns * w.n_new + (w.n_turns - 1) * w.n_observed
    prompts = torch.randint(10, 500, (w.n_groups, w.n_prompt), generator=rng).repeat_interleave(w.group_size, dim=0)
    responses = torch.randint(10, 500, (len(prompts), length), generator=rng)
    loss_mask = (torch.arange(length) % (w.n_new + w.n_observed) < w.n_new).float().expand(len(prompts), -1)
    sequences = torch.cat([prompts, responses], dim=1)
    draws = torch.arange(w.n_groups).repeat_interleave(w.group_size)
    return TrainingBatch(sequences, torch.ones_like(sequences), loss_mask.clone(), draws)


def processor_seconds(function: Callable[[], object], n_times: int) -> float:
    """Return the median processor seconds of a call, after one warm-up call."""
    function()
    seconds = []
    for _ in range(n_times):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def update_seconds(workload: Workload, n_times: int) -> float:
    """Return the processor seconds of a forward and backward pass over the batch."""
    model, batch = make_model(workload.vocab_size), make_batch(workload)
    module, max_tokens = ScoringModule(model), default_max_tokens(model.config, model.device)
    module.probe()

    def update() -> None:
        (shard,), _ = split(batch, 1, max_tokens, shares_prefixes=module.shares_prefixes)
        for rows in shard.micro_batches:
            module(shard.rows.select(rows)).logprobs.sum().backward()
        module.zero_grad()

    return processor_seconds(update, n_times)


def generation_seconds(workload: Workload, n_times: int) -> float:
    """Return the processor seconds of all conversations, played concurrently."""
    w, rng = workload, random.Random(0)
    prompts = [[rng.randint(10, 500) for _ in range(w.n_prompt)] for _ in range(w.n_groups)]
    sampling = SamplingParams(max_new_tokens=w.n_new, ignore_eos=True)
    with (
        ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor,
        asyncio.Runner() as runner,
    ):
        engine = PackedEngine(
            make_model(w.vocab_size),
            NoTokenizer(),
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_cache_bytes=1 << 31,
            executor=executor,
        )

        async def converse(index: int) -> None:
            token_ids = list(prompts[index // w.group_size])
            for _ in range(w.n_turns):
                (result,) = await engine.generate([EngineRequest(token_ids, sampling, index, str(index))])
                token_ids = token_ids + result.token_ids + [random.randint(10, 500) for _ in range(w.n_observed)]
            await engine.end_session(str(index))

        async def play() -> None:
            await asyncio.gather(*(converse(index) for index in range(w.n_groups * w.group_size)))
            await engine.sleep()
            await engine.wake_up()

        seconds = processor_seconds(lambda: runner.run(play()), n_times)
        runner.run(engine.close())
    return seconds


def memory_growth() -> tuple[int, int]:
    """Return the resident memory after 50 updates, and its growth over `N_STEPS` further updates, in KiB."""
    module = ScoringModule(make_model(1024))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    batches = [make_batch(Workload(2, 4, n_prompt=16 + 8 * i, n_new=8 + i)) for i in range(4)]
    resident = 0
    for step in range(50 + N_STEPS):
        module(batches[step % len(batches)]).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 49:
            gc.collect()
            resident = resident_kib()
    return resident, resident_kib() - resident


class MemoryProbe(Callback):
    """A callback that records the resident memory after some steps, in KiB."""

    def __init__(self) -> None:
        self.resident: dict[int, int] = {}

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.global_step in (N_STEPS // 10, N_STEPS):
            gc.collect()
            self.resident[report.global_step] = resident_kib()


def run_growth() -> tuple[int, int]:
    """Return the resident memory after a tenth of a GRPO run's steps, and its growth over the rest, in KiB."""
    probe = MemoryProbe()

    class ProbedExperiment(RLExperiment):
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [*super().get_callbacks(*parts), probe]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "train.jsonl", 400)
        write_tiny_model(folder / "model", None, 0)
        overrides = [f"trainer.max_training_steps={N_STEPS}", "trainer.epochs=1000", "trainer.logger=tensorboard"]
        ProbedExperiment(parse_cli([*describe_run(folder, "train.jsonl"), *overrides])).run()
    first, last = probe.resident.values()
    return first, last - first


def record_steps(n_steps: int) -> tuple[float, float, float, int]:
    """Log `n_steps` steps of 70 metrics and build the run's report.

    Return the processor microseconds per step over the first and over the last 1,000 steps, and the report's processor
    seconds and KiB.
    """
    metrics = dict.fromkeys(("reward/avg_raw_reward", "policy/policy_loss", "policy/policy_entropy"), 0.5)
    metrics |= {f"group_{i % 9}/metric_{i}": i / 7 for i in range(70)}
    logger = logging.getLogger("skyrl_train.benchmark")
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        with log_to_file(folder.train_log), Tracking("scaling", "record", ["tensorboard"], {}, folder.path) as tracking:
            for start in range(0, n_steps, 1000):
                started = time.process_time()
                for step in range(start, start + 1000):
                    tracking.log(metrics | {"reward/avg_raw_reward": random.random()}, step)
                    logger.info("step %d", step)
                tracking.flush()
                seconds.append(time.process_time() - started)
        started = time.process_time()
        report = report_run(folder)
        assert report is not None
        return seconds[0] * 1e3, seconds[-1] * 1e3, time.process_time() - started, report.stat().st_size >> 10


def resident_kib() -> int:
    """Return the resident memory of this process in KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def write_prompts(path: Path, n_rows: int) -> None:
    """Write a dataset of products, as JSON lines or parquet."""
    with path.with_suffix(".jsonl").open("w") as file:
        for i in range(n_rows):
            row = {
                "prompt": [{"role": "user", "content": f"What is {i} times 7?"}],
                "reward_spec": {"ground_truth": str(7 * i)},
            }
            file.write(json.dumps(row) + "\n")
    if path.suffix == ".parquet":
        table = pyarrow.json.read_json(path.with_suffix(".jsonl"))
        pyarrow.parquet.write_table(table, path)


def describe_run(folder: Path, data: str) -> list[str]:
    """Return the overrides for a run of one step on the model and the data in a folder."""
    return [
        f"data.train_data=['{folder / data}']",
        f"trainer.policy.model.path='{folder / 'model'}'",
        f"trainer.output_dir='{folder}'",
        "environment.env_class=multiply",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=8",
        "trainer.max_training_steps=1",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
    ]


def start_run(n_rows: int, suffix: str) -> tuple[float, float, int]:
    """Run `skyrl train` for one step on `n_rows` rows. Return its seconds, processor seconds and peak memory in KiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / f"train{suffix}", n_rows)
        write_tiny_model(folder / "model", None, 0)
        command = [str(Path(sys.executable).parent / "skyrl"), "train", *describe_run(folder, f"train{suffix}")]
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        peak = 0  # not `ru_maxrss`: it starts at the memory of the process that forks
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            if sizes := re.findall(r"VmHWM:\s*(\d+)", Path(f"/proc/{process.pid}/status").read_text()):
                peak = int(sizes[0])
            time.sleep(0.02)
        _, status, usage = ended
        seconds = time.monotonic() - started
        assert process.stderr is not None
        if status:
            raise RuntimeError(process.stderr.read())
        return seconds, usage.ru_utime + usage.ru_stime, peak


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_times", type=int, default=3)
    parser.add_argument(
        "--only", choices=[*CURVES, "memory", "record", "start"], help="measure one part, and write no file"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Scaling",
        "",
        f"`make bench-scaling`, {conditions()}.",
        "",
        f"Processor microseconds of one thread per sampled token, medians of {options.n_times}. The base workload has",
        "8 prompts of 64 tokens × 8 samples of 32 tokens in one turn. Further turns observe 32 tokens each. The model",
        "has four layers of width 128 and a vocabulary of 1,024. Each row changes one value.",
        "",
        "| changed | value | update | generation |",
        "|---|---|---|---|",
    ]
    for name, values in CURVES.items():
        for value in values if options.only in (None, name) else []:
            workload = replace(Workload(), **{name: value})
            seconds = update_seconds(workload, options.n_times), generation_seconds(workload, options.n_times)
            update, generation = (f"{1e6 * s / workload.n_sampled:,.0f}" for s in seconds)
            lines.append(f"| `{name}` | {value:,} | {update} | {generation} |")
            print(lines[-1], flush=True)
    if options.only in (None, "memory"):
        resident, growth = memory_growth()
        grows = f"and grows by {growth:,} KiB over {N_STEPS:,} more."
        lines += ["", f"Memory is {resident >> 10:,} MiB after 50 updates, {grows}"]
        print(lines[-1], flush=True)
        resident, growth = run_growth()
        grows = f"and grows by {growth:,} KiB until step {N_STEPS:,}."
        lines.append(f"Memory is {resident >> 10:,} MiB after {N_STEPS // 10:,} steps of a run, {grows}")
        print(lines[-1], flush=True)
    if options.only in (None, "record"):
        lines += [
            "",
            "Processor time of a step's metrics and messages, and of a run's report:",
            "",
            "| steps | µs per step, first 1,000 | µs per step, last 1,000 | report, s | report, KiB |",
            "|---|---|---|---|---|",
        ]
        for n_steps in (1000, 10_000):
            first, last, report_s, report_kib = record_steps(n_steps)
            lines.append(f"| {n_steps:,} | {first:,.0f} | {last:,.0f} | {report_s:.1f} | {report_kib:,} |")
            print(lines[-1], flush=True)
    if options.only in (None, "start"):
        lines += [
            "",
            "From `skyrl train` to the end of a run of one step, by the number of training rows:",
            "",
            "| rows | format | seconds | processor seconds | peak memory, MiB |",
            "|---|---|---|---|---|",
        ]
        for n_rows, suffix in STARTS:
            seconds, processor_s, peak = start_run(n_rows, suffix)
            lines.append(f"| {n_rows:,} | {suffix} | {seconds:.1f} | {processor_s:.1f} | {peak >> 10:,} |")
            print(lines[-1], flush=True)
    if not options.only:
        (HERE / "curves.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
