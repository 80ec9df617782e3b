"""Complete runs with components that only some algorithms need: their metrics, and resuming bit for bit."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.algorithms import dynamic_sampling
from skyrl_train.entrypoints.main_base import main
from skyrl_train.learner import Learner
from skyrl_train.trainer import Step, Trainer
from skyrl_train.types import Metrics as StepMetrics
from skyrl_train.types import TrainingBatch, Trajectory

Metrics = list[dict[str, Any]]


class LettersEnv(BaseTextEnv):
    """An environment of two turns; rewards the letter "a" and, as a second component, short replies."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        components = {"letters": float(action.count("a")), "short": 1.0 - len(action) / 40}
        done = self.turns == 2
        again = [] if done else [{"role": "user", "content": "again"}]
        return BaseTextEnvStepOutput(
            observations=again, reward=sum(components.values()), done=done, metadata={"reward_components": components}
        )


@pytest.fixture(autouse=True)
def _letters() -> Iterator[None]:
    skyrl_gym.register(id="letters", entry_point=LettersEnv)
    yield
    skyrl_gym.envs.deregister("letters")


@pytest.fixture
def train(tiny_model_path: Path, tmp_path: Path) -> Callable[..., Metrics]:
    """Train in the folder `name` and return the logged metrics."""
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "env_class": "letters"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(name: str, *overrides: str) -> Metrics:
        main(
            [
                f"data.train_data=['{tmp_path}/rows.jsonl']",
                f"trainer.policy.model.path='{tiny_model_path}'",
                f"trainer.output_dir='{tmp_path}'",
                f"trainer.run_name={name}",
                "trainer.train_batch_size=4",
                "trainer.policy_mini_batch_size=2",
                "trainer.critic_mini_batch_size=2",
                "trainer.policy.optimizer_config.lr=1e-3",
                "trainer.critic.optimizer_config.lr=1e-3",
                "trainer.ckpt_interval=-1",
                "trainer.eval_interval=-1",
                "trainer.logger=jsonl",
                "generator.batched=true",  # the batch of a forward pass affects the last bit
                "generator.max_turns=2",
                "generator.n_samples_per_prompt=4",
                "generator.sampling_params.max_generate_length=4",
                *overrides,
            ]
        )
        lines = (tmp_path / f"skyrl/{name}/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[TrainingBatch]:
    """Every batch for which advantages were computed."""
    recorded_batches: list[TrainingBatch] = []
    advantages = Learner.advantages

    def recording_advantages(self: Learner, batch: TrainingBatch) -> tuple[TrainingBatch, StepMetrics]:
        batch, metrics = advantages(self, batch)
        recorded_batches.append(batch)
        return batch, metrics

    monkeypatch.setattr(Learner, "advantages", recording_advantages)
    return recorded_batches


def untimed(rows: Metrics) -> Metrics:
    timed = ("timing/", "trainer/tokens_per_second")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


def test_every_stateful_component_resumes_bit_for_bit(
    train: Callable[..., Metrics], tiny_model_path: Path, tmp_path: Path
) -> None:
    """Critic, adaptive KL penalty, a reference updated every epoch, and dynamic sampling in mid-epoch."""
    settings = [
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path='{tiny_model_path}'",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_ctrl.type=adaptive",
        "trainer.algorithm.kl_ctrl.kl_target=0.001",
        "trainer.algorithm.kl_ctrl.horizon=32",
        "trainer.algorithm.dynamic_sampling.type=filter",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "trainer.update_ref_every_epoch=true",
        "trainer.update_epochs_per_batch=2",
        "trainer.epochs=10",
        "trainer.ckpt_interval=3",
        "trainer.hf_save_interval=100",
    ]
    uninterrupted = train("uninterrupted", *settings, "trainer.max_training_steps=6")
    train("stopped", *settings, "trainer.max_training_steps=3")
    resumed = train("stopped", *settings, "trainer.max_training_steps=6")

    assert untimed(resumed) == untimed(uninterrupted)
    for role in ("policy", "critic"):
        exports = [tmp_path / f"skyrl/{name}/export/global_step_6/{role}" for name in ("uninterrupted", "stopped")]
        left, right = (load_file(folder / "model.safetensors") for folder in exports)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), role
    coefficients = [row["loss/kl_loss_coef"] for row in uninterrupted[1:]]
    assert len(set(coefficients)) == len(coefficients), "the adaptive coefficient changes at every step"
    assert {"policy", "critic", "ref"} <= {
        f.name for f in (tmp_path / "skyrl/uninterrupted/ckpts/global_step_6").iterdir()
    }
    last = uninterrupted[-1]
    assert last["critic/grad_norm"] > 0
    assert last["timing/critic_train"] > 0


def test_a_step_with_failing_rollouts_keeps_all_steps_before_it(
    train: Callable[..., Metrics], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["trainer.epochs=3", "trainer.ckpt_interval=100", "environment.skyrl_gym.max_env_workers=0"]
    uninterrupted = train("uninterrupted", *settings)
    step, n_turns = LettersEnv.step, 0

    def fails_in_the_fourth_step(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        nonlocal n_turns
        n_turns += 1
        if n_turns > 3 * 4 * 4 * 2:
            raise ConnectionError("the service is down")
        return step(self, action)

    monkeypatch.setattr(LettersEnv, "step", fails_in_the_fourth_step)
    with pytest.raises(SystemExit):
        train("interrupted", *settings)
    assert "the service is down" in capsys.readouterr().err
    log = (tmp_path / "skyrl/interrupted/train.log").read_text()
    assert "The checkpoint of step 3 is saved; the same command resumes from step 3" in log
    assert (tmp_path / "skyrl/interrupted/ckpts/latest_ckpt_global_step.txt").read_text() == "3\n"
    monkeypatch.setattr(LettersEnv, "step", step)
    assert untimed(train("interrupted", *settings)) == untimed(uninterrupted)


def test_a_stop_does_not_wait_for_an_environment_that_hangs(
    train: Callable[..., Metrics], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["trainer.epochs=3", "trainer.ckpt_interval=100"]
    uninterrupted = train("uninterrupted", *settings)
    monkeypatch.setattr("skyrl_train.trainer.STOP_GRACE_S", 0.5)
    step, rollout, end = LettersEnv.step, Trainer.rollout, threading.Event()

    def hangs(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        end.wait(60)
        return step(self, action)

    async def stops_in_the_fourth_step(self: Trainer, number: Step) -> list[Trajectory]:
        if number.number == 4:
            monkeypatch.setattr(LettersEnv, "step", hangs)
            asyncio.get_running_loop().call_later(0.2, self.request_stop, "the machine is reclaimed")
        return await rollout(self, number)

    monkeypatch.setattr(Trainer, "rollout", stops_in_the_fourth_step)
    start = time.monotonic()
    with pytest.raises(SystemExit, match="130"):
        train("interrupted", *settings)
    assert time.monotonic() - start < 50, "the run ends before the environment does"
    end.set()
    assert (tmp_path / "skyrl/interrupted/ckpts/latest_ckpt_global_step.txt").read_text() == "3\n"
    log = (tmp_path / "skyrl/interrupted/train.log").read_text()
    assert "of step 4 did not end within" in log
    assert "rerun the command to resume" not in log, "a stop is no failure, after which the step is saved at once"
    monkeypatch.setattr(LettersEnv, "step", step)
    monkeypatch.setattr(Trainer, "rollout", rollout)
    assert untimed(train("interrupted", *settings)) == untimed(uninterrupted)


def test_the_reference_is_updated_at_the_end_of_an_epoch(train: Callable[..., Metrics]) -> None:
    settings = ["trainer.epochs=3", "trainer.policy.optimizer_config.lr=1e-2", "trainer.policy_mini_batch_size=4"]
    fixed = train("fixed", *settings)
    moved = train("moved", *settings, "trainer.update_ref_every_epoch=true")
    first_of_epoch, second_of_epoch = (1, 3, 5), (2, 4, 6)
    for step in first_of_epoch:  # one update per step; the KL is measured before the update
        assert moved[step]["policy/policy_kl"] == pytest.approx(0, abs=1e-6)
    for step in second_of_epoch:
        assert moved[step]["policy/policy_kl"] > 1e-5
    assert fixed[3]["policy/policy_kl"] > 1e-5


def test_an_epoch_that_ends_within_a_step_updates_the_reference(
    train: Callable[..., Metrics], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step takes two batches and an epoch has three, so the first epoch ends in the middle of the second step."""
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "more.jsonl").write_text("".join([*lines, *lines[:4]]))
    updates: list[int] = []
    refresh = Learner.refresh_reference

    async def counting_refresh(self: Learner, version: int) -> None:
        updates.append(version)
        await refresh(self, version)

    monkeypatch.setattr(Learner, "refresh_reference", counting_refresh)
    monkeypatch.setattr(dynamic_sampling, "informative_groups", lambda rewards, draws, tolerance: set(draws[:8]))
    rows = train(
        "crossing",
        f"data.train_data=['{tmp_path}/more.jsonl']",
        "trainer.algorithm.dynamic_sampling.type=filter",
        "trainer.update_ref_every_epoch=true",
        "trainer.epochs=2",
        "trainer.max_training_steps=3",
    )
    assert [row["generate/n_sample_batches"] for row in rows[1:]] == [2, 2, 2]
    assert len(updates) == 1, "the last step of the run does not update the reference"


def test_a_kl_penalty_lowers_the_trained_rewards(train: Callable[..., Metrics], batches: list[TrainingBatch]) -> None:
    in_reward = ["trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"]
    rows = train("penalty", *in_reward, "trainer.algorithm.kl_loss_coef=0.5", "trainer.algorithm.kl_estimator_type=k1")
    raw, penalty = rows[2]["reward/avg_raw_reward"], rows[2]["loss/avg_kl"]
    batch = batches[1]
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    per_token = (batch.old_logprobs - batch.ref_logprobs) * batch.loss_mask
    assert penalty == pytest.approx((per_token.sum() / batch.loss_mask.sum()).item(), abs=1e-6)
    expected = raw - 0.5 * per_token.sum(dim=1).mean().item()
    assert rows[2]["loss/avg_final_rewards"] == pytest.approx(expected, abs=1e-5)
    assert rows[2]["loss/kl_loss_coef"] == 0.5


def test_remax_subtracts_the_greedy_reward(train: Callable[..., Metrics], batches: list[TrainingBatch]) -> None:
    train("remax", "trainer.algorithm.advantage_estimator=remax", "trainer.max_training_steps=1")
    (batch,) = batches
    assert batch.greedy_rewards is not None
    assert batch.advantages is not None
    first_token = batch.advantages[:, 0]  # the reward-to-go of the first token is the total
    torch.testing.assert_close(first_token, batch.rewards.sum(dim=1) - batch.greedy_rewards)
    by_prompt = {
        uid: {r for u, r in zip(batch.draws.tolist(), batch.greedy_rewards.tolist(), strict=True) if u == uid}
        for uid in batch.draws.tolist()
    }
    assert all(len(rewards) == 1 for rewards in by_prompt.values())


def test_gdpo_reads_the_reward_components_of_the_environment(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    train("gdpo", "trainer.algorithm.advantage_estimator=gdpo", "trainer.max_training_steps=1")
    (batch,) = batches
    assert sorted(batch.reward_components) == ["letters", "short"]
    total = sum(batch.reward_components.values())
    torch.testing.assert_close(total, batch.rewards.sum(dim=1))


def test_missing_reward_components_are_reported(
    train: Callable[..., Metrics], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plain(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})

    monkeypatch.setattr(LettersEnv, "step", plain)
    with pytest.raises(SystemExit):
        train("gdpo", "trainer.algorithm.advantage_estimator=gdpo")
    assert "reward_components" in capsys.readouterr().err


def test_an_estimator_gets_the_statistics_it_requires(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    one_update = ["trainer.policy_mini_batch_size=4", "trainer.max_training_steps=1"]
    train("otb", "trainer.algorithm.advantage_estimator=optimal_token_baseline", *one_update)
    train("plain", *one_update)
    with_statistics, plain = batches
    assert with_statistics.sum_pi_squared is not None
    on_mask = with_statistics.sum_pi_squared[with_statistics.loss_mask > 0]
    assert (on_mask > 0).all()
    assert (on_mask < 1).all()
    assert plain.sum_pi_squared is None, "one mini-batch needs no separate scoring pass"


def test_a_student_approaches_its_teacher(train: Callable[..., Metrics], tmp_path: Path) -> None:
    train("teacher", "trainer.epochs=6", "trainer.policy.optimizer_config.lr=1e-2", "trainer.hf_save_interval=100")
    teacher = tmp_path / "skyrl/teacher/export/global_step_12/policy"
    rows = train(
        "student",
        "trainer.algorithm.advantage_estimator=on_policy_distillation",
        "trainer.algorithm.policy_loss_type=importance_sampling",
        f"trainer.ref.model.path='{teacher}'",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.algorithm.kl_estimator_type=k1",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.epochs=15",
    )
    kl = [row["policy/policy_kl"] for row in rows[1:]]
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5])


def test_a_teacher_with_another_vocabulary_is_refused(
    train: Callable[..., Metrics], tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for file in tiny_model_path.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            vocabulary = json.loads(text)
            names = list(vocabulary["model"]["vocab"])
            a, b = names[100], names[101]
            ids = vocabulary["model"]["vocab"]
            ids[a], ids[b] = ids[b], ids[a]
            text = json.dumps(vocabulary).encode()
        (teacher / file.name).write_bytes(text)
    with pytest.raises(SystemExit):
        train("student", f"trainer.ref.model.path='{teacher}'")
    assert "has another tokenizer than the policy" in capsys.readouterr().err


def test_groups_of_equal_rewards_are_masked_from_the_loss(
    train: Callable[..., Metrics], batches: list[TrainingBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float("e" in action), done=True, metadata={})

    monkeypatch.setattr(LettersEnv, "step", half)
    rows = train("filtered", "trainer.algorithm.zero_variance_filter=true", "trainer.max_training_steps=2")
    n_masked = [row["reward/num_zero_variance_filtered"] for row in rows[1:]]
    for batch, n in zip(batches, n_masked, strict=True):
        spread = {
            uid: {float(r) for u, r in zip(batch.draws.tolist(), batch.rewards.sum(dim=1), strict=True) if u == uid}
            for uid in batch.draws.tolist()
        }
        is_flat = torch.tensor([len(spread[uid]) == 1 for uid in batch.draws.tolist()])
        assert is_flat.sum() == n
        assert ((batch.loss_mask.sum(dim=1) == 0) == is_flat).all()
    assert 0 < sum(n_masked) < 32, "the test needs masked and unmasked groups; choose another letter"


def test_truncated_replies_are_filtered_and_long_ones_punished(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    train(
        "overlong",
        "generator.apply_overlong_filtering=true",
        "trainer.algorithm.overlong_buffer_len=2",
        "trainer.algorithm.overlong_buffer_penalty_factor=100",
        "trainer.max_training_steps=1",
    )
    (batch,) = batches
    is_masked = batch.loss_mask.sum(dim=1) == 0
    assert is_masked.any(), "no reply reached the limit of four tokens"
    assert (batch.rewards.sum(dim=1)[is_masked] < -80).all()


def test_zero_reward_on_non_stop_zeroes_rewards_of_truncated_replies(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    rows = train("strict", "generator.zero_reward_on_non_stop=true", "trainer.max_training_steps=1")
    (batch,) = batches
    assert (batch.rewards.sum(dim=1) == 0).any()
    assert rows[1]["reward/avg_raw_reward"] == pytest.approx(batch.rewards.sum(dim=1).mean().item())


def test_advantage_batch_normalize_normalizes_advantages_over_the_batch(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    train(
        "normalized",
        "trainer.algorithm.advantage_estimator=rloo",
        "trainer.algorithm.advantage_batch_normalize=true",
        "trainer.max_training_steps=1",
    )
    (batch,) = batches
    assert batch.advantages is not None
    on_mask = batch.advantages[batch.loss_mask > 0]
    assert on_mask.mean().item() == pytest.approx(0, abs=1e-5)
    assert on_mask.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_every_turn_is_trained_with_the_advantage_of_its_trajectory(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    rows = train("steps", "generator.step_wise_trajectories=true", "trainer.max_training_steps=1")
    (batch,) = batches
    assert batch.is_last_row.tolist() == [False, True] * 16
    assert batch.advantages is not None
    for first, last in zip(range(0, 32, 2), range(1, 32, 2), strict=True):
        (one,) = batch.advantages[first][batch.loss_mask[first] > 0].unique()
        (other,) = batch.advantages[last][batch.loss_mask[last] > 0].unique()
        assert one == other
    assert rows[-1]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert rows[-1]["policy/grad_norm"] > 0
    assert rows[-1]["generate/avg_turns"] == 2


def test_token_advantages_include_rewards_of_later_rows(
    train: Callable[..., Metrics], batches: list[TrainingBatch], tiny_model_path: Path
) -> None:
    rows = train(
        "steps",
        "generator.step_wise_trajectories=true",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.algorithm.gamma=1",
        "trainer.algorithm.lambd=1",
        f"trainer.critic.model.path='{tiny_model_path}'",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_loss_coef=0.5",
        "trainer.max_training_steps=2",
    )
    batch = batches[1]  # the policy now differs from the reference
    assert batch.is_last_row.tolist() == [False, True] * 16
    assert batch.rewards is not None
    assert batch.returns is not None
    totals = batch.rewards.sum(dim=1).view(16, 2).sum(dim=1)  # total of each trajectory minus the KL penalty
    torch.testing.assert_close(batch.returns[::2, 0], totals)
    last = rows[-1]
    assert last["loss/avg_kl_max"] > 0
    assert last["loss/avg_final_rewards"] == pytest.approx(totals.mean().item(), abs=1e-5)
    assert last["critic/grad_norm"] > 0
    assert last["policy/grad_norm"] > 0


@pytest.fixture
def _equal_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every turn a reward of 0.5, so every trajectory has a total of 1.0."""
    step = LettersEnv.step

    def step_with_equal_reward(self: LettersEnv, action: str) -> BaseTextEnvStepOutput:
        return {**step(self, action), "reward": 0.5, "metadata": {}}

    monkeypatch.setattr(LettersEnv, "step", step_with_equal_reward)


@pytest.mark.usefixtures("_equal_rewards")
def test_rewards_and_filters_count_trajectories_of_several_rows_once(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    rows = train(
        "steps",
        "generator.step_wise_trajectories=true",
        "trainer.algorithm.zero_variance_filter=true",
        "trainer.train_batch_size=1",
        "trainer.policy_mini_batch_size=1",
        "trainer.critic_mini_batch_size=1",
        "trainer.max_training_steps=1",
    )
    (batch,) = batches
    assert len(batch) == 8
    assert not batch.loss_mask.any()
    assert rows[-1]["reward/num_zero_variance_filtered"] == 4
    assert rows[-1]["loss/avg_final_rewards"] == 1.0
    assert "policy/grad_norm" not in rows[-1], "no trained tokens are left"


def test_a_custom_template_trains_without_rollout_log_probs(
    train: Callable[..., Metrics], batches: list[TrainingBatch]
) -> None:
    rows = train("template", "generator.chat_template.name_or_path=qwen3_with_thinking", "trainer.max_training_steps=1")
    assert batches[0].rollout_logprobs is None
    assert rows[-1]["policy/grad_norm"] > 0
    assert "policy/rollout_train_logprobs_abs_diff_mean" not in rows[-1]
