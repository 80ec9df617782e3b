from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train_kit.datasets import prompt_row
from train_kit.runs import expect_error, small_run, train, train_with

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.callbacks import StepReport, is_due
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.trainer import Step, Trainer
from skyrl_train.workers.worker import Worker


class FlakyEnv(BaseTextEnv):
    """An environment that raises for short replies and otherwise rewards length."""

    fails_below = 0
    failing: frozenset[int] = frozenset()  # numbers of further failing environments, in order of creation
    n_created = 0

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.number = FlakyEnv.n_created
        FlakyEnv.n_created += 1

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if len(action) < self.fails_below or self.number in self.failing:
            raise RuntimeError(f"reply {action!r} is too short")
        return BaseTextEnvStepOutput(observations=[], reward=len(action) / 10, done=True, metadata={})


@pytest.fixture(autouse=True)
def _flaky() -> Iterator[None]:
    FlakyEnv.n_created = 0
    skyrl_gym.register(id="flaky", entry_point=FlakyEnv)
    yield
    skyrl_gym.envs.deregister("flaky")


@pytest.fixture
def overrides(tiny_model_path: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run of one step."""
    write_jsonl(tmp_path / "rows.jsonl", [prompt_row("say something", "flaky")] * 4)
    settings = ["trainer.ckpt_interval=-1", "generator.n_samples_per_prompt=4"]
    return small_run(tmp_path, *settings, model=tiny_model_path, data=tmp_path / "rows.jsonl")


def test_failed_rollouts_are_counted_and_not_trained(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlakyEnv, "fails_below", 12)
    step = train(*overrides).metrics[-1]
    n_failed = step["generate/n_invalid"]
    assert 0 < n_failed < 16, "some rollouts must fail and some succeed; choose another limit"
    assert step["reward/avg_raw_reward"] >= 1.2, "a failed rollout counted as reward 0"


def test_a_step_of_failures_ends_the_run_with_the_first_reason(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlakyEnv, "fails_below", 10_000)
    message = expect_error(*overrides)
    assert "error: 16 of 16 rollouts at step 1 failed" in message
    assert "is too short" in message


@pytest.mark.parametrize(
    ("settings", "n_passes"),
    [
        (["trainer.algorithm.use_kl_loss=false"], 0),
        (["trainer.algorithm.use_kl_loss=false", "trainer.policy_mini_batch_size=2"], 1),
        (["trainer.algorithm.use_kl_loss=false", "trainer.update_epochs_per_batch=2"], 1),
    ],
    ids=["one mini-batch, one epoch", "two mini-batches", "two epochs"],
)
def test_old_logprobs_are_scored_only_if_the_update_needs_them(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, settings: list[str], n_passes: int
) -> None:
    score, calls = Worker.score, []

    def counting_score(self: Worker, shard: Any, *args: Any) -> Any:
        calls.append(shard)
        return score(self, shard, *args)

    monkeypatch.setattr(Worker, "score", counting_score)
    assert train(*overrides, *settings).metrics[-1]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert len(calls) == n_passes


@pytest.mark.parametrize(
    ("interval", "step", "is_last", "due"),
    [(5, 0, False, False), (5, 4, False, False), (5, 5, False, True), (5, 7, True, True), (-1, 5, True, False)],
)
def test_is_due(interval: int, step: int, is_last: bool, due: bool) -> None:
    assert is_due(interval, StepReport(step, is_last, {})) == due
    assert is_due(interval, StepReport(step, is_last, {}), at_start=True) == (due or step == 0)


class OverlappingTrainer(Trainer):
    """A trainer that plays the rollouts of both steps before it updates, like an asynchronous trainer."""

    async def train(self) -> None:
        await self.start()
        steps = [Step(1), Step(2)]
        with steps[0].timer("step"), steps[1].timer("step"):
            rollouts = [await self.rollout(step) for step in steps]
            batches = [self.build_batch(step, played) for step, played in zip(steps, rollouts, strict=True)]
            batches = [await self.score(step, batch) for step, batch in zip(steps, batches, strict=True)]
            batches = [
                self.advantages(step, batch) for step, batch in zip(reversed(steps), reversed(batches), strict=True)
            ]
            for step, batch in zip(steps, reversed(batches), strict=True):
                await self.update(step, batch)
        for step in steps:
            await self.finish_step(step)


def test_overlapping_steps_report_their_own_metrics_and_trajectories(catch_run: list[str]) -> None:
    settings = ["trainer.dump_trajectories=true", "trainer.eval_interval=-1", "trainer.ckpt_interval=-1"]
    run = train_with(*catch_run, *settings, trainer=OverlappingTrainer)
    rows = {row["step"]: row for row in run.metrics}
    draws = []
    for step in (1, 2):
        played = run.trajectories(step)
        rewards = [t["total_reward"] for t in played]
        assert rows[step]["reward/avg_raw_reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert rows[step]["loss/avg_final_rewards"] == pytest.approx(sum(rewards) / len(rewards))
        assert rows[step]["policy/skipped_updates"] == 0
        draws.append({t["uid"].partition("_")[0] for t in played})
    assert rows[1]["reward/avg_raw_reward"] != rows[2]["reward/avg_raw_reward"]
    assert not draws[0] & draws[1]


def test_a_run_without_a_learning_signal_warns_once(overrides: list[str], caplog: pytest.LogCaptureFixture) -> None:
    greedy = ["generator.sampling_params.temperature=0", "trainer.algorithm.temperature=1"]  # equal samples
    run = train(*overrides, *greedy, "trainer.epochs=5")
    warnings = [record.message for record in caplog.records if "the policy is not learning" in record.message]
    assert len(warnings) == 1
    assert warnings[0] in (run.folder / "report.html").read_text()
