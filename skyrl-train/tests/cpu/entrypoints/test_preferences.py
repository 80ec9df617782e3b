"""Runs of `skyrl dpo` and `skyrl reward`: what they compute, log and leave."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sft_runs import metrics, write_pairs
from sft_runs import pair_overrides as overrides
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    PreTrainedModel,
)

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.config.cli import parse
from skyrl_train.config.preferences import DPO, REWARD
from skyrl_train.entrypoints.cli import main
from skyrl_train.entrypoints.preferences import DPOExp, RewardExp
from skyrl_train.errors import DivergenceError
from skyrl_train.models.scoring_module import ScoringModule

BETA = 0.3


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with 9 pairs to train on and 3 to validate on."""
    write_pairs(tmp_path)
    return tmp_path


def read_pairs(file: Path) -> list[tuple[str, str, str]]:
    return [(r["prompt"], r["chosen"], r["rejected"]) for r in map(json.loads, file.read_text().splitlines())]


def token_ids(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt with the header of an answer, and those of the answer."""
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
        ("sigmoid", 0.0, ["trainer.micro_train_batch_size_per_gpu=1", "trainer.micro_forward_batch_size_per_gpu=1"]),
        ("sigmoid", 0.1, ["trainer.micro_train_batch_size_per_gpu=3", "trainer.max_tokens_per_microbatch=60"]),
        ("ipo", 0.0, ["trainer.micro_train_batch_size_per_gpu=null"]),
    ],
)
def test_the_loss_of_dpo_is_that_of_the_formula_for_any_micro_batch(
    loss: str, smoothing: float, memory: list[str], data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out", *memory, f"trainer.dpo.loss_type={loss}")
    run += [f"trainer.dpo.beta={BETA}", f"trainer.dpo.label_smoothing={smoothing}", "trainer.ckpt_interval=-1"]
    assert main(["dpo", *run, "trainer.train_batch_size=9", "trainer.epochs=1", "trainer.eval_before_train=true"]) == 0
    before, first = metrics(tmp_path / "out")
    at_reference = (1 / (2 * BETA)) ** 2 if loss == "ipo" else math.log(2)
    assert before["val/loss"] == pytest.approx(at_reference, abs=1e-6)
    assert first["train/loss"] == pytest.approx(at_reference, abs=1e-6)
    exported = tmp_path / "out/skyrl/test_run/export/global_step_1/policy"
    expected = naive_dpo(exported, tiny_model_path, data / "val.jsonl", loss, smoothing)
    assert expected["margin"] != pytest.approx(0, abs=1e-3)
    assert {name: first[f"val/{name}"] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


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
    command: str, max_rows: str, n_passes: dict[bool, int], data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    """`n_passes` counts the passes of a step with 4 pairs, by whether they record gradients. DPO has a reference."""
    limits = [f"trainer.micro_{kind}_batch_size_per_gpu={max_rows}" for kind in ("train", "forward")]
    run = overrides(data, tiny_model_path, tmp_path / "out", *limits, "trainer.ckpt_interval=-1")
    passes: Counter[bool] = Counter()

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

    class Counted(DPOExp if command == "dpo" else RewardExp):  # type: ignore[misc]
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [Steps(), *super().get_callbacks(*parts)]

    is_step = False
    with torch.nn.modules.module.register_module_forward_pre_hook(count), pytest.raises(KeyboardInterrupt):
        Counted(parse([*run, "trainer.eval_interval=-1"], DPO if command == "dpo" else REWARD)).run()
    assert passes == n_passes


def test_dpo_reaches_the_optimum_on_two_answers(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    """A is preferred in 3 pairs of 4: at the optimum σ(margin) = 3/4, and the loss is the entropy of that coin."""
    pair = {"prompt": "A or B?", "chosen": "A", "rejected": "B"}
    swapped = pair | {"chosen": "B", "rejected": "A"}
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (pair, pair, pair, swapped)))
    run = overrides(data, tiny_model_path, tmp_path / "out", "trainer.epochs=60", "trainer.dpo.beta=0.5")
    assert main(["dpo", *run, "trainer.eval_interval=-1", "trainer.ckpt_interval=-1"]) == 0
    last = metrics(tmp_path / "out")[-1]
    assert last["train/loss"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-4)
    assert last["train/accuracy"] == 0.75


def test_the_reference_of_an_adapter_is_the_model_without_it(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    lora = ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.alpha=8", f"trainer.dpo.beta={BETA}"]
    assert main(["dpo", *overrides(data, tiny_model_path, tmp_path / "off", *lora)]) == 0
    copied = tmp_path / "copy"
    copied.symlink_to(tiny_model_path)
    frozen = [*lora, f"trainer.ref.model.path='{copied}'"]
    assert main(["dpo", *overrides(data, tiny_model_path, tmp_path / "frozen", *frozen)]) == 0
    assert metrics(tmp_path / "off") == metrics(tmp_path / "frozen")
    assert metrics(tmp_path / "off")[-1]["train/margin"] > 0.01

    adapter = tmp_path / "off/skyrl/test_run/export/global_step_4/policy"
    more = [f"trainer.policy.model.lora.lora_path='{adapter}'", "trainer.max_training_steps=1"]
    assert main(["dpo", *overrides(data, tiny_model_path, tmp_path / "more", *more)]) == 0
    assert metrics(tmp_path / "more")[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("command", ["dpo", "reward"])
def test_a_stopped_run_resumes_exactly(command: str, data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    """The schedule spans 4 steps in both parts, so the first one is stopped by a callback, not by a shorter run."""

    class Stop(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            if report.global_step == 1:
                run.request_stop("for the test")

    class StoppedDPO(DPOExp):
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [Stop(), *super().get_callbacks(*parts)]

    class StoppedReward(RewardExp):
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [Stop(), *super().get_callbacks(*parts)]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([command, *overrides(data, tiny_model_path, whole)]) == 0
    run = overrides(data, tiny_model_path, parts)
    with pytest.raises(KeyboardInterrupt):
        StoppedDPO(parse(run, DPO)).run() if command == "dpo" else StoppedReward(parse(run, REWARD)).run()
    assert len(metrics(parts)) == 1
    assert main([command, *run]) == 0
    assert metrics(parts) == metrics(whole)
    role = "policy" if command == "dpo" else "reward"
    ours, theirs = (
        load_file(p / f"skyrl/test_run/export/global_step_4/{role}/model.safetensors") for p in (parts, whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    folder = parts / "skyrl/test_run"
    assert "Preferred answers" in (folder / "report.html").read_text()
    assert (folder / "learning_curve.png").is_file()


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


@pytest.mark.parametrize(
    "memory", [["trainer.micro_train_batch_size_per_gpu=1"], ["trainer.gradient_checkpointing=true"]]
)
def test_transformers_reads_the_rewards_that_were_trained(
    memory: list[str], data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    assert main(["reward", *overrides(data, tiny_model_path, tmp_path / "out", *memory)]) == 0
    rows = metrics(tmp_path / "out")
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    margins = naive_rewards(tmp_path / "out/skyrl/test_run/export/global_step_4/reward", data / "val.jsonl")
    assert rows[-1]["val/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-6)
    loss = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)
    assert rows[-1]["val/loss"] == pytest.approx(loss, abs=1e-6)


def test_a_reward_model_ranks_held_out_pairs(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    """The better answer has the larger share of sevens."""
    generator = torch.Generator().manual_seed(0)

    def answer(n_sevens: int) -> str:
        digits = ["7"] * n_sevens + ["3"] * (8 - n_sevens)
        return "".join(digits[i] for i in torch.randperm(8, generator=generator).tolist())

    def rows(n_rows: int) -> str:
        lines = []
        for _ in range(n_rows):
            worse, better = sorted(torch.randperm(9, generator=generator)[:2].tolist())
            lines.append({"prompt": "Sevens!", "chosen": answer(better), "rejected": answer(worse)})
        return "".join(json.dumps(line) + "\n" for line in lines)

    (data / "train.jsonl").write_text(rows(160))
    (data / "val.jsonl").write_text(rows(100))
    run = overrides(data, tiny_model_path, tmp_path / "out", "trainer.epochs=6", "trainer.train_batch_size=16")
    assert main(["reward", *run, "trainer.eval_interval=60", "trainer.ckpt_interval=-1"]) == 0
    assert metrics(tmp_path / "out")[-1]["val/accuracy"] > 0.95


@pytest.mark.parametrize("interval", [1, 100])
def test_a_reward_model_that_diverges_is_not_saved(
    interval: int, data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With equal prompts and answers that are easy to tell apart, the loss of the diverged model may even be 0."""
    more = [
        "trainer.policy.optimizer_config.lr=1000",
        f"trainer.ckpt_interval={interval}",
        "trainer.hf_save_interval=1",
    ]
    run = overrides(data, tiny_model_path, tmp_path / "out", *more)
    assert main(["reward", *run]) == 3
    error = capsys.readouterr().err
    assert "the reward model has diverged with trainer.policy.optimizer_config.lr=1000: the rewards of" in error
    assert "there is no earlier checkpoint" in error
    assert not list((tmp_path / "out").rglob("global_step_*"))


def test_a_divergence_names_a_checkpoint_that_is_being_written(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Diverge(Callback):
        async def on_step_end(self, run: Any, report: StepReport) -> None:
            if report.global_step == 2:
                await run.begin_checkpoint()
                assert run.is_saving
                next(run.models.policy._ranks[0].worker.module.parameters()).data.fill_(math.nan)
                await run.check_weights(2)

    class Diverging(RewardExp):
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [Diverge(), *super().get_callbacks(*parts)]

    run = overrides(data, tiny_model_path, tmp_path / "out", "trainer.ckpt_interval=-1", "trainer.eval_interval=-1")
    with pytest.raises(DivergenceError, match="the checkpoint of step 2 is kept"):
        Diverging(parse(run, REWARD)).run()


def test_a_reward_model_is_trained_as_an_adapter(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    lora = ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.merge_on_export=true"]
    assert main(["reward", *overrides(data, tiny_model_path, tmp_path / "out", *lora)]) == 0
    folder = tmp_path / "out/skyrl/test_run/export/global_step_4/reward"
    margins = naive_rewards(folder, data / "val.jsonl")
    assert metrics(tmp_path / "out")[-1]["val/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-6)
    assert json.loads((folder / "lora_adapter/adapter_config.json").read_text())["task_type"] == "SEQ_CLS"


def test_plans_name_the_reference_and_the_loss(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out")
    assert main(["dpo", *run, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "loss         sigmoid · beta 0.1" in plan
    assert "reference    " in plan
    assert "each step    4 pairs of ≤ 200 tokens" in plan
    assert main(["dpo", *run, "trainer.policy.model.lora.rank=4", "--dry-run"]) == 0
    assert "reference    the policy without its adapter" in capsys.readouterr().out
    assert main(["reward", *run, "--dry-run"]) == 0
    assert "reward model " in capsys.readouterr().out
    assert main(["dpo", "--help", "trainer.dpo"]) == 0
    assert "trainer.dpo.loss_type=sigmoid  one of sigmoid, ipo" in capsys.readouterr().out
    assert main(["reward", "--help"]) == 0
    assert "skyrl reward --help SECTION" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("max_length", ["null", "40"])
def test_rows_of_a_reward_model_fit_into_its_context(
    max_length: str, data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    """The last token is repeated, and a model with learned positions has none beyond its context."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=40)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [json.dumps({"prompt": "Count!", "chosen": "1" * n, "rejected": "2" * n}) for n in range(20, 60)]
    for name in ("train", "val"):
        (data / f"{name}.jsonl").write_text("\n".join(rows))
    limits = [f"data.max_length={max_length}", "data.truncation=right", "trainer.max_training_steps=1"]
    assert main(["reward", *overrides(data, tmp_path / "model", tmp_path / "out", *limits)]) == 0


DROPOUT = "trainer.policy.model.lora.dropout=0.1"
MISTAKES = [
    ("dpo", "trainer.dpo.loss_type=hinge", "trainer.dpo.loss_type=hinge must be one of sigmoid, ipo"),
    ("dpo", "trainer.dpo.beta=0", "trainer.dpo.beta=0 must be a number > 0"),
    ("dpo", "trainer.dpo.label_smoothing=0.5", "trainer.dpo.label_smoothing=0.5 must be a number >= 0 and < 0.5"),
    ("dpo", "trainer.ref.model.path=/nowhere", "trainer.ref.model.path=/nowhere: there is no such folder"),
    ("dpo", "data.chosen_key=better", "has no 'better': it has the keys prompt, chosen, rejected; set data.chosen_key"),
    ("dpo", "data.response_key=x", "there is no key data.response_key"),
    ("reward", "trainer.dpo.beta=0.1", "there is no key trainer.dpo"),
    *(
        (command, DROPOUT, f"{DROPOUT} would score the answers of a pair with different")
        for command in ("dpo", "reward")
    ),
    ("reward", "data.max_length=5", "tokens, more than data.max_length=5; raise it, or set data.truncation"),
]


@pytest.mark.parametrize(("command", "mistake", "answer"), MISTAKES)
def test_mistakes_are_answered_in_a_sentence(
    command: str,
    mistake: str,
    answer: str,
    data: Path,
    tiny_model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, *overrides(data, tiny_model_path, tmp_path / "out", mistake)]) == 1
    assert answer in capsys.readouterr().err


def test_ipo_has_no_label_smoothing(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["trainer.dpo.loss_type=ipo", "trainer.dpo.label_smoothing=0.1"]
    assert main(["dpo", *overrides(data, tiny_model_path, tmp_path / "out", *wrong)]) == 1
    assert "trainer.dpo.label_smoothing=0.1 has no effect on trainer.dpo.loss_type=ipo" in capsys.readouterr().err
