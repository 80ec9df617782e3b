from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from train_kit.rollouts import Numbers, ScriptedGenerator

from skyrl_train.algorithms.advantages import group_statistics
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.errors import EnvError
from skyrl_train.generators.source import Rollouts, StepData
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID
from skyrl_train.types.tokens import Phase

N_SAMPLES = 2


class SequentialPrompts(ShuffledPrompts):
    """Prompts 0, 1, 2, …, in batches of `batch_size`, repeated forever."""

    def __init__(self, n_rows: int, batch_size: int) -> None:
        super().__init__(Numbers(n_rows), batch_size, seed=0)
        self.batches: list[list[PromptRow]] = []

    def _next_rows(self) -> list[tuple[int, PromptRow]]:
        indices = [(self._n_drawn + i) % len(self._dataset) for i in range(self._batch_size)]
        rows = [(index, self._dataset[index]) for index in indices]
        self.batches.append([row for _, row in rows])
        return rows


def informative(*uids: str) -> Callable[[TrajectoryID], float]:
    """Return a reward that differs between the samples of these prompts only."""
    return lambda id: float(id.repetition_id) if id.instance_id in uids else 0.0


def config(n_prompts: int, **algorithm: Any) -> SkyRLConfig:
    return load_config(
        {
            "trainer": {"train_batch_size": n_prompts, "policy_mini_batch_size": n_prompts, "algorithm": algorithm},
            "generator": {"n_samples_per_prompt": N_SAMPLES, "sampling_params": {"max_generate_length": 2}},
        }
    )


async def sample(
    cfg: SkyRLConfig, generator: ScriptedGenerator, prompts: SequentialPrompts, *, greedy: bool = False
) -> StepData:
    return await Rollouts(cfg, generator, prompts, with_greedy_rewards=greedy).take(1)


def uids(trajectories: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(t.id.instance_id for t in trajectories))


async def test_a_step_uses_one_batch_of_prompts() -> None:
    class Reporting(ScriptedGenerator):
        def take_metrics(self, phase: Phase = "train") -> dict[str, float]:
            return {"mine": 1.0}

    prompts = SequentialPrompts(n_rows=8, batch_size=3)
    step_data = await sample(config(3), Reporting(), prompts)
    assert [t.id.to_string() for t in step_data.trajectories] == ["0_0", "0_1", "1_0", "1_1", "2_0", "2_1"]
    assert step_data.played == step_data.trajectories
    assert step_data.metrics.numbers()["generate/n_sample_batches"] == 1
    assert step_data.metrics.numbers()["mine"] == 1.0
    assert step_data.metrics.numbers()["generate/n_left_alone"] == 0


async def test_failed_rollouts_are_reported_and_not_trained() -> None:
    failing = {("0", 0), ("0", 1), ("1", 1)}  # all of prompt 0, one sample of prompt 1
    generator = ScriptedGenerator(lambda id: None if (id.instance_id, id.repetition_id) in failing else 1.0)
    step_data = await sample(config(3), generator, SequentialPrompts(8, 3))
    assert uids(step_data.trajectories) == ["2"]
    assert len(step_data.played) == 6
    assert step_data.metrics.numbers()["generate/n_left_alone"] == 1
    with pytest.raises(EnvError, match=r"6 of 6 rollouts at step 1 failed, .*it broke"):
        await sample(config(3), ScriptedGenerator(lambda id: None), SequentialPrompts(8, 3))


@pytest.mark.parametrize(
    ("estimator", "baseline", "n_left_alone"),
    [("reinforce++", "", 0), ("mine", "constant", 0), ("mine", "of the group", 1)],
)
async def test_a_single_valid_sample_is_kept_if_the_estimator_does_not_compare_samples(
    estimator: str, baseline: str, n_left_alone: int
) -> None:
    def mine(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str]) -> Any:
        scores = token_level_rewards.sum(dim=-1)
        mean = 0.5 if baseline == "constant" else group_statistics(scores, index)[0]
        advantages = (scores - mean)[:, None] * response_mask
        return advantages, advantages

    ADVANTAGE_ESTIMATORS.register("mine", mine)
    try:
        generator = ScriptedGenerator(lambda id: None if id.to_string() == "1_1" else 1.0)
        step_data = await sample(config(3, advantage_estimator=estimator), generator, SequentialPrompts(8, 3))
    finally:
        ADVANTAGE_ESTIMATORS.unregister("mine")
    assert step_data.metrics.numbers()["generate/n_left_alone"] == n_left_alone


async def test_greedy_rollouts_get_the_overlong_punishment() -> None:
    cfg = config(2, overlong_buffer_len=1, overlong_buffer_penalty_factor=10.0)
    step_data = await sample(cfg, ScriptedGenerator(lambda id: 1.0), SequentialPrompts(8, 2), greedy=True)
    assert {t.total_reward for t in step_data.trajectories} == {-9.0}
    assert {t.greedy_reward for t in step_data.trajectories} == {-9.0}
    assert {t.total_reward for t in step_data.played} == {1.0}, "metrics use the rewards of the environment"


async def test_filter_samples_until_enough_groups_are_informative() -> None:
    prompts = SequentialPrompts(n_rows=12, batch_size=3)
    cfg = config(3, dynamic_sampling={"type": "filter"})
    step_data = await sample(cfg, ScriptedGenerator(informative("1", "4", "5", "7")), prompts)
    assert uids(step_data.trajectories) == ["1", "4", "5"]
    assert len(step_data.trajectories) == 3 * N_SAMPLES
    assert len(prompts.batches) == 2
    assert len(step_data.played) == 6 * N_SAMPLES
    assert step_data.metrics.numbers()["generate/n_sample_batches"] == 2
    assert step_data.metrics.numbers()["generate/n_groups_dropped"] == 3


async def test_a_prompt_drawn_twice_forms_two_groups() -> None:
    prompts = SequentialPrompts(n_rows=2, batch_size=2)
    cfg = config(2, dynamic_sampling={"type": "filter"})
    generator = ScriptedGenerator(informative("1"))
    step_data = await sample(cfg, generator, prompts)
    assert [t.id.draw for t in step_data.trajectories] == [1, 1, 3, 3]
    assert uids(step_data.trajectories) == ["1"]
    requested = [request.id for requests, _ in generator.calls for request in requests]
    assert len(set(requested)) == len(requested), "equal IDs would sample equal tokens"


async def test_greedy_rewards_come_from_one_greedy_rollout_per_prompt() -> None:
    generator = ScriptedGenerator(lambda id: float(id.instance_id) + (0.5 if id.repetition_id == N_SAMPLES else 0.1))
    step_data = await sample(config(3), generator, SequentialPrompts(8, 3), greedy=True)
    assert [t.greedy_reward for t in step_data.trajectories] == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]
    requests, sampling = generator.calls[-1]
    assert [request.id.to_string() for request in requests] == ["0_2", "1_2", "2_2"]
    assert sampling.temperature == 0.0
    assert generator.calls[0][1].temperature == 1.0
    assert len(step_data.played) == 6, "greedy rollouts are not reported"


async def test_a_prompt_with_a_failed_greedy_rollout_is_dropped() -> None:
    generator = ScriptedGenerator(lambda id: None if id.to_string() == "1_2" else float(id.repetition_id))
    step_data = await sample(config(3), generator, SequentialPrompts(8, 3), greedy=True)
    assert uids(step_data.trajectories) == ["0", "2"]
    assert step_data.metrics.numbers()["generate/n_without_baseline"] == N_SAMPLES
    with pytest.raises(EnvError, match=r"all 3 greedy rollouts failed. The first error: it broke"):
        await sample(
            config(3),
            ScriptedGenerator(lambda id: None if id.repetition_id == N_SAMPLES else 1.0),
            SequentialPrompts(8, 3),
            greedy=True,
        )


async def test_copies_of_a_group_share_its_greedy_reward() -> None:
    cfg = config(4, dynamic_sampling={"type": "replace"})
    generator = ScriptedGenerator(lambda id: 9.0 if id.repetition_id == N_SAMPLES else informative("1", "3")(id))
    step_data = await sample(cfg, generator, SequentialPrompts(8, 4), greedy=True)
    assert set(uids(step_data.trajectories)) == {"1", "3"}
    assert [t.id.draw for t in step_data.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {t.greedy_reward for t in step_data.trajectories} == {9.0}
    assert sorted(request.id.instance_id for request in generator.calls[-1][0]) == ["1", "3"]


async def test_a_failed_step_restores_the_position_in_the_prompts() -> None:
    prompts = SequentialPrompts(8, 3)
    position = prompts.state_dict()
    with pytest.raises(EnvError):
        await sample(config(3), ScriptedGenerator(lambda id: None), prompts)
    assert prompts.state_dict() == position
    assert uids((await sample(config(3), ScriptedGenerator(lambda id: 1.0), prompts)).trajectories) == ["0", "1", "2"]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++"])
async def test_with_one_sample_of_each_prompt_none_is_left_alone(estimator: str) -> None:
    """GRPO then has no baseline. The configuration warns of it, and the run continues."""
    cfg = config(3, advantage_estimator=estimator)
    cfg = cfg.model_copy(update={"generator": cfg.generator.model_copy(update={"n_samples_per_prompt": 1})})
    step_data = await sample(cfg, ScriptedGenerator(), SequentialPrompts(n_rows=8, batch_size=3))
    assert [t.id.to_string() for t in step_data.trajectories] == ["0_0", "1_0", "2_0"]
    assert step_data.metrics.numbers()["generate/n_left_alone"] == 0
