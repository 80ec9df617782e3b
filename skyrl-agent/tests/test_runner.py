import asyncio

import numpy as np
import pytest
from agent_kit.engines import ScriptedEngine, tool_call
from agent_kit.trajectories import FINISH, ROW, new_runner
from train_kit.trajectories import make_trajectory

from skyrl_agent.runner import _Played, agent_metrics, to_rows
from skyrl_train.compat.skyrl.generator import GeneratorInput
from skyrl_train.errors import DataError
from skyrl_train.generators.base import BatchMetadata, rollout_requests
from skyrl_train.types import DrawnPrompt, PromptRow

EXTRAS = {key: value for key, value in ROW.items() if key != "prompt"}


async def test_output_has_skyrl_agents_lists() -> None:
    def script(prompt: str, turn: int) -> str:
        return tool_call("finish", answer="Paris" if "France" in prompt else "Rome")

    agents = new_runner(script, num_trajectories=2, val_config={"num_trajectories": 1})
    rows = [ROW, {**ROW, "prompt": [{"role": "user", "content": "What is the capital of Spain?"}]}]
    output = await agents.run(rows)
    assert output["traj_rewards"] == output["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert output["traj_idx"] == [0, 0, 1, 1]
    assert output["episode_nums"] == [1] * 4
    assert output["is_last_episode"] == [True] * 4
    assert output["rollout_metrics"]["raw_reward"] == 0.5
    assert output["rollout_metrics"]["num_all_resolved"] == output["rollout_metrics"]["num_none_resolved"] == 1.0
    assert output["rollout_metrics"]["tool_name/finish"] == 4.0
    assert all(len(a) == len(b) for a, b in zip(output["response_ids"], output["loss_masks"], strict=True))
    assert len((await agents.run(rows, val_mode=True))["traj_rewards"]) == 2
    await agents.close()


async def test_metrics_do_not_depend_on_the_number_of_calls() -> None:
    together, apart = (new_runner([FINISH], num_trajectories=2) for _ in range(2))
    expected = (await together.run([ROW] * 4))["rollout_metrics"]
    sampling, metadata = apart.cfg.generator.sampling(is_training=True), BatchMetadata(0, "train")
    prompts = [DrawnPrompt(n, PromptRow(str(n), list(ROW["prompt"]), None, EXTRAS), n) for n in range(4)]  # type: ignore[call-overload]
    calls = (apart.rollout(rollout_requests([prompt], 2, ""), sampling, metadata) for prompt in prompts)
    assert len(await asyncio.gather(*calls)) == 4
    assert apart.take_metrics() == expected
    assert apart.take_metrics() == {}
    await together.close()
    await apart.close()


async def test_rows_of_several_kinds_are_read() -> None:
    assert to_rows([ROW]) == [ROW]
    lists = GeneratorInput(prompts=[ROW["prompt"]], env_classes=[None], env_extras=[EXTRAS])  # type: ignore[typeddict-item]
    assert to_rows(lists) == [ROW]
    with pytest.raises(DataError, match="the input batch is of the type int; pass a list of rows"):
        to_rows(3)
    agents = new_runner([FINISH], num_trajectories=1, n_retries=0)
    prompt = np.array([{"role": "user", "content": "Capital?"}], dtype=object)
    rows = [
        {**ROW, "prompt": prompt, "extra_info": {"n": np.int64(3)}},
        {"question": "Capital?", "data_source": "nq", "extra_info": {"reference_answer": "Paris"}},
    ]
    assert (await agents.run(rows))["traj_rewards"] == [1.0, 1.0]
    assert (await agents.run([]))["traj_rewards"] == []
    await agents.close()


async def test_each_call_has_its_own_sessions_and_seeds() -> None:
    engine = ScriptedEngine([FINISH])
    agents = new_runner(engine, num_trajectories=2)
    for rows in ([ROW, ROW], [ROW], [ROW]):
        await agents.run(rows)
    await agents.close()
    assert len({request.session_id for request in engine.requests}) == 8
    assert len({request.seed for request in engine.requests}) == 8


@pytest.mark.parametrize(
    ("rewards", "n_all", "n_none"),
    [([1, 1], 1, 0), ([0, 0], 0, 1), ([1, 0], 0, 0), ([0, 1], 0, 0), ([None, 1], 1, 0), ([None, None], 0, 0)],
)
def test_a_group_with_some_successes_is_neither_resolved_nor_unresolved(
    rewards: list[float | None], n_all: int, n_none: int
) -> None:
    """A second group has both, so that counts of trajectories differ from counts of groups."""
    segments = [make_trajectory("0", None if r is None else [float(r)], repetition=i) for i, r in enumerate(rewards)]
    mixed = [make_trajectory("1", [float(i)], repetition=i) for i in range(2)]
    metrics = agent_metrics([_Played.of(t, {}) for t in [*segments, *mixed]], ())
    assert (metrics["num_all_resolved"], metrics["num_none_resolved"]) == (n_all, n_none)


def test_metrics_of_trajectories_that_differ() -> None:
    calls = [{"bash": 3, "finish": 1}, {"finish": 1}, {}]
    trajectories = [make_trajectory("0", [float(i)], repetition=i) for i in range(3)]
    metrics = agent_metrics([_Played.of(t, c) for t, c in zip(trajectories, calls, strict=True)], ())
    assert metrics["tool_calls_total"] == 5
    assert metrics["tool_calls_per_traj_mean"] == pytest.approx(5 / 3)
    assert (metrics["tool_calls_per_traj_min"], metrics["tool_calls_per_traj_max"]) == (0, 4)
    assert (metrics["tool_name/bash"], metrics["tool_name/finish"]) == (3, 2)
    assert metrics["raw_reward"] == 1.0
