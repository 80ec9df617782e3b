import math
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.datasets import write_pairs
from train_kit.messages import assistant, user
from train_kit.runs import assert_equal_runs, expect_error, preference_run, read_lines, stop_after, train, train_with
from train_kit.vision_models import pictured_logprobs, pictured_reward, write_pictures
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    PreTrainedModel,
)

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.errors import DivergenceError
from skyrl_train.models.scoring_module import ScoringModule

BETA = 0.3


Overrides = Callable[..., list[str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with 9 pairs to train on and 3 to validate on."""
    return write_pairs(tmp_path)


@pytest.fixture
def named(data: Path, tiny_model_path: Path, tmp_path: Path) -> Overrides:
    """Return the overrides of a named run of four steps."""
    return lambda name, *overrides: preference_run(tmp_path, *overrides, model=tiny_model_path, data=data, name=name)


def read_pairs(file: Path) -> list[tuple[str, str, str]]:
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in read_lines(file)]


def token_ids(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt with the answer's header, and the answer's tokens."""
    parts = (f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>")
    head, body = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    return head, body


def answer_logprobs(model: PreTrainedModel, tokenizer: Any, prompt: str, answer: str) -> torch.Tensor:
    """Return the log-probs of the answer's tokens, one row at a time."""
    head, body = token_ids(tokenizer, prompt, answer)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([head + body])).logits[0].double().log_softmax(dim=-1)
    return logprobs[len(head) - 1 : -1].gather(1, torch.tensor(body)[:, None])[:, 0]


def naive_dpo(policy_path: Path, ref_path: Path, file: Path, loss_type: str, smoothing: float) -> dict[str, float]:
    """Return the metrics of a file of pairs, one row after the other."""
    tokenizer = AutoTokenizer.from_pretrained(ref_path)
    policy, ref = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (policy_path, ref_path))
    sums = dict.fromkeys(("loss", "accuracy", "margin", "chosen_reward", "rejected_reward"), 0.0)
    pairs = read_pairs(file)
    for prompt, *answers in pairs:
        ratios: list[float] = []
        means: list[float] = []
        for answer in answers:
            gap = answer_logprobs(policy, tokenizer, prompt, answer) - answer_logprobs(ref, tokenizer, prompt, answer)
            ratios.append(gap.sum().item())
            means.append(gap.mean().item())
        margin = ratios[0] - ratios[1]
        if loss_type == "ipo":
            loss = (means[0] - means[1] - 1 / (2 * BETA)) ** 2
        else:
            p = 1 / (1 + math.exp(-BETA * margin))
            loss = -(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p)
        for name, value in {
            "loss": loss,
            "accuracy": float(margin > 0),
            "margin": BETA * margin,
            "chosen_reward": BETA * ratios[0],
            "rejected_reward": BETA * ratios[1],
        }.items():
            sums[name] += value / len(pairs)
    return sums


@pytest.mark.parametrize(
    ("loss", "smoothing", "memory"),
    [
        ("sigmoid", 0.0, ["micro_train_batch_size_per_gpu=1", "micro_forward_batch_size_per_gpu=1"]),
        ("sigmoid", 0.1, ["micro_train_batch_size_per_gpu=3", "max_tokens_per_microbatch=60"]),
        ("ipo", 0.0, ["micro_train_batch_size_per_gpu=null"]),
    ],
)
def test_the_loss_of_dpo_is_that_of_the_formula_for_any_micro_batch(
    loss: str, smoothing: float, memory: list[str], named: Overrides, data: Path, tiny_model_path: Path
) -> None:
    settings = [f"dpo.loss_type={loss}", f"dpo.beta={BETA}", f"dpo.label_smoothing={smoothing}", "ckpt_interval=-1"]
    settings += ["train_batch_size=9", "epochs=1", "eval_before_train=true", *memory]
    run = train(*named("run", *(f"trainer.{setting}" for setting in settings)), command="dpo")
    before, first = run.metrics
    at_reference = (1 / (2 * BETA)) ** 2 if loss == "ipo" else math.log(2)
    assert before["val/loss"] == pytest.approx(at_reference, abs=1e-6)
    assert first["train/loss"] == pytest.approx(at_reference, abs=1e-6)
    expected = naive_dpo(run.export(1), tiny_model_path, data / "val.jsonl", loss, smoothing)
    assert expected["margin"] != pytest.approx(0, abs=1e-3)
    assert {name: first[f"val/{name}"] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


PLACE, WHERE = {"type": "image"}, {"type": "text", "text": "Where?"}
PICTURED = [([0], "Left", "Right"), ([1, 2], "Up and left", "Down"), ([3], "Here", "There it is")]
"""Images, the chosen and the rejected answer."""


def read_pictured(folder: Path) -> list[tuple[list[Any], list[Path], list[str]]]:
    """Write pairs with images. Return prompts, images, and the chosen and the rejected answer of each."""
    write_pictures(folder)
    pairs = [
        ([user([*[PLACE] * len(images), WHERE])], [folder / f"{i}.png" for i in images], answers)
        for images, *answers in PICTURED
    ]
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected, "images": [path.name for path in paths]}
        for prompt, paths, (chosen, rejected) in pairs
    ]
    for split in ("train", "val"):
        write_jsonl(folder / f"{split}.jsonl", rows)
    return pairs


@pytest.mark.parametrize("max_rows", ["null", "2"])
@pytest.mark.parametrize("command", ["dpo", "reward"])
def test_pairs_with_images_are_learned(command: str, max_rows: str, vision_model_path: Path, tmp_path: Path) -> None:
    """The margins match transformers' own forward passes."""
    pairs = read_pictured(tmp_path)
    settings = [f"dpo.beta={BETA}"] if command == "dpo" else []
    settings += ["train_batch_size=3", "epochs=1", f"micro_train_batch_size_per_gpu={max_rows}"]
    overrides = [f"trainer.{setting}" for setting in settings]
    run = train(*preference_run(tmp_path, *overrides, model=vision_model_path, data=tmp_path), command=command)
    (first,) = run.metrics
    trained = run.export(1, "reward" if command == "reward" else "policy")

    def score(messages: list[Any], paths: list[Path]) -> float:
        if command == "reward":
            return pictured_reward(trained, messages, paths)
        policy, ref = (pictured_logprobs(model, messages, paths).sum().item() for model in (trained, vision_model_path))
        return BETA * (policy - ref)

    margins = []
    for prompt, paths, answers in pairs:
        chosen, rejected = (score([*prompt, assistant(answer)], paths) for answer in answers)
        margins.append(chosen - rejected)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["val/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    assert first["val/margin"] > 0.01


@pytest.mark.parametrize(
    ("command", "max_rows", "n_passes"),
    [
        ("dpo", "null", {False: 1, True: 1}),
        ("dpo", "2", {False: 4, True: 4}),
        ("dpo", "1", {False: 16, True: 8}),
        ("reward", "null", {True: 1}),
        ("reward", "1", {False: 8, True: 8}),
    ],
)
def test_pairs_that_fit_into_a_pass_are_not_scored_before_it(
    command: str, max_rows: str, n_passes: dict[bool, int], named: Overrides
) -> None:
    """`n_passes` counts the passes of a step with 4 pairs, by whether they record gradients. DPO has a reference."""
    limits = [f"trainer.micro_{kind}_batch_size_per_gpu={max_rows}" for kind in ("train", "forward")]
    passes: Counter[bool] = Counter()
    is_step = False

    def count(module: torch.nn.Module, *_: Any) -> None:
        if isinstance(module, ScoringModule) and is_step:
            passes[torch.is_grad_enabled()] += 1

    class Steps(Callback):
        async def on_train_start(self, run: Run) -> None:
            nonlocal is_step
            is_step = True

        async def on_step_end(self, run: Run, report: StepReport) -> None:
            nonlocal is_step
            is_step = report.global_step == 0
            run.request_stop("for the test") if report.global_step else None

    overrides = named("run", *limits, "trainer.ckpt_interval=-1", "trainer.eval_interval=-1")
    with torch.nn.modules.module.register_module_forward_pre_hook(count), pytest.raises(KeyboardInterrupt):
        train_with(*overrides, first=[Steps()], command=command)
    assert passes == n_passes


def test_dpo_reaches_the_optimum_on_two_answers(named: Overrides, data: Path) -> None:
    """A is preferred in 3 pairs of 4: at the optimum σ(margin) = 3/4, and the loss is the entropy of that coin."""
    pair = {"prompt": "A or B?", "chosen": "A", "rejected": "B"}
    swapped = pair | {"chosen": "B", "rejected": "A"}
    write_jsonl(data / "train.jsonl", [pair, pair, pair, swapped])
    settings = ["trainer.epochs=60", "trainer.dpo.beta=0.5", "trainer.eval_interval=-1", "trainer.ckpt_interval=-1"]
    last = train(*named("run", *settings), command="dpo").metrics[-1]
    assert last["train/loss"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-4)
    assert last["train/accuracy"] == 0.75


def test_the_reference_of_an_adapter_is_the_model_without_it(
    named: Overrides, tiny_model_path: Path, tmp_path: Path
) -> None:
    lora = ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.alpha=8", f"trainer.dpo.beta={BETA}"]
    off = train(*named("off", *lora), command="dpo")
    copied = tmp_path / "copy"
    copied.symlink_to(tiny_model_path)
    frozen = train(*named("frozen", *lora, f"trainer.ref.model.path='{copied}'"), command="dpo")
    assert off.reproducible_metrics == frozen.reproducible_metrics
    assert off.metrics[-1]["train/margin"] > 0.01

    adapter = f"trainer.policy.model.lora.lora_path='{off.export(4)}'"
    more = train(*named("more", adapter, "trainer.max_training_steps=1"), command="dpo")
    assert more.metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("command", ["dpo", "reward"])
def test_a_stopped_run_resumes_exactly(command: str, named: Overrides) -> None:
    whole = train(*named("whole"), command=command)
    stop_after(1, *named("parts"), command=command)
    parts = train(*named("parts"), command=command)
    assert_equal_runs(parts, whole)
    assert "Preferred answers" in (parts.folder / "report.html").read_text()
    assert (parts.folder / "learning_curve.png").is_file()


def naive_rewards(folder: Path, file: Path) -> list[float]:
    """Return the margin of each pair of a file, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    margins = []
    for prompt, *answers in read_pairs(file):
        rows = [list(chain(*token_ids(tokenizer, prompt, answer))) for answer in answers]
        batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            chosen, rejected = model(**batch).logits[:, 0].tolist()
        margins.append(chosen - rejected)
    return margins


def test_transformers_reads_the_rewards_that_were_trained(named: Overrides, data: Path) -> None:
    memory = ["trainer.micro_train_batch_size_per_gpu=1", "trainer.gradient_checkpointing=true"]
    run = train(*named("run", *memory), command="reward")
    assert run.metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    margins = naive_rewards(run.export(4, "reward"), data / "val.jsonl")
    assert run.metrics[-1]["val/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-6)
    loss = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)
    assert run.metrics[-1]["val/loss"] == pytest.approx(loss, abs=1e-6)


def test_a_reward_model_ranks_held_out_pairs(named: Overrides, data: Path) -> None:
    """The better answer has the larger share of sevens."""
    generator = torch.Generator().manual_seed(0)

    def answer(n_sevens: int) -> str:
        digits = ["7"] * n_sevens + ["3"] * (8 - n_sevens)
        return "".join(digits[i] for i in torch.randperm(8, generator=generator).tolist())

    def write_rows(name: str, n_rows: int) -> None:
        counts = [sorted(torch.randperm(9, generator=generator)[:2].tolist()) for _ in range(n_rows)]
        rows = [{"prompt": "Sevens!", "chosen": answer(high), "rejected": answer(low)} for low, high in counts]
        write_jsonl(data / name, rows)

    write_rows("train.jsonl", 160)
    write_rows("val.jsonl", 60)
    settings = ["epochs=3", "train_batch_size=16", "eval_interval=60", "ckpt_interval=-1"]
    run = train(*named("run", *(f"trainer.{setting}" for setting in settings)), command="reward")
    assert run.metrics[-1]["val/accuracy"] > 0.95


@pytest.mark.parametrize("interval", [1, 100])
def test_a_reward_model_that_diverges_is_not_saved(interval: int, named: Overrides, tmp_path: Path) -> None:
    """With equal prompts and answers that are easy to tell apart, the loss of the diverged model may even be 0."""
    settings = ["policy.optimizer_config.lr=1000", f"ckpt_interval={interval}", "hf_save_interval=1"]
    overrides = named("run", *(f"trainer.{setting}" for setting in settings))
    error = expect_error(*overrides, command="reward", status=3)
    assert "the reward model has diverged with trainer.policy.optimizer_config.lr=1000: the rewards of" in error
    assert "there is no earlier checkpoint" in error
    assert not list(tmp_path.rglob("global_step_*"))


def test_a_divergence_names_a_checkpoint_that_is_being_written(named: Overrides) -> None:
    class Diverge(Callback):
        async def on_step_end(self, run: Any, report: StepReport) -> None:
            if report.global_step == 2:
                await run.begin_checkpoint()
                assert run.is_saving
                (worker,) = run.models.policy._ranks[0].host.workers.values()
                next(worker.module.parameters()).data.fill_(math.nan)
                await run.check_weights(2)

    overrides = named("run", "trainer.ckpt_interval=-1", "trainer.eval_interval=-1")
    with pytest.raises(DivergenceError, match="the checkpoint of step 2 is kept"):
        train_with(*overrides, first=[Diverge()], command="reward")


@pytest.mark.parametrize("max_length", ["null", "40"])
def test_rows_of_a_reward_model_fit_into_its_context(
    max_length: str, named: Overrides, data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    """The last token is repeated, and a model with learned positions has none beyond its context."""
    model, tokenizer = tmp_path / "model", AutoTokenizer.from_pretrained(tiny_model_path)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=40)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    for name in ("train", "val"):
        rows = [{"prompt": "Count!", "chosen": "1" * n, "rejected": "2" * n} for n in range(20, 60)]
        write_jsonl(data / f"{name}.jsonl", rows)
    limits = [f"data.max_length={max_length}", "data.truncation=right", "trainer.max_training_steps=1"]
    train(*named("run", f"trainer.policy.model.path='{model}'", *limits), command="reward")
