"""A pretrained language model learns to use a calculator.

    python -m examples.calculator.learn --seed 42

SmolLM2-135M-Instruct cannot multiply numbers of two digits, and does not call tools. A warm start on 24 traces shows it
the form of a call. GRPO then rewards answers that end with the right number. Validation asks in wordings and with
pairs of numbers that training never sees. Exit status 1 means that the model did not learn.
"""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.calculator.pretrained import fetch
from examples.calculator.problems import HELD_OUT, TRAINING, problems
from examples.calculator.traces import traces
from examples.learning import Recipe, main
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.errors import ConfigError

N_TRAIN, N_VALIDATION, N_TRACES, N_SAMPLED = 600, 64, 24, 48
BATCH_SIZE = 8  # traces per step of the warm start
TRACES, VALIDATION = "traces.jsonl", "validation.parquet"
LIMITS = (
    "generator.max_turns=3",
    "generator.sampling_params.max_generate_length=64",
    "generator.eval_sampling_params.max_generate_length=64",
)


def write_data(folder: Path) -> None:
    """Write traces, and problems for training, for preference pairs and for validation."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / TRACES, list(traces(problems(TRAINING, N_TRACES, is_held_out=False, seed=0))))
    for name, rows in (
        ("train.parquet", problems(TRAINING, N_TRAIN, is_held_out=False, seed=1)),
        ("sampled.parquet", problems(TRAINING, N_SAMPLED, is_held_out=False, seed=3)),
        (VALIDATION, problems(HELD_OUT, N_VALIDATION, is_held_out=True, seed=2)),
    ):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)


def make_model(data: Path, model: Path, seed: int) -> None:
    """Fetch the pretrained model, evaluate it, and warm-start it on the traces.

    Raises:
        ConfigError: the download or one of the commands failed.
    """
    pretrained = model.with_name("SmolLM2-135M-Instruct")
    if not pretrained.is_dir():
        fetch(pretrained)
    name = f"seed{seed}"
    shared = [f"trainer.output_dir='{model.parent}'", "trainer.logger=jsonl", f"trainer.run_name={name}"]
    shared.append(f"trainer.policy.model.path='{pretrained}'")
    evaluation = ["environment.imports=examples.calculator.env", f"data.val_data='{data / VALIDATION}'", *LIMITS]
    _run("generate", *shared, *evaluation, "trainer.project_name=pretrained")
    _run(
        "sft",
        *shared,
        f"data.train_data='{data / TRACES}'",
        "data.val_data=[]",
        "data.max_length=512",
        f"trainer.train_batch_size={BATCH_SIZE}",
        "trainer.epochs=1",
        "trainer.policy.optimizer_config.lr=1e-4",
        "trainer.policy.optimizer_config.scheduler=constant",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        "trainer.hf_save_interval=1000",
        f"trainer.seed={seed}",
        "trainer.project_name=warm_start",
    )
    (model.parent / f"warm_start/{name}/export/global_step_{N_TRACES // BATCH_SIZE}/policy").rename(model)


def _run(command: str, *overrides: str) -> None:
    """Run a command in a separate process, to free its memory."""
    program = [sys.executable, "-m", "skyrl_train.entrypoints.cli"]
    if subprocess.run([*program, command, *overrides], check=False).returncode:
        raise ConfigError(f"skyrl {command} failed; see its messages above")


RECIPE = Recipe(
    name="calculator",
    write_data=write_data,
    attempt=None,
    make_model=make_model,
    overrides=(
        "environment.imports=examples.calculator.env",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "generator.n_samples_per_prompt=8",
        *LIMITS,
        "trainer.algorithm.use_kl_loss=false",
        "trainer.policy.optimizer_config.lr=1e-5",
        "trainer.policy.optimizer_config.scheduler=constant",
        "trainer.policy.optimizer_config.num_warmup_steps=0",
        "trainer.eval_interval=4",
        "trainer.ckpt_interval=4",
    ),
    metric="eval/all/avg_score",
    required=0.85,
    chance=0.0,  # measured
    baseline="pretrained",
    n_steps=12,
)

if __name__ == "__main__":
    main(RECIPE, __doc__ or "")
