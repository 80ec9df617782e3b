"""Runs whose memory runs out: they continue, or end with one message and resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.datasets import write_answers, write_pairs
from train_kit.runs import (
    Run,
    assert_close_runs,
    assert_equal_runs,
    expect_error,
    preference_run,
    run_of,
    supervised_run,
    train,
    train_with,
)
from train_kit.shortages import SHORTAGES, limit_tokens

from skyrl_train import trainer
from skyrl_train.algorithms.objectives import PolicyObjective
from skyrl_train.distributed import SingleStrategy
from skyrl_train.errors import OutOfMemoryError
from skyrl_train.inference_engines.hf import packed
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.run import Callback
from skyrl_train.run import Run as TrainingRun
from skyrl_train.workers.worker import Worker

STATUS = OutOfMemoryError.exit_status
EXPORT = "trainer.hf_save_interval=100"
CRITIC = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic_mini_batch_size=4", "generator.batched=true"]
BUDGET = "trainer.max_tokens_per_microbatch"


@pytest.fixture
def command(catch_run: list[str], tmp_path: Path, tiny_model_path: Path) -> Callable[..., list[str]]:
    """Return the overrides of a run of a command."""

    def overrides(kind: str, name: str) -> list[str]:
        if kind == "sft":
            return supervised_run(tmp_path, model=tiny_model_path, data=write_answers(tmp_path), name=name)
        if kind in ("dpo", "reward"):
            return preference_run(tmp_path, model=tiny_model_path, data=write_pairs(tmp_path), name=name)
        return [*catch_run, f"trainer.critic.model.path={tiny_model_path}", f"trainer.run_name={name}", EXPORT]

    return overrides


LORA_DROPOUT = ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.dropout=0.3"]


@pytest.mark.parametrize(
    ("kind", "settings", "limit", "roles"),
    [
        ("train", CRITIC, 600, {"policy", "critic", "ref"}),
        ("sft", LORA_DROPOUT, 100, {"policy"}),
        ("dpo", [], 100, {"policy", "ref"}),
        ("reward", [], 100, {"reward"}),
    ],
)
def test_a_run_continues_with_the_results_of_the_smaller_budget(
    kind: str,
    settings: list[str],
    limit: int,
    roles: set[str],
    command: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        limit_tokens(patch, limit, backward=kind == "sft")  # after the dropout of the forward pass
        run = train(*command(kind, "short"), *settings, command=kind)
    budgets = {name: value for name, value in run.metrics[-1].items() if "max_tokens_per_microbatch" in name}
    assert {name.rpartition("_")[2] for name in budgets} == roles
    (budget,) = set(budgets.values())
    assert "is retried with micro-batches of at most" in run.log
    assert_equal_runs(run, train(*command(kind, "budget"), *settings, f"{BUDGET}={budget:g}", command=kind))


FOUR_STEPS = [
    "trainer.epochs=2",
    "trainer.ckpt_interval=100",
    "trainer.eval_interval=-1",
    "trainer.policy.optimizer_config.lr=1e-3",
    "generator.batched=true",
]


@pytest.fixture
def uninterrupted(catch_run: list[str]) -> Run:
    """A run of four steps."""
    return train(*catch_run, *FOUR_STEPS, EXPORT, "trainer.run_name=uninterrupted")


def raising(*_: object, **__: object) -> Any:
    raise SHORTAGES["cpu"]()


class Shortage(Callback):
    """Replaces an attribute by a function that fails, from the end of step 2 on."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self._apply = lambda: patch.setattr(owner, name, raising)

    async def on_step_end(self, run: TrainingRun, report: Any) -> None:
        if report.global_step == 2:
            self._apply()


@pytest.mark.parametrize(
    ("owner", "name", "stage", "is_saved"),
    [
        (packed, "hidden_states", "generation ran out of memory in a step of", True),
        (ScoringModule, "forward", "the ref ran out of memory during score", True),
        (PolicyObjective, "__call__", "the policy ran out of memory during forward_backward", True),
        (SingleStrategy, "clip_gradients", "the policy ran out of memory during optim_step", False),
        (Worker, "send_weights", "the policy ran out of memory during send_weights", False),
        (trainer, "build_training_batch", "the run ran out of memory", True),
    ],
)
def test_a_shortage_ends_the_run_with_one_message_and_a_rerun_resumes(
    owner: Any,
    name: str,
    stage: str,
    is_saved: bool,
    catch_run: list[str],
    uninterrupted: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [*catch_run, *FOUR_STEPS, EXPORT]
    with monkeypatch.context() as patch, pytest.raises(OutOfMemoryError) as error:
        train_with(*overrides, last=[Shortage(patch, owner, name)])
    message = str(error.value)
    assert message.startswith(stage)
    assert "peak" in message
    assert "To save memory, set (the cheapest first)" in message
    assert ("trainer.gradient_checkpointing=true" in message) == ("forward_backward" in stage)
    assert ("trainer.algorithm.use_kl_loss=false" in message) == ("generation" not in stage)
    saved = "resumes from step 2" if is_saved else "starts again, because there is no checkpoint"
    assert message.endswith(f"the same command {saved}")
    run = run_of(overrides)
    assert run.checkpoints.steps() == ([2] if is_saved else [])
    assert ("Step 3 had begun to change the weights" in run.log) == (not is_saved)
    train(*overrides)
    assert_equal_runs(run, uninterrupted)


def test_the_command_prints_one_line_and_has_its_own_exit_status(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_tokens(monkeypatch, 5)
    message = expect_error(*catch_run, status=STATUS)
    assert message.count("error:") == 1


def test_a_copy_without_room_in_host_memory_costs_one_checkpoint(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = SingleStrategy.copy, []

    def copy_later(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise SHORTAGES["cpu"]()
        return copy(*args)

    monkeypatch.setattr(SingleStrategy, "copy", copy_later)
    run = train(*catch_run, *FOUR_STEPS, "trainer.ckpt_interval=1")
    assert run.checkpoints.steps() == [1, 3, 4]
    assert "host memory has no room for a copy of the policy" in run.log
    assert [step.get("storage/alerts", 0) for step in run.metrics] == [0, 0, 0, 1, 1]


def test_weights_that_cannot_be_probed_are_saved_if_they_are_finite(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "probe", raising)
    run = train(*catch_run, "trainer.ckpt_interval=1")
    assert run.checkpoints.steps() == [1, 2]
    assert "The weights are finite, but are not checked further" in run.log


def test_rollouts_are_the_same_after_a_step_that_ran_out_of_memory(
    catch_run: list[str], uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden_states = packed.hidden_states

    def limited(model: Any, memory: Any, rows: Any, **options: Any) -> torch.Tensor:
        if sum(row.n_new for row in rows) > 300 or len(rows) > 5:
            raise SHORTAGES["cpu"]()
        return hidden_states(model, memory, rows, **options)

    monkeypatch.setattr(packed, "hidden_states", limited)
    run = train(*catch_run, *FOUR_STEPS, EXPORT)
    assert "It is repeated with generator.max_num_seqs=" in run.log
    assert_close_runs(run, uninterrupted)
