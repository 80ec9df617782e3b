import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.rollouts import Numbers, ScriptedGenerator

from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.errors import DataError, EnvError
from skyrl_train.generators.source import BufferedRollouts, Rollouts, StepData

N_SAMPLES = 2


def config(n_prompts: int = 2, *, dynamic_sampling: str | None = None, **fully_async: Any) -> SkyRLConfig:
    return load_config(
        {
            "trainer": {
                "train_batch_size": n_prompts,
                "policy_mini_batch_size": n_prompts,
                "fully_async": {"enabled": True, **fully_async},
                "algorithm": {"dynamic_sampling": {"type": dynamic_sampling}},
            },
            "generator": {"n_samples_per_prompt": N_SAMPLES},
        }
    )


class Run:
    """The calls of a trainer: steps, each of which ends with a sync."""

    def __init__(
        self,
        cfg: SkyRLConfig,
        player: ScriptedGenerator,
        *,
        total_steps: int = 100,
        first_step: int = 1,
        greedy: bool = False,
    ) -> None:
        self.player = player
        self.dataset = Numbers(12)
        prompts = ShuffledPrompts(self.dataset, cfg.trainer.train_batch_size, seed=0)
        self.source = BufferedRollouts(cfg, player, prompts, total_steps=total_steps, with_greedy_rewards=greedy)
        self.step = first_step - 1

    async def sync(self) -> None:
        await self.source.before_sync()
        self.player.version = self.step
        await self.source.after_sync(self.step)

    async def train(self, n_steps: int) -> list[StepData]:
        steps = []
        for _ in range(n_steps):
            steps.append(await self.source.take(self.step + 1))
            self.step += 1
            for _ in range(3):  # an update, during which rollouts continue
                await asyncio.sleep(0)
            await self.sync()
        return steps


def draws(steps: Sequence[StepData]) -> list[int]:
    return [draw for step in steps for draw in dict.fromkeys(t.id.draw for t in step.trajectories)]


@settings(max_examples=30, deadline=None)
@given(
    staleness=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    n_workers=st.integers(1, 12),
    in_flight=st.booleans(),
    dynamic_sampling=st.sampled_from([None, "filter"]),
)
def test_staleness_is_bounded_and_prompts_are_trained_once_in_order(
    staleness: int, seed: int, n_workers: int, in_flight: bool, dynamic_sampling: str | None
) -> None:
    async def check() -> None:
        rng = random.Random(seed)
        player = ScriptedGenerator(n_passes=lambda request: rng.choice([0, 1, 2, 5, 20]))
        uninformative = {draw for draw in range(200) if rng.random() < 0.3} if dynamic_sampling else set()
        player.reward = lambda id: 0.0 if id.draw in uninformative else float(id.repetition_id)
        run = Run(
            config(
                dynamic_sampling=dynamic_sampling,
                max_staleness_steps=staleness,
                num_parallel_generation_workers=n_workers,
                in_flight_weight_updates=in_flight,
            ),
            player,
        )
        await run.sync()
        steps = await run.train(8)
        trained = draws(steps)
        assert trained == sorted(set(trained))
        assert len(trained) == 8 * 2
        if dynamic_sampling is None:
            assert trained == list(range(16))
        assert player.max_running <= n_workers
        assert len(set(player.started)) == len(player.started)
        for number, step in enumerate(steps, start=1):
            metrics = step.metrics.numbers()
            ages = [number - 1 - t.weight_versions[0] for t in step.trajectories]
            assert min(ages) >= 0
            assert max(ages) == metrics["async/staleness_max"] <= staleness
            assert metrics["async/staleness_violation_count"] == 0
            if not in_flight:
                assert all(len(t.weight_versions) == 1 for t in step.trajectories)
        await run.source.close()
        assert player.n_running == 0

    asyncio.run(check())


@settings(max_examples=20, deadline=None)
@given(
    staleness=st.integers(0, 3), seed=st.integers(0, 10**6), n_before=st.integers(0, 5), becomes_lockstep=st.booleans()
)
def test_a_kill_repeats_or_skips_no_draw(staleness: int, seed: int, n_before: int, becomes_lockstep: bool) -> None:
    async def check() -> None:
        rng = random.Random(seed)
        cfg = config(max_staleness_steps=staleness)
        killed = Run(cfg, ScriptedGenerator(n_passes=lambda request: rng.choice([0, 3, 9])))
        await killed.sync()
        before = await killed.train(n_before)
        state = killed.source.state_dict()
        await killed.source.close()
        prompts = ShuffledPrompts(Numbers(12), 2, seed=0)
        if becomes_lockstep:
            source = Rollouts(cfg, ScriptedGenerator(), prompts)
            source.load_state_dict(state)
            after = [await source.take(step) for step in range(n_before + 1, n_before + 6)]
        else:
            resumed = Run(cfg, ScriptedGenerator(), first_step=n_before + 1)
            resumed.source.load_state_dict(state)
            await resumed.sync()
            after = await resumed.train(5)
            await resumed.source.close()
        assert draws([*before, *after]) == list(range(2 * (n_before + 5)))
        rows = Counter(t.id.instance_id for step in (before + after)[:6] for t in step.trajectories)
        assert set(rows.values()) <= {N_SAMPLES}, "a row was drawn twice in the first epoch"
        ends = [number for number, step in enumerate([*before, *after], start=1) if step.ends_epoch]
        assert ends == [number for number in (6,) if number <= n_before + 5]

    asyncio.run(check())


async def test_a_run_plays_no_more_batches_than_it_trains_on() -> None:
    run = Run(config(max_staleness_steps=4), ScriptedGenerator(), total_steps=3)
    await run.sync()
    await run.train(3)
    assert sorted(run.player.started) == list(range(6))


async def test_rollouts_continue_during_an_update_and_wait_for_a_slot() -> None:
    run = Run(config(max_staleness_steps=1), ScriptedGenerator())
    await run.sync()
    await run.source.take(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert run.player.started == [0, 1, 2, 3], "two batches before the first sync"
    run.step = 1
    await run.sync()
    for _ in range(10):
        await asyncio.sleep(0)
    assert run.player.started == [0, 1, 2, 3, 4, 5]
    await run.source.close()


@pytest.mark.parametrize("fails_before_take", [False, True])
async def test_an_error_of_a_later_batch_ends_the_step_at_once_and_loses_no_prompt(fails_before_take: bool) -> None:
    run = Run(
        config(max_staleness_steps=2), ScriptedGenerator(n_passes=lambda request: 1000 if request.id.draw < 4 else 0)
    )
    run.player.failing = {5}
    await run.sync()
    for _ in range(20 * fails_before_take):
        await asyncio.sleep(0)
    with pytest.raises(DataError, match="draw 5 failed"):
        await run.source.take(1)
    assert run.player.n_running == 4, "earlier rollouts have not ended"
    assert [draw for draw, *_ in run.source.state_dict()["unused"]] == list(range(6))
    await run.source.close()


async def test_prompts_that_cannot_be_drawn_end_the_next_step_but_no_sync(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(config(max_staleness_steps=1), ScriptedGenerator())
    await run.sync()
    run.dataset.broken = set(range(12))
    await run.train(1)
    assert "Could not draw the next prompts; the next step retries: row" in caplog.text
    position = run.source.state_dict()
    with pytest.raises(DataError, match=r"row \d+ is broken"):
        await run.source.take(2)
    assert run.source.state_dict() == position
    run.dataset.broken = set()
    assert draws(await run.train(3)) == list(range(2, 8))
    await run.source.close()


async def test_an_interrupted_step_loses_no_prompt() -> None:
    run = Run(config(max_staleness_steps=0, dynamic_sampling="filter"), ScriptedGenerator())
    run.player.reward = lambda id: 0.0 if id.draw == 0 else float(id.repetition_id)
    await run.sync()
    for _ in range(5):
        await asyncio.sleep(0)
    run.player.released.clear()
    taking = asyncio.create_task(run.source.take(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert run.player.n_running == 2, "the second batch of the step, since the first has one informative group"
    taking.cancel()
    await asyncio.wait([taking])
    run.player.released.set()
    assert draws(await run.train(1)) == [1, 2]
    await run.source.close()


async def test_a_step_without_valid_rollouts_ends_with_the_reason() -> None:
    run = Run(config(), ScriptedGenerator())
    run.player.reward = lambda id: None
    await run.sync()
    with pytest.raises(EnvError, match=r"4 of 4 rollouts at step 1 failed, .*it broke"):
        await run.source.take(1)
    await run.source.close()


async def test_a_sync_without_in_flight_updates_waits_for_rollouts_that_have_begun() -> None:
    cfg = config(max_staleness_steps=1, in_flight_weight_updates=False, num_parallel_generation_workers=3)
    run = Run(cfg, ScriptedGenerator())
    run.player.released.clear()
    await run.sync()
    for _ in range(5):
        await asyncio.sleep(0)
    assert run.player.n_running == 3
    syncing = asyncio.create_task(run.source.before_sync())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not syncing.done()
    run.player.released.set()
    await syncing
    assert run.player.started == [0, 1, 2], "the fourth group waits for the new weights"
    run.player.version = 1
    await run.source.after_sync(1)
    (step,) = [await run.source.take(2)]
    assert [t.weight_versions for t in step.trajectories] == [[0]] * 4
    await run.source.close()


@pytest.mark.parametrize("dynamic_sampling", [None, "filter", "replace"])
async def test_greedy_rollouts_are_played_beside_the_others(dynamic_sampling: str | None) -> None:
    run = Run(config(max_staleness_steps=1, dynamic_sampling=dynamic_sampling), ScriptedGenerator(), greedy=True)
    run.player.reward = lambda id: 10.0 + id.draw if id.repetition_id == N_SAMPLES else float(id.repetition_id)
    await run.sync()
    steps = await run.train(3)
    for step in steps:
        assert {t.greedy_reward for t in step.trajectories} == {10.0 + draw for draw in draws([step])}
        assert len(step.played) == 2 * N_SAMPLES, "greedy rollouts are not reported"
    assert draws(steps) == list(range(6))
    assert min(run.source._greedy) == 6, "those of trained prompts are dropped"
    await run.source.close()
