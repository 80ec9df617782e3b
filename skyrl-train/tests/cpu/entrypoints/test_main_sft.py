"""Runs of `skyrl sft`: what they learn, log and leave, and that a resumed one ends like an uninterrupted one."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from sft_runs import metrics, overrides, weights, write_rows
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.entrypoints.cli import main
from skyrl_train.supervised_trainer import count_flops

TRAIN_FOLDER = Path(__file__).parents[3]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with 11 training rows, some with two turns, and 3 validation rows."""
    write_rows(tmp_path)
    return tmp_path


def naive_loss(model_path: Path, file: Path) -> float:
    """Return the mean cross-entropy of the answers of a file, one row after the other."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    total, n_tokens = 0.0, 0
    for line in file.read_text().splitlines():
        row = json.loads(line)
        turns = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        token_ids: list[int] = []
        labels: list[int] = []
        for turn in turns:
            header = tokenizer(f"<|im_start|>{turn['role']}\n", add_special_tokens=False)["input_ids"]
            body = tokenizer(turn["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
            token_ids += header + body + newline
            trained = body if turn["role"] == "assistant" else [-100] * len(body)
            labels += [-100] * len(header) + trained + [-100] * len(newline)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([token_ids])).logits[0].double()
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(labels[1:]), reduction="sum")
        total += loss.item()
        n_tokens += sum(label != -100 for label in labels)
    return total / n_tokens


@pytest.mark.parametrize(
    "memory",
    [
        ["trainer.micro_train_batch_size_per_gpu=1", "trainer.micro_forward_batch_size_per_gpu=1"],
        ["trainer.micro_train_batch_size_per_gpu=3", "trainer.max_tokens_per_microbatch=60"],
        ["trainer.micro_train_batch_size_per_gpu=null"],
        ["trainer.gradient_checkpointing=true"],
    ],
)
def test_the_loss_is_the_mean_over_all_answer_tokens_for_any_micro_batch(
    memory: list[str], data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out", "trainer.eval_before_train=true", "trainer.epochs=1")
    assert main(["sft", *run, *memory, "trainer.train_batch_size=11", "trainer.ckpt_interval=-1"]) == 0
    before, first = metrics(tmp_path / "out")
    assert before["val/loss"] == pytest.approx(naive_loss(tiny_model_path, data / "val.jsonl"), abs=1e-6)
    assert first["train/loss"] == pytest.approx(naive_loss(tiny_model_path, data / "train.jsonl"), abs=1e-6)
    exported = tmp_path / "out/skyrl/test_run/export/global_step_1/policy"
    assert first["val/loss"] == pytest.approx(naive_loss(exported, data / "val.jsonl"), abs=1e-6)


def test_one_sample_is_learned_and_ends_with_the_eos_token(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    (data / "train.jsonl").write_text(json.dumps({"prompt": "Who are you?", "response": "A model of 2 layers."}))
    run = overrides(data, tiny_model_path, tmp_path / "out", "trainer.train_batch_size=1", "trainer.epochs=60")
    assert main(["sft", *run, "trainer.eval_interval=-1", "trainer.ckpt_interval=-1"]) == 0
    assert metrics(tmp_path / "out")[-1]["train/loss"] < 0.05
    folder = tmp_path / "out/skyrl/test_run/export/global_step_60/policy"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    reply = model.generate(prompt, max_new_tokens=50, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(reply) == "A model of 2 layers.<|im_end|>"


def test_bfloat16_weights_learn_like_float32_ones(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    """At the learning rate of the recipe, most updates are too small to change a bfloat16 number."""
    base, losses = tmp_path / "base", {}
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(base)
    AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.bfloat16).save_pretrained(base)
    more = ["trainer.epochs=10", "trainer.policy.optimizer_config.lr=2e-6", "trainer.eval_before_train=true"]
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        assert main(["sft", *overrides(data, base, out, *more, f"trainer.policy.model.dtype={dtype}")]) == 0
        losses[dtype] = [row["val/loss"] for row in metrics(out) if "val/loss" in row]
        assert {str(tensor.dtype) for tensor in weights(out, 20).values()} == {f"torch.{dtype}"}
    assert losses["float32"][-1] < losses["float32"][0] - 1e-3
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=1e-5)
    run = overrides(data, base, tmp_path / "parts", *more, "trainer.policy.model.dtype=bfloat16")
    run_in_parts(tmp_path / "parts", run, 7)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "bfloat16")
    parts = weights(tmp_path / "parts", 20)
    assert all(torch.equal(parts[name], tensor) for name, tensor in weights(tmp_path / "bfloat16", 20).items())


def test_a_run_that_ends_by_epochs_keeps_its_batch_size(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out", "trainer.eval_interval=-1")
    assert main(["sft", *run, "trainer.train_batch_size=2", "trainer.max_training_steps=2"]) == 0
    assert main(["sft", *run, "trainer.train_batch_size=5"]) == 1
    error = capsys.readouterr().err
    assert "with trainer.train_batch_size=5, because it was saved with 2 and the last step of trainer.epochs=3" in error
    assert "set trainer.train_batch_size=2, or set trainer.max_training_steps to the last step, at most 6" in error
    assert main(["sft", *run, "trainer.train_batch_size=5", "trainer.max_training_steps=4"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4]


def test_the_metrics_have_the_names_of_the_recipes(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    assert main(["sft", *overrides(data, tiny_model_path, tmp_path / "out")]) == 0
    rows = [json.loads(x) for x in (tmp_path / "out/skyrl/test_run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert ["val/loss" in row for row in rows] == [False, True] * 3
    for row in rows:
        assert row["train/global_step"] == row["step"]
        assert row["train/epoch"] == row["step"] / 2
        assert row["train/learning_rate"] == row["train/lr"] == pytest.approx(row["train/lr(1e-3)"] / 1e3)
        assert row["train/lr"] == pytest.approx(3e-3 * (0.5 + 0.5 * math.cos(math.pi * (row["step"] - 1) / 6)))
        assert row["train/throughput"] == pytest.approx(5 / row["train/time(s)"])
        assert 0.05 < row["system/memory_usage"] < 100
        assert row["train/grad_norm"] > 0
        assert row["train/trained_tokens"] < row["train/global_tokens"]
    assert rows[-1]["train/total_tokens(B)"] * 1e9 == pytest.approx(sum(row["train/global_tokens"] for row in rows))
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    folder = tmp_path / "out/skyrl/test_run"
    assert sorted(path.name for path in (folder / "ckpts").glob("global*")) == [f"global_step_{n}" for n in (2, 4, 6)]
    assert "Validation loss" in (folder / "report.html").read_text()
    assert (folder / "learning_curve.png").is_file()


@pytest.mark.parametrize(("is_frozen", "n_per_weight"), [(False, 6), (True, 4)])
def test_operations_are_those_that_torch_counts(is_frozen: bool, n_per_weight: int) -> None:
    """The second of two layers, so that the gradient of the first layer's output is needed, too."""
    n_tokens, layers = 7, torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 5, bias=False))
    layers[1].requires_grad_(not is_frozen)
    hidden = torch.randn(n_tokens, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layers(hidden).sum().backward()
    n_first, n_second = 64, 40
    assert counter.get_total_flops() == n_tokens * (6 * n_first + n_per_weight * n_second)
    assert (
        count_flops(n_first + (0 if is_frozen else n_second), n_first + n_second) * n_tokens
        == counter.get_total_flops()
    )


@pytest.fixture
def uninterrupted(data: Path, tiny_model_path: Path, tmp_path: Path) -> Path:
    assert main(["sft", *overrides(data, tiny_model_path, tmp_path / "whole")]) == 0
    return tmp_path / "whole"


def run_in_parts(folder: Path, run: list[str], step: int) -> None:
    """Train in a folder up to a step, and resume. A callback stops it, because a shorter run has another schedule."""
    from skyrl_train.callbacks import Callback, Run, StepReport
    from skyrl_train.config.cli import parse
    from skyrl_train.config.sft import SFT
    from skyrl_train.entrypoints.sft import SFTExp

    class Stop(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            if report.global_step == step:
                run.request_stop("for the test")

    class Interrupted(SFTExp):
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [Stop(), *super().get_callbacks(*parts)]

    with pytest.raises(KeyboardInterrupt):
        Interrupted(parse(run, SFT)).run()
    assert metrics(folder)[-1]["step"] == step
    assert main(["sft", *run]) == 0


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.nightly) for step in (1, 3)), 2, 5])
def test_a_run_that_stops_at_any_step_resumes_exactly(
    step: int, uninterrupted: Path, data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    run_in_parts(tmp_path / "parts", overrides(data, tiny_model_path, tmp_path / "parts"), step)
    assert metrics(tmp_path / "parts") == metrics(uninterrupted)
    whole, parts = weights(uninterrupted, 6), weights(tmp_path / "parts", 6)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_dropout_of_an_adapter_is_applied_in_training_only_and_resumes_exactly(
    data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    def rows(name: str, *options: str) -> list[dict[str, Any]]:
        lora = ["trainer.policy.model.lora.rank=4", "trainer.eval_before_train=true", *options]
        run = overrides(data, tiny_model_path, tmp_path / name, *lora)
        if name == "parts":
            run_in_parts(tmp_path / name, run, 3)
        else:
            assert main(["sft", *run]) == 0
        return metrics(tmp_path / name)

    dropout = "trainer.policy.model.lora.dropout=0.5"
    exact, dropped = rows("exact"), rows("dropped", dropout)
    for key in ("val/loss", "train/loss"):
        losses = [[row[key] for row in run if key in row] for run in (exact, dropped)]
        assert losses[0][0] == losses[1][0], f"the adapter starts as 0, so that {key} is that of the base"
        assert all(a != b for a, b in zip(*(one[1:] for one in losses), strict=True))
    assert rows("parts", dropout) == dropped
    assert rows("checkpointed", dropout, "trainer.gradient_checkpointing=true") == [
        pytest.approx(row, abs=1e-5) for row in dropped
    ]
    assert rows("unsaved", dropout, "trainer.ckpt_interval=-1")[-1]["val/loss"] == dropped[-1]["val/loss"]


@pytest.mark.parametrize(
    ("scheduler", "jump"), [("cosine", "0.00225"), ("wsd", "0.003"), ("constant_with_warmup", None)]
)
def test_a_run_with_more_epochs_than_before_follows_their_schedule(
    scheduler: str,
    jump: str | None,
    data: Path,
    tiny_model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def learning_rates(folder: str, *options: str) -> list[float]:
        optimizer = "trainer.policy.optimizer_config"
        schedule = [f"{optimizer}.scheduler={scheduler}", f"{optimizer}.wsd_decay_ratio=0.5"]
        run = overrides(data, tiny_model_path, tmp_path / folder, *schedule, *options)
        assert main(["sft", *run]) == 0
        return [row["train/lr"] for row in metrics(tmp_path / folder) if "train/lr" in row]

    whole = learning_rates("whole")
    short = learning_rates("parts", "trainer.epochs=1")
    caplog.clear()
    longer = learning_rates("parts", "trainer.policy.optimizer_config.lr=1")
    assert len(short) == 2
    assert longer == [*short, *whole[2:]]
    assert "Changed since the checkpoint: trainer.epochs: 1 -> 3" in caplog.messages
    change = "trainer.policy.optimizer_config.lr: 0.003 -> 1.0"
    assert f"{change} has no effect: the optimizer has the settings of its checkpoint" in caplog.messages
    jumps = [message for message in caplog.messages if message.startswith("The learning rate of the policy")]
    rest = "not the 0 of the checkpoint: the schedule has changed"
    assert jumps == ([f"The learning rate of the policy is {jump}, {rest}"] if jump else [])


def test_a_killed_run_resumes_exactly(uninterrupted: Path, data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "killed")
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_sft", *run]
    process = subprocess.Popen(command, cwd=TRAIN_FOLDER, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pointer, deadline = tmp_path / "killed/skyrl/test_run/ckpts/latest_ckpt_global_step.txt", time.monotonic() + 120
    while not pointer.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(random.Random(0).random() / 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert pointer.exists()
    assert main(["sft", *run]) == 0
    assert metrics(tmp_path / "killed") == metrics(uninterrupted)
    whole, parts = weights(uninterrupted, 6), weights(tmp_path / "killed", 6)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_checkpoint_of_other_data_is_refused(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out")
    assert main(["sft", *run, "trainer.max_training_steps=2"]) == 0
    (data / "train.jsonl").write_text((data / "val.jsonl").read_text() * 2)
    assert main(["sft", *run]) == 1
    assert "the checkpoint was made with n_rows=11 and this run has n_rows=6" in capsys.readouterr().err


def test_a_diverging_run_ends_with_the_reason(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out", "trainer.policy.optimizer_config.lr=1000")
    assert main(["sft", *run, "trainer.policy.optimizer_config.weight_decay=0"]) == 3
    assert "the policy has diverged with trainer.policy.optimizer_config.lr=1000" in capsys.readouterr().err


def test_the_plan_the_configuration_and_the_keys_are_printed(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out")
    assert main(["sft", *run, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "steps        6 (3 epochs × 2 batches)" in plan
    assert "each step    5 rows of ≤ 200 tokens" in plan
    assert main(["sft", *run, "data.max_length=null", "--dry-run"]) == 0
    assert "each step    5 rows of ≤ 512 tokens" in capsys.readouterr().out
    assert main(["sft", *run, "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["policy"]["optimizer_config"]["adam_betas"] == [0.9, 0.98]
    assert main(["sft", "--help", "data.truncation"]) == 0
    assert "data.truncation=error  one of error, left, right" in capsys.readouterr().out
    assert main(["sft", "--help"]) == 0
    assert "skyrl sft --help SECTION" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_rows_are_as_long_as_the_context_by_default(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (data / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "Count!", "response": "1" * 600}))
    run = overrides(data, tiny_model_path, tmp_path / "out", "data.max_length=null", "trainer.max_training_steps=1")
    assert main(["sft", *run]) == 1
    assert "tokens, more than data.max_length=512; raise it, or set data.truncation" in capsys.readouterr().err
    assert main(["sft", *run, "data.truncation=right"]) == 0


MISTAKES = [
    (["data.trunkation=left"], "data.trunkation=left: there is no key data.trunkation; did you mean data.truncation"),
    (["generator.backend=hf"], "generator.backend=hf: there is no key generator.backend"),
    (["data.max_length=513"], "data.max_length=513 is more than the context of"),
    (["data.chat_template=/nowhere.jinja"], "data.chat_template=/nowhere.jinja does not exist"),
    (["data.chat_template=/dev/null"], "data.chat_template=/dev/null is not a regular file"),
    (["data.val_data=/nowhere.jsonl"], "data.val_data=/nowhere.jsonl: the file /nowhere.jsonl does not exist"),
    (["data.train_data=[]"], "data.train_data=[] leaves nothing to train on"),
    (["data.response_key=reply"], "row 0 of"),
    (["trainer.train_batch_size=32"], "data.train_data has 11 usable rows, fewer than trainer.train_batch_size=32"),
    (["trainer.train_batch_size=32", "--dry-run"], "has 11 usable rows, fewer than trainer.train_batch_size=32"),
    (["trainer.policy.model.path=/nowhere"], "there is no such folder"),
]


@pytest.mark.parametrize(("mistake", "answer"), MISTAKES)
def test_mistakes_are_answered_before_torch_is_imported(
    mistake: list[str], answer: str, data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out", *mistake)
    code = (
        "import sys; from skyrl_train.entrypoints.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(99 if 'torch' in sys.modules or 'transformers' in sys.modules else status)"
    )
    result = subprocess.run([sys.executable, "-c", code, "sft", *run], capture_output=True, text=True, check=False)
    assert answer in result.stderr
    assert result.returncode == 1
    assert not (tmp_path / "out").exists()


def test_the_command_line_of_verl_is_read(
    data: Path, tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = [
        f"data.train_files='{data}/train.jsonl'",
        f"data.val_files='{data}/val.jsonl'",
        "data.prompt_key=prompt",
        "data.response_key=response",
        "data.train_batch_size=5",
        "data.micro_batch_size_per_gpu=8",
        "data.max_length=200",
        f"model.partial_pretrain='{tiny_model_path}'",
        "model.fsdp_config.model_dtype=bf16",
        "optim.lr=2e-4",
        "optim.betas=[0.9,0.95]",
        "optim.weight_decay=0.1",
        "optim.lr_scheduler=wsd",
        f"trainer.default_local_dir='{tmp_path}/ckpts'",
        "trainer.experiment_name=test_run",
        "trainer.total_epochs=1",
        "trainer.save_freq=50",
        "trainer.test_freq=50",
        "trainer.logger=jsonl",
        f"trainer.output_dir='{tmp_path}/out'",
    ]
    assert main(["sft", *run]) == 0
    assert "val/loss" in metrics(tmp_path / "out")[-1]
    assert (tmp_path / "ckpts/global_step_2").is_dir()


def test_a_template_that_is_no_text_is_refused(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, fault in ((b"\xff", "cannot be read"), (b"\n", "is empty")):
        (data / "template.jinja").write_bytes(content)
        run = overrides(data, tiny_model_path, tmp_path / "out", f"data.chat_template='{data}/template.jinja'")
        assert main(["sft", *run]) == 1
        assert f"template.jinja {fault}" in capsys.readouterr().err


def test_a_template_of_ones_own_replaces_a_broken_one(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_path, tmp_path / "model")
    (data / "template.jinja").write_text((model / "chat_template.jinja").read_text())
    (model / "chat_template.jinja").write_text("{{ broken }")
    run = overrides(data, model, tmp_path / "out", "trainer.max_training_steps=1", "trainer.ckpt_interval=-1")
    assert main(["sft", *run]) == 1
    assert main(["sft", *run, f"data.chat_template='{data}/template.jinja'"]) == 0


def test_a_template_of_ones_own_is_trained_and_exported(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}"
    )
    template += "[assistant] {% endif %}"
    (data / "template.jinja").write_text(template)
    run = overrides(data, tiny_model_path, tmp_path / "out", f"data.chat_template='{data}/template.jinja'")
    assert main(["sft", *run, "trainer.max_training_steps=1"]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "out/skyrl/test_run/export/global_step_1/policy")
    assert exported.chat_template == template
