"""Measure what a checkpoint after every second step costs a training run. Writes results.md.

    PYTHONPATH=skyrl-train:benchmarks python benchmarks/storage/checkpoint.py [--pairs 6]

A Qwen3 with 25 million parameters, 100 MB in float32, is trained with supervised fine-tuning and with GRPO. Its
checkpoint has 300 MB. Steps with and without a checkpoint alternate, so that a busy machine slows both. A step is timed
from just before one checkpoint is due to just before the next. Processor seconds include all threads.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.config.cli import parse
from skyrl_train.config.supervised import SFT
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.entrypoints.sft import SFTExp
from skyrl_train.entrypoints.tiny import train_tokenizer

HERE = Path(__file__).parent


class Times(NamedTuple):
    """Seconds and processor seconds of a step."""

    wall: float
    processor: float


class Clock(Callback):
    """A callback that reads the clocks at the end of each step, before a checkpoint begins."""

    def __init__(self) -> None:
        self.readings: list[tuple[int, Times]] = []

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        self.readings.append((report.global_step, Times(time.monotonic(), time.process_time())))

    def steps(self) -> dict[int, Times]:
        """Return the duration of each step except the first: it warms up."""
        pairs = zip(self.readings, self.readings[1:], strict=False)
        return {
            step: Times(*(end - start for start, end in zip(before, after, strict=True)))
            for (previous, before), (step, after) in pairs
            if previous > 0
        }


def timed(experiment: type) -> type:
    """Return the experiment with a clock as its first callback."""

    class Timed(experiment):  # type: ignore[misc]
        clock = Clock()

        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [self.clock, *super().get_callbacks(*parts)]

    return Timed


def write_inputs(folder: Path, n_rows: int, n_words: int) -> int:
    """Write data and model into `folder`. Return the number of parameters."""
    words = ["red", "green", "blue", "north", "south", "one", "two", "three", "house", "river"]
    text = [" ".join(words[(i * 7 + j * j) % 10] for j in range(n_words)) for i in range(n_rows)]
    question = [{"role": "user", "content": "How many is 1 plus 1?"}]
    solved = {"prompt": question, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "2"}}
    (folder / "problems.jsonl").write_text((json.dumps(solved) + "\n") * n_rows)
    rows = [{"prompt": "Continue.", "response": line} for line in text]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations = [[{"role": "user", "content": word}] for word in words]  # longer texts would become few tokens
    tokenizer = train_tokenizer(conversations)
    tokenizer.save_pretrained(folder / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    return model.num_parameters()


def train(folder: Path, kind: str, n_steps: int) -> dict[int, Times]:
    """Train with a checkpoint after every second step. Return the duration of each step."""
    settings = [
        f"trainer.policy.model.path={folder}/model",
        f"trainer.output_dir={folder}/outputs",
        f"trainer.run_name={kind}",
        f"trainer.max_training_steps={n_steps}",
        "trainer.epochs=1",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=2",
        "trainer.max_ckpts_to_keep=1",
        "trainer.logger=jsonl",
    ]
    if kind == "SFT":
        settings += [
            f"data.train_data={folder}/rows.jsonl",
            "data.prompt_key=prompt",
            "data.response_key=response",
            "trainer.train_batch_size=16",
        ]
        experiment = timed(SFTExp)(parse(settings, SFT))
    else:
        settings += [
            f"data.train_data=['{folder}/problems.jsonl']",
            "data.val_data=null",
            "trainer.train_batch_size=8",
            "trainer.policy_mini_batch_size=8",
            "generator.n_samples_per_prompt=8",
            "generator.sampling_params.max_generate_length=128",
        ]
        experiment = timed(RLExperiment)(parse_cli(settings))
    experiment.run()
    return experiment.clock.steps()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of steps with and without a checkpoint")
    n_pairs = parser.parse_args().pairs
    n_steps = 2 * n_pairs + 1
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        n_parameters = write_inputs(folder, 16 * n_steps, n_words=60)
        lines = [
            "# The cost of a checkpoint",
            "",
            f"{n_parameters / 1e6:.1f} million parameters in float32 ({n_parameters * 4 / 1e6:.0f} MB), "
            f"{n_parameters * 12 / 1e6:.0f} MB in a checkpoint, {torch.get_num_threads()} threads, "
            f"{platform.machine()}, local disk. Medians of {n_pairs} steps with and {n_pairs} without a checkpoint.",
            "",
            "| training | clock | step without | step with a checkpoint | cost |",
            "|---|---|---|---|---|",
        ]
        for kind in ("SFT", "GRPO"):
            steps = train(folder, kind, n_steps)
            for name in Times._fields:
                # the checkpoint after step 2 is written during step 3
                plain, saving = (
                    statistics.median(getattr(times, name) for step, times in steps.items() if step % 2 == rest)
                    for rest in (0, 1)
                )
                row = f"| {kind} | {name} | {plain:.2f} s | {saving:.2f} s | {saving - plain:.2f} s, "
                lines.append(row + f"{saving / plain - 1:.1%} |")
    finally:
        shutil.rmtree(folder)
    (HERE / "results.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
