"""Measure what a checkpoint after every step costs a training run; writes results.md.

    PYTHONPATH=skyrl-train:benchmarks python benchmarks/storage/checkpoint.py [--steps 6]

Supervised fine-tuning of a Qwen3 with 25 million parameters, 100 MB in float32; its checkpoint has 300 MB. The same run
is timed without checkpoints.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.entrypoints.cli import main as skyrl
from skyrl_train.models.tiny import train_tokenizer

HERE = Path(__file__).parent


def write_inputs(folder: Path, n_rows: int, n_words: int) -> int:
    """Write data and model into `folder`; return the number of parameters."""
    words = ["red", "green", "blue", "north", "south", "one", "two", "three", "house", "river"]
    text = [" ".join(words[(i * 7 + j * j) % 10] for j in range(n_words)) for i in range(n_rows)]
    rows = [{"prompt": "Continue.", "response": line} for line in text]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations = [[{"role": "user", "content": word}] for word in words]  # long texts would become few tokens
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


def train(folder: Path, name: str, n_steps: int, batch_size: int, ckpt_interval: int) -> list[dict[str, float]]:
    """Train, and return the metrics of each step."""
    status = skyrl(
        [
            "sft",
            f"data.train_data={folder}/rows.jsonl",
            "data.prompt_key=prompt",
            "data.response_key=response",
            f"trainer.policy.model.path={folder}/model",
            f"trainer.output_dir={folder}/outputs",
            f"trainer.run_name={name}",
            f"trainer.train_batch_size={batch_size}",
            f"trainer.max_training_steps={n_steps}",
            "trainer.epochs=1",
            "trainer.eval_interval=-1",
            f"trainer.ckpt_interval={ckpt_interval}",
            "trainer.max_ckpts_to_keep=1",
            "trainer.logger=jsonl",
        ]
    )
    assert status == 0
    lines = (folder / f"outputs/skyrl/{name}/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--words", type=int, default=60)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        n_parameters = write_inputs(folder, arguments.batch * arguments.steps, arguments.words)
        plain = train(folder, "plain", arguments.steps, arguments.batch, -1)
        saving = train(folder, "saving", arguments.steps, arguments.batch, 1)
    finally:
        shutil.rmtree(folder)
    step_plain = statistics.median(row["timing/step"] for row in plain[1:])
    step_saving = statistics.median(row["timing/step"] for row in saving[2:])
    pause = statistics.median(row["timing/checkpoint_pause"] for row in saving[2:])
    whole = statistics.median(row["timing/save_checkpoint"] for row in saving[2:])
    lines = [
        "# A checkpoint after every step",
        "",
        f"{n_parameters / 1e6:.1f} million parameters in float32 ({n_parameters * 4 / 1e6:.0f} MB), "
        f"{n_parameters * 12 / 1e6:.0f} MB in a checkpoint; {saving[1]['train/global_tokens']:,.0f} tokens a step; "
        f"{torch.get_num_threads()} threads, {platform.machine()}, local disk. "
        f"Medians of {arguments.steps - 1} steps.",
        "",
        "| | seconds |",
        "|---|---|",
        f"| step without checkpoints | {step_plain:.2f} |",
        f"| step while the last checkpoint is written | {step_saving:.2f} |",
        f"| pause for a checkpoint | {pause:.3f} ({pause / step_plain:.1%} of a step) |",
        f"| until it is complete | {whole:.2f} |",
        "",
    ]
    (HERE / "results.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
