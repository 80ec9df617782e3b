"""The planned memory of 16 runs beside the measured one: `make bench-memory`, as root.

Each run trains a random model of 1 to 600 million parameters for a few steps on this machine's CPU. A random model
rarely ends its turn, so most responses have the maximum length, as the plan assumes. A CPU process keeps memory that it
has freed, so what it takes after the first update is its peak so far. Three phases are therefore compared: loading, the
first rollout, and the whole run. Each run is in a control group with little more memory than planned, because a run
gives freed memory back only where little is free.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas
from harness import conditions
from limit import run_limited
from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

from skyrl_train.entrypoints.tiny import train_tokenizer

HERE = Path(__file__).parent
SHAPES = {  # layers, hidden size, MLP size, heads, key-value heads, head size, vocabulary
    "1m": (4, 128, 256, 4, 2, 32, 1024),
    "13m": (8, 320, 960, 5, 5, 64, 1024),
    "60m": (12, 512, 1536, 8, 4, 64, 32768),
    "135m": (30, 576, 1536, 9, 3, 64, 49152),
    "360m": (32, 960, 2560, 15, 5, 64, 49152),
    "600m": (28, 1024, 3072, 16, 8, 128, 151936),
}
POLICY = "trainer.policy"
BF16 = {f"{POLICY}.model.train_dtype": "bfloat16", f"{POLICY}.model.dtype": "bfloat16"}
EIGHT_BIT = {f"{POLICY}.optimizer_config.name": "adamw_8bit"}
LORA = {f"{POLICY}.model.lora.rank": 16}
KL = {"trainer.algorithm.use_kl_loss": True}
CHECKPOINTING = {"trainer.gradient_checkpointing": True}
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "1M": ("1m", {}),
    "13M": ("13m", {}),
    "60M": ("60m", {}),
    "60M, KL": ("60m", KL),
    "60M, critic": ("60m", {"trainer.algorithm.advantage_estimator": "gae", "trainer.critic.model.path": "MODEL"}),
    "60M, recomputed activations": ("60m", CHECKPOINTING),
    "135M": ("135m", {}),
    "135M, LoRA": ("135m", LORA),
    "135M, QLoRA": ("135m", LORA | {f"{POLICY}.model.lora.quantize_base": "nf4"}),
    "135M, 8-bit AdamW": ("135m", EIGHT_BIT),
    "135M, bfloat16": ("135m", BF16),
    "135M, bfloat16, 8-bit AdamW, KL": ("135m", BF16 | EIGHT_BIT | KL),
    "135M, optimizer on the host": ("135m", {f"{POLICY}.optimizer_config.cpu_offload": True}),
    "360M": ("360m", {}),
    "600M, bfloat16, 8-bit AdamW": ("600m", BF16 | EIGHT_BIT),
    "600M, recomputed activations": ("600m", CHECKPOINTING),
}
MARGIN = 1.15
"""Memory of a run's control group, as a factor of the planned peak."""
SETTINGS = {
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 4,
    "trainer.critic_mini_batch_size": 4,
    "trainer.eval_interval": -1,
    "trainer.epochs": 10,
    "trainer.max_prompt_length": 256,
    "trainer.logger": "jsonl",
    "trainer.resume_mode": "none",
    "generator.n_samples_per_prompt": 4,
    "generator.sampling_params.max_generate_length": 64,
    "trainer.algorithm.use_kl_loss": False,
    "data.val_data": "[]",
}


def make_model(name: str, folder: Path) -> Path:
    """Save a random Qwen3 with a small tokenizer, unless it exists."""
    path = folder / name
    if (path / "config.json").exists():
        return path
    n_layers, hidden, intermediate, n_heads, n_kv, head, n_tokens = SHAPES[name]
    tokenizer = train_tokenizer([[{"role": "user", "content": "What is 6 times 7? 0 1 2 3 4 5 6 7 8 9"}]] * 2, 300)
    set_seed(0)
    config = Qwen3Config(
        vocab_size=n_tokens,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv,
        head_dim=head,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_data(folder: Path) -> Path:
    """Write 64 prompts of 55 to 71 tokens."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {i} times {i + 1}? " * 8}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": str(i)},
        }
        for i in range(64)
    ]
    path = folder / "train.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path


def command(case: str, folder: Path, n_steps: int) -> list[str]:
    """Return the settings of a case as overrides."""
    shape, settings = CASES[case]
    model = make_model(shape, folder)
    own = {
        "trainer.policy.model.path": model,
        "data.train_data": f"['{make_data(folder)}']",
        "trainer.output_dir": folder / "runs",
        "trainer.run_name": case.replace(",", "").replace(" ", "-"),
        "trainer.max_training_steps": n_steps,
        "trainer.ckpt_interval": n_steps,  # an earlier copy could still be written during the next update
    }
    merged = SETTINGS | settings | own
    return [f"{key}={model if value == 'MODEL' else str(value)}" for key, value in merged.items()]


def plan(overrides: list[str]) -> dict[str, float]:
    """Return the planned bytes of loading, of the first rollout and of the run."""
    arguments = [sys.executable, "-m", "skyrl_train.entrypoints.cli", "plan", "--json", *overrides]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    content = json.loads(done.stdout)
    totals = content["totals"]["host"]
    moments = sum(p["phases"].get("rollout", 0) for p in content["parts"] if p["name"].endswith("optimizer state"))
    return {"load": totals["load"], "rollout": totals["rollout"] - moments, "run": max(totals.values())}


def measure(overrides: list[str], folder: Path, limit: float) -> dict[str, float]:
    """Train in a control group with `limit` bytes, and return the measured bytes."""
    name = next(text.partition("=")[2] for text in overrides if text.startswith("trainer.run_name="))
    log = folder / f"{name}.log"
    arguments = [sys.executable, "-m", "skyrl_train.entrypoints.cli", "train", *overrides]
    status, last = run_limited(arguments, int(limit), log)
    if status != 0:
        raise RuntimeError(f"{name} ended with exit status {status}; see {log}")
    (metrics,) = (folder / "runs").rglob(f"{name}/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    first = next(row for row in rows if "memory/generate" in row)
    peak = 1e9 * max(value for row in rows for key, value in row.items() if key.startswith("memory/"))
    shutil.rmtree(folder / "runs")  # checkpoints
    # The copy of the last checkpoint is in no row.
    return {"load": first["memory/load"] * 1e9, "rollout": first["memory/generate"] * 1e9, "run": max(peak, last)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(CASES), help="cases to run")
    parser.add_argument("--folder", type=Path, default=Path("outputs/memory"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder, lines = arguments.folder.resolve(), []
    for case in arguments.only:
        n_steps = {"1m": 20, "13m": 12, "60m": 8, "600m": 2}.get(CASES[case][0], 4)
        overrides = command(case, folder, n_steps)
        planned = plan(overrides)
        measured = measure(overrides, folder, MARGIN * planned["run"])
        cells = (
            f"{planned[phase] / 1e9:.2f} / {measured[phase] / 1e9:.2f} ({planned[phase] / measured[phase] - 1:+.0%})"
            for phase in planned
        )
        lines.append(f"| {case} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if arguments.only == list(CASES):
        text = (
            f"# Planned and measured memory\n\n`make bench-memory`, {conditions()}. Planned / measured gigabytes.\n\n"
        )
        table = "| case | load | first rollout | whole run |\n|---|---|---|---|\n" + "\n".join(lines)
        (HERE / "results.md").write_text(f"{text}{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
