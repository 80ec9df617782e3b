"""Mistakes of the configuration: each is answered with the value and the fix, before PyTorch is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_kit import golden
from train_kit.datasets import prompt_row
from train_kit.processes import TRAIN_FOLDER

from skyrl_train.dataset.files import write_jsonl

MODEL = {"max_position_embeddings": 128, "vocab_size": 500, "num_hidden_layers": 4, "num_attention_heads": 4}
COMMON = ["trainer.policy.model.path=model", "trainer.run_name=r", "trainer.train_batch_size=3"]
SFT, PAIRS, PROMPTS = (
    [f"data.{name}_data={file}.jsonl" for name in ("train", "val")] for file in ("answers", "pairs", "rows")
)
SIZES = [f"trainer.{name}_batch_size=4" for name in ("train", "policy_mini")]
GOOD = {
    "train": [*COMMON, *PROMPTS, *SIZES, "generator.sampling_params.max_generate_length=16"],
    "sft": [*COMMON, *SFT],
    "dpo": [*COMMON, *PAIRS],
    "reward": [*COMMON, *PAIRS],
    "verl": [],
}
"""Overrides without a mistake, for each command."""

SCRIPT = """
import contextlib, io, json, sys
from skyrl_train.compat.cli import main
answers = []
for argv in json.load(sys.stdin):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        status = main(argv)
    heavy = sorted({"torch", "transformers", "datasets", "matplotlib"} & set(sys.modules))
    answers.append([status, stderr.getvalue(), heavy])
json.dump(answers, sys.stdout)
"""


def test_a_mistake_is_answered_with_its_fix(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """All commands run in one process. It must not import PyTorch."""
    write_inputs(tmp_path)
    mistakes = golden.read("entrypoints/mistakes")
    commands = []
    for command, *mistake in map(str.split, mistakes):
        commands.append([command, *([] if mistake[0] == "--help" else GOOD[command]), *mistake])
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"PYTHONPATH": os.pathsep.join([str(TRAIN_FOLDER), env.get("PYTHONPATH", "")]), "HOME": str(tmp_path)}
    env["UNGRADED"] = "no_truth.jsonl"
    names = {entry.name for entry in tmp_path.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(commands),
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    results = dict(zip(mistakes, json.loads(done.stdout), strict=True))
    heavy = {mistake: modules for mistake, (_, _, modules) in results.items() if modules}
    assert heavy == {}, "a mistake must be answered before these are imported"
    assert {entry.name for entry in tmp_path.iterdir()} == names, "a mistake must create nothing"
    assert {status for status, _, _ in results.values()} == {1}
    answers = {mistake: [text.replace(str(tmp_path), "…")] for mistake, (_, text, _) in results.items()}
    golden.compare("entrypoints/mistakes", answers, pytestconfig)


def write_inputs(folder: Path) -> None:
    """Write the files that `GOOD` and the mistakes name."""
    row = prompt_row("Hi", reward_spec={"ground_truth": "42"})
    for name, rows in {
        "rows": [row] * 4,
        "answers": [{"prompt": "Hi", "response": "Hello"}] * 3,
        "pairs": [{"prompt": "Hi", "chosen": "Hello", "rejected": "Go"}] * 3,
        "wrong_type": [row, row, row | {"reward_spec": "42"}],
        "no_truth": [row | {"reward_spec": None}, row, row | {"reward_spec": {}}],
        "null_info": [row | {"extra_info": None}],
        "unknown_env": [row, row | {"env_class": "gms8k"}],
        "number_env": [row | {"env_class": 5}],
        "no_prompt": [{"question": "2 + 2?"}],
        "null_prompt": [row | {"prompt": None}],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    os.mkfifo(folder / "pipe.json")
    (folder / "broken.yaml").write_text("trainer: {epochs: ")
    (folder / "nul.yaml").write_text('trainer: {output_dir: "out\\0put"}')
    (folder / "broken_link").symlink_to("nowhere")
    (folder / "run/ckpts/global_step_3").mkdir(parents=True)
    (folder / "finished/export/global_step_3/policy").mkdir(parents=True)
    (folder / "finished/export/global_step_3/policy/config.json").touch()
    (folder / "folder.parquet").mkdir()
    whole = ["config.json", "model.safetensors", "tokenizer.json"]
    for name, files in {
        **dict.fromkeys(("model", "list_config", "small_vocabulary", "lfs", "cut_off"), whole),
        "without_tokenizer": ["config.json", "model.safetensors"],
        "without_weights": ["config.json", "tokenizer.json"],
        "folder_config": ["model.safetensors", "tokenizer.json"],
        "without_index": ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"],
        "without_shard": ["config.json", "model.safetensors.index.json", "tokenizer.json"],
    }.items():
        (folder / name).mkdir()
        for file in files:
            content = json.dumps(MODEL if file != "model.safetensors" else {}).encode()
            header = len(content).to_bytes(8, "little") if file == "model.safetensors" else b""
            (folder / name / file).write_bytes(header + content)
    (folder / "list_config/config.json").write_text("[]")
    (folder / "without_shard/model.safetensors.index.json").write_text('{"weight_map": {"a": "shard.safetensors"}}')
    (folder / "lfs/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "cut_off/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(7))
    (folder / "folder_config/config.json").mkdir()
    (folder / "small_vocabulary/config.json").write_text(json.dumps({"vocab_size": 100}))
