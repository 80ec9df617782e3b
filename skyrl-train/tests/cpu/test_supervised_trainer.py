import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from train_kit.datasets import write_answers, write_rows
from train_kit.messages import assistant, user
from train_kit.runs import Run, assert_equal_runs, expect_error, read_lines, stop_after, supervised_run, train
from train_kit.vision_models import pictured_logprobs, write_pictures
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_report.run_folder import RunFolder
from skyrl_train.supervised_trainer import count_flops

OPTIMIZER = "trainer.policy.optimizer_config"
UNSAVED = ["trainer.eval_interval=-1", "trainer.ckpt_interval=-1"]
Overrides = Callable[..., list[str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_answers(tmp_path)


@pytest.fixture
def named(data: Path, tiny_model_path: Path, tmp_path: Path) -> Overrides:
    """Return the overrides of a named run of six steps."""
    return lambda name, *overrides: supervised_run(tmp_path, *overrides, model=tiny_model_path, data=data, name=name)


@pytest.fixture(scope="module")
def whole(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("whole")
    return train(*supervised_run(folder, model=tiny_model_path, data=write_answers(folder)), command="sft")


def sft(*overrides: str) -> Run:
    return train(*overrides, command="sft")


def resume_with(first: list[str], then: list[str]) -> tuple[Run, list[dict[str, torch.Tensor]]]:
    """Train one step, resume for a second one with other settings, and return the weights after each step."""
    sft(*first, "trainer.max_training_steps=1")
    run = sft(*then, "trainer.max_training_steps=2")
    folders = [run.folder / f"export/global_step_{step}/policy" for step in (1, 2)]
    return run, [load_file(folder / "model.safetensors") for folder in folders]


def naive_loss(model_path: Path, file: Path) -> float:
    """Return the mean cross-entropy of the answers of a file, one row after the other."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    total, n_tokens = 0.0, 0
    for row in read_lines(file):
        turns = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        token_ids: list[int] = []
        labels: list[int] = []
        for turn in turns:
            parts = (encode(f"<|im_start|>{turn['role']}\n"), encode(turn["content"] + "<|im_end|>"), encode("\n"))
            token_ids += [*parts[0], *parts[1], *parts[2]]
            trained = parts[1] if turn["role"] == "assistant" else [-100] * len(parts[1])
            labels += [-100] * len(parts[0]) + trained + [-100] * len(parts[2])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([token_ids])).logits[0].double()
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(labels[1:]), reduction="sum")
        total += loss.item()
        n_tokens += sum(label != -100 for label in labels)
    return total / n_tokens


@pytest.mark.parametrize(
    "memory",
    [
        ["micro_train_batch_size_per_gpu=1", "micro_forward_batch_size_per_gpu=1", "gradient_checkpointing=true"],
        ["micro_train_batch_size_per_gpu=3", "max_tokens_per_microbatch=60"],
        ["micro_train_batch_size_per_gpu=null"],
    ],
)
def test_the_loss_is_the_mean_over_all_answer_tokens_for_any_micro_batch(
    memory: list[str], named: Overrides, data: Path, tiny_model_path: Path
) -> None:
    settings = ["eval_before_train=true", "epochs=1", "train_batch_size=11", "ckpt_interval=-1", *memory]
    run = sft(*named("run", *(f"trainer.{setting}" for setting in settings)))
    before, first = run.metrics
    assert before["val/loss"] == pytest.approx(naive_loss(tiny_model_path, data / "val.jsonl"), abs=1e-6)
    assert first["train/loss"] == pytest.approx(naive_loss(tiny_model_path, data / "train.jsonl"), abs=1e-6)
    assert first["val/loss"] == pytest.approx(naive_loss(run.export(1), data / "val.jsonl"), abs=1e-6)


PLACE, WHERE = {"type": "image"}, {"type": "text", "text": "Where?"}
PICTURED = [
    ([user([PLACE, WHERE]), assistant("Left")], [0]),
    ([user([WHERE, PLACE, PLACE]), assistant("Right of it")], [1, 2]),
    ([user([PLACE, WHERE]), assistant("Up"), user([PLACE, WHERE, PLACE]), assistant("Down")], [3, 0, 1]),
    ([user("Who are you?"), assistant("A model")], []),
]
"""Conversations, and the images that they show."""


def naive_pictured_loss(model_path: Path, folder: Path) -> float:
    """Return the mean cross-entropy of all answers in `PICTURED`."""
    logprobs = []
    for messages, images in PICTURED:
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                n_shown = str(messages[:i]).count("'image'")
                paths = [folder / f"{image}.png" for image in images[:n_shown]]
                logprobs.append(pictured_logprobs(model_path, messages[: i + 1], paths))
    return -torch.cat(logprobs).mean().item()


def pictured_run(folder: Path, model: Path, name: str, *settings: str) -> Run:
    """Train one step on all conversations of `PICTURED`."""
    write_pictures(folder)
    rows = [{"messages": messages, "images": [f"{i}.png" for i in images]} for messages, images in PICTURED]
    for split in ("train", "val"):
        write_rows(folder, rows, f"{split}.jsonl")
    settings = ("eval_before_train=true", "epochs=1", "train_batch_size=4", "ckpt_interval=-1", *settings)
    overrides = (f"trainer.{setting}" for setting in settings)
    return sft(*supervised_run(folder, *overrides, model=model, data=folder, name=name))


@pytest.mark.parametrize("trains_vision", [False, True])
def test_images_have_the_loss_of_the_models_own_forward_pass_for_any_micro_batch(
    trains_vision: bool, vision_model_path: Path, tmp_path: Path
) -> None:
    results = []
    for n_rows in ("null", "2"):
        size = f"micro_train_batch_size_per_gpu={n_rows}"
        frozen = f"policy.model.freeze_vision={not trains_vision}"
        run = pictured_run(tmp_path, vision_model_path, f"rows-{n_rows}", size, frozen)
        before, first = run.metrics
        results.append([before["val/loss"], first["train/loss"], first["train/grad_norm"], first["val/loss"]])
    expected, after = naive_pictured_loss(vision_model_path, tmp_path), naive_pictured_loss(run.export(1), tmp_path)
    assert results[0] == pytest.approx([expected, expected, results[0][2], after], abs=1e-5)
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert after < expected - 0.01
    old, new = (load_file(path / "model.safetensors") for path in (vision_model_path, run.export(1)))
    changed = {key for key in old if not torch.equal(old[key], new[key])}
    assert trains_vision == any("vision" in key for key in changed)


def test_an_adapter_learns_from_images(vision_model_path: Path, tmp_path: Path) -> None:
    run = pictured_run(tmp_path, vision_model_path, "run", "policy.model.lora.rank=4", "gradient_checkpointing=true")
    before, first = run.metrics
    assert before["val/loss"] == pytest.approx(naive_pictured_loss(vision_model_path, tmp_path), abs=1e-5)
    assert first["val/loss"] < before["val/loss"] - 1e-3


def test_one_sample_is_learned_and_ends_with_the_eos_token(named: Overrides, data: Path) -> None:
    (data / "train.jsonl").write_text(json.dumps({"prompt": "Who are you?", "response": "A model of 2 layers."}))
    settings = ["trainer.train_batch_size=1", "trainer.epochs=30", "trainer.policy.optimizer_config.lr=1e-2"]
    run = sft(*named("run", *settings, *UNSAVED))
    assert run.metrics[-1]["train/loss"] < 0.05
    tokenizer = AutoTokenizer.from_pretrained(run.export(30))
    model = AutoModelForCausalLM.from_pretrained(run.export(30))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    reply = model.generate(prompt, max_new_tokens=50, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(reply) == "A model of 2 layers.<|im_end|>"


def test_bfloat16_weights_learn_like_float32_ones(named: Overrides, tiny_model_path: Path, tmp_path: Path) -> None:
    """At the learning rate of the recipe, most updates are too small to change a bfloat16 number."""
    base, losses = tmp_path / "base", {}
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(base)
    AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.bfloat16).save_pretrained(base)
    settings = [
        f"trainer.policy.model.path='{base}'",
        "trainer.epochs=2",
        "trainer.policy.optimizer_config.lr=2e-6",
        "trainer.eval_before_train=true",
        "trainer.eval_interval=4",
    ]
    for dtype in ("float32", "bfloat16"):
        run = sft(*named(dtype, *settings, f"trainer.policy.model.dtype={dtype}"))
        losses[dtype] = [row["val/loss"] for row in run.metrics if "val/loss" in row]
        assert {str(tensor.dtype) for tensor in run.weights(4).values()} == {f"torch.{dtype}"}
    assert losses["float32"][-1] < losses["float32"][0] - 1e-4
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=1e-5)
    parts = named("parts", *settings, "trainer.policy.model.dtype=bfloat16")
    stop_after(3, *parts, command="sft")
    assert_equal_runs(sft(*parts), run)


def test_a_run_that_ends_by_epochs_keeps_its_batch_size(named: Overrides) -> None:
    settings = named("run", "trainer.eval_interval=-1")
    sft(*settings, "trainer.train_batch_size=2", "trainer.max_training_steps=2")
    message = expect_error(*settings, command="sft")
    assert "with trainer.train_batch_size=5, because it was saved with 2 and the last step of trainer.epochs" in message
    fix = "set trainer.train_batch_size=2, or set trainer.max_training_steps to the last step, at most 6"
    assert fix in message
    assert sft(*settings, "trainer.max_training_steps=4").steps == [1, 2, 3, 4]


def test_the_metrics_have_the_names_of_the_recipes(whole: Run) -> None:
    assert whole.steps == [1, 2, 3, 4, 5, 6]
    rows = whole.metrics
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
    assert whole.checkpoints.steps() == [2, 4, 6]
    assert "Validation loss" in (whole.folder / "report.html").read_text()
    assert (whole.folder / "learning_curve.png").is_file()


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
    n_trained = n_first + (0 if is_frozen else n_second)
    assert count_flops(n_trained, n_first + n_second) * n_tokens == counter.get_total_flops()


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.nightly) for step in (1, 3)), 2, 5])
def test_a_run_that_stops_at_any_step_resumes_exactly(step: int, whole: Run, named: Overrides) -> None:
    parts = named("parts")
    stop_after(step, *parts, command="sft")
    assert_equal_runs(sft(*parts), whole)


def test_an_adapter_on_a_base_in_4_bits_learns_like_one_on_the_base(named: Overrides) -> None:
    settings = [
        "trainer.policy.model.lora.rank=8",
        "trainer.policy.optimizer_config.lr=1e-2",
        "trainer.eval_before_train=true",
    ]
    gains = []
    for quantize_base in ("none", "nf4"):
        run = sft(*named(quantize_base, *settings, f"trainer.policy.model.lora.quantize_base={quantize_base}"))
        losses = [row["val/loss"] for row in run.metrics if "val/loss" in row]
        gains.append(losses[0] - losses[-1])
    assert gains[0] > 0.5
    assert gains[1] == pytest.approx(gains[0], rel=0.2)


def test_the_dropout_of_an_adapter_is_applied_in_training_only_and_resumes_exactly(named: Overrides) -> None:
    intervals = ["trainer.eval_before_train=true", "trainer.eval_interval=1", "trainer.ckpt_interval=1"]
    lora = ["trainer.policy.model.lora.rank=4", "trainer.epochs=1", *intervals]
    dropout = [*lora, "trainer.policy.model.lora.dropout=0.5"]
    exact, dropped = (sft(*named(name, *settings)) for name, settings in (("exact", lora), ("dropped", dropout)))
    for key in ("val/loss", "train/loss"):
        (first, *later), (first_dropped, *later_dropped) = (
            [row[key] for row in run.metrics if key in row] for run in (exact, dropped)
        )
        assert first == first_dropped, f"the adapter starts as 0, so {key} is the base's"
        assert all(a != b for a, b in zip(later, later_dropped, strict=True))
    parts = named("parts", *dropout)
    stop_after(1, *parts, command="sft")
    assert_equal_runs(sft(*parts), dropped)
    checkpointed = sft(*named("checkpointed", *dropout, "trainer.gradient_checkpointing=true"))
    assert checkpointed.reproducible_metrics == [pytest.approx(row, abs=1e-5) for row in dropped.reproducible_metrics]
    unsaved = sft(*named("unsaved", *dropout, "trainer.ckpt_interval=-1"))
    assert unsaved.metrics[-1]["val/loss"] == dropped.metrics[-1]["val/loss"]


@pytest.mark.parametrize(
    ("scheduler", "shares", "jump"),
    [
        ("cosine", [0.5 + 0.5 * math.cos(math.pi * step / 6) for step in range(2, 6)], "0.00225"),
        ("wsd", [1, 1, 0.75, 0.25], "0.003"),
        ("constant_with_warmup", [1, 1, 1, 1], None),
    ],
)
def test_a_run_with_more_epochs_than_before_follows_their_schedule(
    scheduler: str, shares: list[float], jump: str | None, named: Overrides, caplog: pytest.LogCaptureFixture
) -> None:
    """`shares` are the learning rates of steps 3 to 6, as shares of the highest."""
    schedule = [f"{OPTIMIZER}.scheduler={scheduler}", f"{OPTIMIZER}.wsd_decay_ratio=0.5", "trainer.eval_interval=-1"]
    run = sft(*named("run", *schedule, "trainer.epochs=1"))
    assert run.steps == [1, 2]
    caplog.clear()
    sft(*named("run", *schedule))
    rates = [step["train/lr"] for step in run.metrics]
    assert rates[2:] == pytest.approx([3e-3 * share for share in shares])
    assert "Changed since the checkpoint: trainer.epochs: 1 -> 3" in caplog.messages
    jumps = [message for message in caplog.messages if message.startswith("The learning rate of the policy")]
    rest = "but the checkpoint's was 0, because the schedule has changed"
    assert jumps == ([f"The learning rate of the policy is {jump}, {rest}"] if jump else [])


CONSTANT_RATE = [
    *("trainer.eval_interval=-1", "trainer.hf_save_interval=1"),
    *(f"{OPTIMIZER}.scheduler=constant_with_warmup", f"{OPTIMIZER}.weight_decay=0"),
]


def test_weight_decay_that_a_resume_changes_shrinks_the_weights(named: Overrides) -> None:
    """AdamW subtracts lr · decay · w, so two runs from one checkpoint differ by that."""
    after = {}
    for name, decay in (("without", 0), ("with", 10)):
        first = named(name, *CONSTANT_RATE)
        _, (before, after[name]) = resume_with(first, [*first, f"{OPTIMIZER}.weight_decay={decay}"])
    for key, weight in before.items():
        torch.testing.assert_close(after["with"][key], after["without"][key] - 3e-3 * 10 * weight, atol=1e-6, rtol=1e-5)


def test_settings_that_a_resume_changes_are_used_and_shown(named: Overrides) -> None:
    """Adam's step is proportional to the learning rate, so another rate scales it."""
    rate, steps = f"{OPTIMIZER}.lr", {}
    for name, changes in (("same", []), ("run", [f"{rate}=0.01"])):
        first = named(name, *CONSTANT_RATE)
        run, (before, after) = resume_with(first, [*first, *changes])
        steps[name] = torch.cat([(after[key] - before[key]).flatten() for key in before])
    assert [step["train/lr"] for step in run.metrics] == [3e-3, 0.01]
    assert (steps["run"] * 0.3 - steps["same"]).norm() < 1e-3 * steps["same"].norm()
    (change,) = RunFolder(run.folder).read_changes()
    assert change == {"after_step": 1, "settings": ["trainer.max_training_steps: 1 -> 2", f"{rate}: 0.003 -> 0.01"]}
    assert f"{rate}: 0.003 -&gt; 0.01" in (run.folder / "report.html").read_text()


def test_exports_that_do_not_fit_the_disk_raise_an_alert(
    named: Overrides, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Exports take 2 bytes per parameter, a checkpoint 10."""
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 0 if Path(path).name == "export" else 10**12))
    n_parameters = sum(tensor.numel() for tensor in load_file(tiny_model_path / "model.safetensors").values())
    in_bf16 = ("trainer.policy.model.dtype=bfloat16", "trainer.policy.model.train_dtype=bfloat16")
    one_step = ("trainer.eval_interval=-1", "trainer.hf_save_interval=1", "trainer.max_training_steps=1")
    sft(*named("run", *in_bf16, *one_step))
    assert f"the 1 exports of this run take at least {2 * n_parameters:,}" in caplog.text


def test_a_checkpoint_of_other_data_is_refused(named: Overrides, data: Path) -> None:
    sft(*named("run", "trainer.max_training_steps=2"))
    (data / "train.jsonl").write_text((data / "val.jsonl").read_text() * 2)
    message = expect_error(*named("run"), command="sft")
    assert "the checkpoint was made with n_rows=11, but this run has n_rows=6" in message
