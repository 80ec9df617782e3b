"""Runs with components that only some algorithms need: what they train on and log, and that they resume exactly."""

import asyncio
import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.datasets import write_prompts
from train_kit.runs import Run, assert_equal_runs, expect_error, run_of, small_run, train

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.algorithms import filters
from skyrl_train.learner import Learner
from skyrl_train.trainer import Step, Trainer
from skyrl_train.types import Metrics, TrainingBatch, Trajectory

GAE = "trainer.algorithm.advantage_estimator=gae"
KL_IN_REWARD = ["trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"]
FILTER = "trainer.algorithm.dynamic_sampling.type=filter"
REFRESH = "trainer.update_ref_every_epoch=true"
STEP_WISE = "generator.step_wise_trajectories=true"
ONE_STEP = "trainer.max_training_steps=1"

Overrides = Callable[..., list[str]]


class LettersEnv(BaseTextEnv):
    """An environment of two turns; rewards the letter "a" and, as a second component, short replies."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        components = {"letters": float(action.count("a")), "short": 1.0 - len(action) / 40}
        is_over = self.turns == 2
        return BaseTextEnvStepOutput(
            observations=[] if is_over else [{"role": "user", "content": "again"}],
            reward=sum(components.values()),
            done=is_over,
            metadata={"reward_components": components},
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The output folder of all runs."""
    skyrl_gym.register(id="letters", entry_point=LettersEnv)
    yield tmp_path_factory.mktemp("runs")
    skyrl_gym.envs.deregister("letters")


@pytest.fixture(scope="module")
def letters(folder: Path, tiny_model_path: Path) -> Overrides:
    """Return the overrides of a named run of two steps, with four prompts, four samples and two updates each."""
    settings = [
        "trainer.policy_mini_batch_size=2",
        "trainer.critic_mini_batch_size=2",
        "trainer.policy.optimizer_config.lr=1e-3",
        "trainer.critic.optimizer_config.lr=1e-3",
        "trainer.ckpt_interval=-1",
        "generator.batched=true",  # the batch of a forward pass affects the last bit
        "generator.max_turns=2",
        "generator.n_samples_per_prompt=4",
    ]
    data = write_prompts(folder / "rows.jsonl", 8, "letters")
    return lambda name, *overrides: small_run(
        folder, *settings, *overrides, model=tiny_model_path, data=data, name=name
    )


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[TrainingBatch]:
    """Every batch for which advantages were computed."""
    recorded: list[TrainingBatch] = []
    advantages = Learner.advantages

    def record(self: Learner, batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        batch, metrics = advantages(self, batch)
        recorded.append(batch)
        return batch, metrics

    monkeypatch.setattr(Learner, "advantages", record)
    return recorded


def values_by_prompt(batch: TrainingBatch, values: torch.Tensor) -> dict[int, set[float]]:
    """Return the distinct values of the rows of each prompt."""
    found: dict[int, set[float]] = defaultdict(set)
    for draw, value in zip(batch.draws.tolist(), values.tolist(), strict=True):
        found[draw].add(value)
    return found


# -- interrupted runs


def test_every_stateful_component_resumes_exactly(letters: Overrides, tiny_model_path: Path) -> None:
    """Critic, adaptive KL penalty, a reference updated every epoch, and dynamic sampling within an epoch."""
    settings = [
        GAE,
        f"trainer.critic.model.path='{tiny_model_path}'",
        *KL_IN_REWARD,
        "trainer.algorithm.kl_ctrl.type=adaptive",
        "trainer.algorithm.kl_ctrl.kl_target=0.001",
        "trainer.algorithm.kl_ctrl.horizon=32",
        FILTER,
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        REFRESH,
        "trainer.update_epochs_per_batch=2",
        "trainer.epochs=10",
        "trainer.ckpt_interval=3",
        "trainer.hf_save_interval=100",
    ]
    whole = train(*letters("whole", *settings, "trainer.max_training_steps=5"))
    train(*letters("parts", *settings, "trainer.max_training_steps=3"))
    parts = train(*letters("parts", *settings, "trainer.max_training_steps=5"))
    shutil.rmtree(parts.export(3).parent)
    assert_equal_runs(parts, whole)
    assert whole.export(5, "critic").is_dir()
    coefficients = [step["loss/kl_loss_coef"] for step in whole.metrics[1:]]
    assert len(set(coefficients)) == len(coefficients), "the adaptive coefficient changes at every step"
    assert {"policy", "critic", "ref"} <= {path.name for path in (whole.folder / "ckpts/global_step_5").iterdir()}
    assert whole.metrics[-1]["critic/grad_norm"] > 0
    assert whole.metrics[-1]["timing/critic_train"] > 0


FOUR_STEPS = ["trainer.epochs=2", "trainer.ckpt_interval=100", "environment.skyrl_gym.max_env_workers=0"]


@pytest.fixture(scope="module")
def four_steps(letters: Overrides) -> Run:
    return train(*letters("uninterrupted", *FOUR_STEPS))


def test_a_step_with_failing_rollouts_keeps_all_steps_before_it(
    letters: Overrides, four_steps: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, n_turns = LettersEnv.step, 0

    def fail_in_the_third_step(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        nonlocal n_turns
        n_turns += 1
        if n_turns > 2 * 4 * 4 * 2:
            raise ConnectionError("the service is down")
        return step(self, action)

    overrides = letters("failing", *FOUR_STEPS)
    with monkeypatch.context() as patch:
        patch.setattr(LettersEnv, "step", fail_in_the_third_step)
        assert "the service is down" in expect_error(*overrides)
    run = run_of(overrides)
    assert "Saved the checkpoint at step 2. Rerun the command: it resumes from step 2" in run.log
    assert run.checkpoints.latest() == run.folder / "ckpts/global_step_2"
    assert train(*overrides).reproducible_metrics == four_steps.reproducible_metrics


def test_a_stop_does_not_wait_for_an_environment_that_hangs(
    letters: Overrides, four_steps: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = letters("hanging", *FOUR_STEPS, "environment.skyrl_gym.max_env_workers=4")
    step, rollout, is_over = LettersEnv.step, Trainer.rollout, threading.Event()

    def hang(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        assert is_over.wait(200), "the run waits for the environment"
        return step(self, action)

    async def stop_in_the_third_step(self: Trainer, current: Step) -> list[Trajectory]:
        if current.number == 3:
            monkeypatch.setattr(LettersEnv, "step", hang)
            asyncio.get_running_loop().call_later(0.2, self.request_stop, "the machine is reclaimed")
        return await rollout(self, current)

    with monkeypatch.context() as patch:
        patch.setattr("skyrl_train.trainer.STOP_GRACE_S", 0.5)
        patch.setattr(Trainer, "rollout", stop_in_the_third_step)
        expect_error(*overrides, status=130)
    is_over.set()
    run = run_of(overrides)
    assert run.checkpoints.latest() == run.folder / "ckpts/global_step_2"
    assert "of step 3 did not end within" in run.log
    assert "rerun the command to resume" not in run.log, "a stop is no failure, after which the step is saved at once"
    monkeypatch.setattr(LettersEnv, "step", step)
    assert train(*overrides).reproducible_metrics == four_steps.reproducible_metrics


# -- references and teachers


def test_the_reference_is_updated_at_the_end_of_an_epoch(letters: Overrides) -> None:
    one_update = ["trainer.policy.optimizer_config.lr=1e-2", "trainer.policy_mini_batch_size=4"]
    run = train(*letters("refreshed", "trainer.epochs=2", *one_update, REFRESH))
    kl = [step["policy/policy_kl"] for step in run.metrics[1:]]  # before the only update of a step
    assert kl[0::2] == pytest.approx([0, 0], abs=1e-6)
    assert min(kl[1::2]) > 1e-5


def test_an_epoch_that_ends_within_a_step_updates_the_reference(
    letters: Overrides, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes two batches and an epoch has three, so the first epoch ends in the middle of the second step."""
    data = write_prompts(folder / "twelve.jsonl", 12, "letters")
    updates: list[int] = []
    refresh = Learner.refresh_reference

    async def count(self: Learner, version: int) -> None:
        updates.append(version)
        await refresh(self, version)

    monkeypatch.setattr(Learner, "refresh_reference", count)
    monkeypatch.setattr(filters, "informative_groups", lambda rewards, draws, tolerance: set(draws[:8]))
    settings = [f"data.train_data=['{data}']", FILTER, REFRESH, "trainer.epochs=2", "trainer.max_training_steps=3"]
    run = train(*letters("crossing", *settings))
    assert [step["generate/n_sample_batches"] for step in run.metrics[1:]] == [2, 2, 2]
    assert len(updates) == 1, "the last step of the run does not update the reference"


def test_a_student_approaches_its_teacher(letters: Overrides) -> None:
    learning = ["trainer.epochs=2", "trainer.policy.optimizer_config.lr=1e-2", "trainer.hf_save_interval=100"]
    teacher = train(*letters("teacher", *learning)).export(4)
    settings = [
        "trainer.algorithm.advantage_estimator=on_policy_distillation",
        "trainer.algorithm.policy_loss_type=importance_sampling",
        f"trainer.ref.model.path='{teacher}'",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.algorithm.kl_estimator_type=k1",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.epochs=6",
    ]
    kl = [step["policy/policy_kl"] for step in train(*letters("student", *settings)).metrics[1:]]
    assert sum(kl[-3:]) < 0.5 * sum(kl[:3])


def test_a_teacher_with_another_vocabulary_is_refused(
    letters: Overrides, tiny_model_path: Path, tmp_path: Path
) -> None:
    teacher = shutil.copytree(tiny_model_path, tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    token_ids = tokenizer["model"]["vocab"]
    a, b = list(token_ids)[100:102]
    token_ids[a], token_ids[b] = token_ids[b], token_ids[a]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = expect_error(*letters("misread", f"trainer.ref.model.path='{teacher}'"))
    assert "has another tokenizer than the policy" in message


# -- rewards


def test_remax_subtracts_the_greedy_reward(letters: Overrides, batches: list[TrainingBatch]) -> None:
    train(*letters("remax", "trainer.algorithm.advantage_estimator=remax", ONE_STEP))
    (batch,) = batches
    assert batch.greedy_rewards is not None
    first_token = batch.advantages[:, 0]  # the reward-to-go of the first token is the total
    torch.testing.assert_close(first_token, batch.rewards.sum(dim=1) - batch.greedy_rewards)
    assert all(len(rewards) == 1 for rewards in values_by_prompt(batch, batch.greedy_rewards).values())


def test_gdpo_reads_the_reward_components_of_the_environment(letters: Overrides, batches: list[TrainingBatch]) -> None:
    train(*letters("gdpo", "trainer.algorithm.advantage_estimator=gdpo", ONE_STEP))
    (batch,) = batches
    assert sorted(batch.reward_components) == ["letters", "short"]
    torch.testing.assert_close(sum(batch.reward_components.values()), batch.rewards.sum(dim=1))


def test_an_estimator_gets_the_statistics_it_requires(letters: Overrides, batches: list[TrainingBatch]) -> None:
    one_update = ["trainer.policy_mini_batch_size=4", ONE_STEP]
    train(*letters("otb", "trainer.algorithm.advantage_estimator=optimal_token_baseline", *one_update))
    (batch,) = batches
    on_mask = batch.sum_pi_squared[batch.loss_mask > 0]
    assert (on_mask > 0).all()
    assert (on_mask < 1).all()


def test_truncated_replies_are_filtered_and_punished(letters: Overrides, batches: list[TrainingBatch]) -> None:
    punishment = [f"trainer.algorithm.overlong_buffer_{name}" for name in ("len=2", "penalty_factor=100")]
    train(*letters("overlong", "generator.apply_overlong_filtering=true", *punishment, ONE_STEP))
    (batch,) = batches
    is_masked = batch.loss_mask.sum(dim=1) == 0
    assert is_masked.any(), "no reply reached the limit of four tokens"
    assert (batch.rewards.sum(dim=1)[is_masked] < -80).all()


# -- rows and masks


def test_groups_of_equal_rewards_are_masked_from_the_loss(
    letters: Overrides, batches: list[TrainingBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float("e" in action), done=True, metadata={})

    monkeypatch.setattr(LettersEnv, "step", step)
    run = train(*letters("filtered", "trainer.algorithm.zero_variance_filter=true"))
    n_masked = [step["reward/num_zero_variance_filtered"] for step in run.metrics[1:]]
    for batch, n in zip(batches, n_masked, strict=True):
        rewards = values_by_prompt(batch, batch.rewards.sum(dim=1))
        is_flat = torch.tensor([len(rewards[draw]) == 1 for draw in batch.draws.tolist()])
        assert is_flat.sum() == n
        assert ((batch.loss_mask.sum(dim=1) == 0) == is_flat).all()
    assert 0 < sum(n_masked) < 32, "the test needs masked and unmasked groups; choose another letter"


def test_every_turn_has_the_advantage_of_its_trajectory(letters: Overrides, batches: list[TrainingBatch]) -> None:
    last = train(*letters("turns", STEP_WISE, ONE_STEP)).metrics[-1]
    (batch,) = batches
    assert batch.is_last_row.tolist() == [False, True] * 16
    for row in range(0, 32, 2):
        (first,), (second,) = (batch.advantages[i][batch.loss_mask[i] > 0].unique() for i in (row, row + 1))
        assert first == second
    assert last["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert last["policy/grad_norm"] > 0
    assert last["generate/avg_turns"] == 2


def test_token_advantages_include_rewards_of_later_rows(
    letters: Overrides, batches: list[TrainingBatch], tiny_model_path: Path
) -> None:
    settings = [
        *(STEP_WISE, GAE, "trainer.algorithm.gamma=1", "trainer.algorithm.lambd=1"),
        f"trainer.critic.model.path='{tiny_model_path}'",
        *(*KL_IN_REWARD, "trainer.algorithm.kl_loss_coef=0.5"),
    ]
    last = train(*letters("tokens", *settings)).metrics[-1]
    batch = batches[-1]  # the policy now differs from the reference
    assert batch.is_last_row.tolist() == [False, True] * 16
    totals = batch.rewards.sum(dim=1).view(16, 2).sum(dim=1)  # total of each trajectory minus the KL penalty
    torch.testing.assert_close(batch.returns[::2, 0], totals)
    assert last["loss/avg_kl_max"] > 0
    assert last["loss/avg_final_rewards"] == pytest.approx(totals.mean().item(), abs=1e-5)
    assert last["critic/grad_norm"] > 0
    assert last["policy/grad_norm"] > 0


def test_rewards_and_filters_count_trajectories_of_several_rows_once(
    letters: Overrides, batches: list[TrainingBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn has a reward of 0.5, and every trajectory a total of 1."""
    step = LettersEnv.step
    monkeypatch.setattr(LettersEnv, "step", lambda *call: {**step(*call), "reward": 0.5, "metadata": {}})
    sizes = [f"trainer.{name}_batch_size=1" for name in ("train", "policy_mini", "critic_mini")]
    settings = [STEP_WISE, "trainer.algorithm.zero_variance_filter=true", *sizes, ONE_STEP]
    last = train(*letters("equal", *settings)).metrics[-1]
    (batch,) = batches
    assert len(batch) == 8
    assert not batch.loss_mask.any()
    assert last["reward/num_zero_variance_filtered"] == 4
    assert last["loss/avg_final_rewards"] == 1.0
    assert "policy/grad_norm" not in last, "no trained tokens are left"
    assert batch.sum_pi_squared is None, "one mini-batch needs no separate scoring pass"


def test_a_custom_template_trains_without_rollout_log_probs(letters: Overrides, batches: list[TrainingBatch]) -> None:
    template = "generator.chat_template.name_or_path=qwen3_with_thinking"
    last = train(*letters("template", template, ONE_STEP)).metrics[-1]
    assert batches[0].rollout_logprobs is None
    assert last["policy/grad_norm"] > 0
    assert "policy/rollout_train_logprobs_abs_diff_mean" not in last
