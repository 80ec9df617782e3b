"""What holds for environments of both generations of verifiers, with the packages in `verifiers_examples`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import skyrl_gym
from skyrl_gym.adapters.verifiers import VerifiersEnv, rows
from skyrl_gym.adapters.verifiers_package import load_package
from skyrl_gym.worker import Worker

ENTRY_POINT = "skyrl_gym.adapters.verifiers:VerifiersEnv"
EXAMPLES = Path(__file__).parent / "verifiers_examples"

ODD_TEXTS = [
    "",
    " ",
    "\0",
    "\ud800",
    "٤",
    "<think>",
    "</think>",
    "<think>4",
    "<tool_call>",
    '{"name": "x"}',
    "\x1b[2J4",
]


def row_of(env_id: str, index: int = 0, **arguments: Any) -> dict[str, Any]:
    """A row of an environment's dataset."""
    return list(rows(env_id, n_rows=index + 1, **arguments))[index]


def env_of(row: dict[str, Any], max_turns: int = 9, **env_config: Any) -> VerifiersEnv:
    """The environment of a row, as the trainer makes it."""
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return VerifiersEnv(env_config, {**extras, "max_turns": max_turns})


async def play(row: dict[str, Any], *replies: str, max_turns: int = 9, **env_config: Any) -> tuple[Any, VerifiersEnv]:
    """What the environment answers to the last of some replies; and the environment."""
    env = env_of(row, max_turns, **env_config)
    try:
        await env.init_async(row["prompt"])
        for reply in replies:
            output = await env.step_async(reply)
        return output, env
    finally:
        await env.close_async()


def text_of(output: Any) -> str:
    """The only observation of a step."""
    [message] = output["observations"]
    assert message["role"] == "user"
    text: str = message["content"]
    return text


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Afterwards there are no more threads than before."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


async def no_task_left() -> None:
    """Wait until this task is the only one of its event loop."""
    async with asyncio.timeout(30):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.01)


@contextmanager
def faster_than(seconds: float) -> Iterator[None]:
    """Fail if this process computes for longer than this, whatever else runs on the machine."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


class VerifiersContract:
    """Two environments of a generation: sums, which take one reply, and a game of guesses."""

    sums: str
    game: str

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The example packages can be imported, here and in processes that are started."""
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))

    def log(self) -> list[str]:
        """What environments of the game did; a list that grows."""
        log: list[str] = sys.modules[self.game.replace("-", "_")].log
        return log

    def test_rows_are_rows_of_ours(self) -> None:
        row = list(rows(self.sums, {"n_tasks": 4}))[3]
        assert row["prompt"] == [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": "What is 3 + 3?"},
        ]
        assert (row["env_class"], row["data_source"]) == ("verifiers", self.sums)
        assert row["reward_spec"] == {"method": "verifiers", "ground_truth": "6"}
        assert row["extra_info"]["example_id"] == 3

    async def test_rows_survive_parquet(self, tmp_path: Path) -> None:
        written = [row_of(self.sums, 2), row_of(self.game, 1)]
        pq.write_table(pa.Table.from_pylist(written), tmp_path / "train.parquet")
        sums, game = pq.read_table(tmp_path / "train.parquet").to_pylist()
        assert (await play(sums, "4"))[1].get_metrics()["correct"] == 1.0
        assert (await play(game, "2"))[0]["reward"] == 1.0

    def test_there_are_as_many_rows_as_are_asked_for(self) -> None:
        assert len(list(rows(self.sums, {"n_tasks": 4}))) == 4
        assert len(list(rows(self.sums, {"n_tasks": 4}, n_rows=2))) == 2

    def test_an_unknown_split_is_refused(self) -> None:
        with pytest.raises(ValueError, match="split='test'"):
            rows(self.sums, split="test")

    async def test_the_reward_is_the_weighted_sum(self) -> None:
        row = row_of(self.sums, 2)
        right, env = await play(row, "4")
        assert (right["done"], right["observations"]) == (True, [])
        components = right["metadata"]["reward_components"]
        assert components["correct"] == 2.0
        assert right["reward"] == sum(components.values())
        assert env.get_metrics()["correct"] == 1.0
        assert env.get_metrics()["steps"] == 1
        wrong, _ = await play(row, "5")
        assert right["reward"] - wrong["reward"] == 2.0

    async def test_the_model_goes_on_where_the_environment_asks(self) -> None:
        row = row_of(self.game, 1)
        env = env_of(row)
        assert (await env.init_async(row["prompt"]))[0] == [{"role": "user", "content": "Guess my number."}]
        output = await env.step_async("7")
        assert (output["reward"], output["done"]) == (0.0, False)
        assert text_of(output)
        output = await env.step_async("2")
        assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
        assert env.get_metrics()["steps"] == 2
        await env.close_async()
        await no_task_left()

    async def test_the_trainers_last_turn_is_scored(self) -> None:
        row = row_of(self.game)
        lost, env = await play(row, "7", "8", max_turns=2)
        assert (lost["reward"], lost["done"], lost["observations"]) == (0.0, True, [])
        assert "found" in env.get_metrics()
        assert (await play(row, "7", "1", max_turns=2))[0]["reward"] == 1.0

    async def test_the_environments_own_limits_count(self) -> None:
        row = row_of(self.game)
        assert (await play(row, *"78787"))[0]["done"]  # its max_turns is 5
        output, _ = await play(row, "I give up")
        assert (output["done"], output["metadata"]["stop_condition"]) == (True, "gave_up")

    async def test_rollouts_share_nothing(self) -> None:
        game = list(rows(self.game, n_rows=3))

        async def one(i: int) -> list[float]:
            env = env_of(game[i % 3])
            await env.init_async(game[i % 3]["prompt"])
            rewards = []
            for guess in ["9"] * (i % 4) + [str(i % 3 + 1)]:
                rewards.append((await env.step_async(guess))["reward"])
                await asyncio.sleep(0)
            await env.close_async()
            return rewards

        played = await asyncio.gather(*(one(i) for i in range(24)))
        assert played == [[0.0] * (i % 4) + [1.0] for i in range(24)]
        await no_task_left()

    def test_threads_load_an_environment_once(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            loaded = set(pool.map(lambda _: load_package(self.sums, {"n_tasks": 5}, {}), range(16)))
        assert len(loaded) == 1

    def test_threads_play_side_by_side(self) -> None:
        row = row_of(self.sums, 1)

        def one(_: int) -> float:
            with env_of(row) as env:
                env.init(row["prompt"])
                reward: float = env.step("2")["reward"]
                return reward

        with no_thread_left(), ThreadPoolExecutor(8) as pool:
            assert set(pool.map(one, range(16))) == {2.5}

    def test_by_hand_nothing_is_left(self) -> None:
        row = row_of(self.game)
        skyrl_gym.register(id="verifiers", entry_point=ENTRY_POINT)
        env_config = OmegaConf.create({"id": self.game, "args": {}})
        with no_thread_left(), skyrl_gym.make("verifiers", env_config=env_config, extras=row) as env:
            env.init(row["prompt"])
            assert not env.step("7")["done"]
        env.close()

    def test_a_process_of_its_own_can_play_it(self) -> None:
        row = row_of(self.game)
        extras = json.loads(json.dumps({"extra_info": row["extra_info"], "max_turns": 3}))
        worker = Worker()
        worker.answer("make", ["verifiers", ENTRY_POINT, {}, {}, extras])
        worker.answer("init", [row["prompt"]])
        assert not worker.answer("step", ["7"])["done"]
        assert worker.answer("step", ["1"])["reward"] == 1.0
        worker.answer("close", [])

    async def test_an_episode_that_is_given_up_is_cleaned_up_once(self) -> None:
        row = row_of(self.game)
        env = env_of(row)
        await env.init_async(row["prompt"])
        await env.step_async("7")
        n_before = len(self.log())
        await env.close_async()
        await env.close_async()
        assert len(self.log()) == n_before + 1
        await no_task_left()
        with pytest.raises(RuntimeError, match="this episode is over"):
            await env.step_async("1")

    async def test_an_episode_that_was_awaited_may_be_closed_by_hand(self) -> None:
        row = row_of(self.game)
        env = env_of(row)
        await env.init_async(row["prompt"])
        n_before = len(self.log())
        env.close()
        await no_task_left()
        assert len(self.log()) == n_before + 1

    async def test_an_episode_that_never_began_is_nothing_to_close(self) -> None:
        env = env_of(row_of(self.game))
        n_before = len(self.log())
        env.close()
        await env.close_async()
        assert len(self.log()) == n_before
        with pytest.raises(RuntimeError, match="over"):
            await env.step_async("1")

    async def test_calls_out_of_order_are_refused(self) -> None:
        row = row_of(self.sums)
        env = env_of(row)
        with pytest.raises(RuntimeError, match="call init before step"):
            await env.step_async("0")
        with pytest.raises(RuntimeError, match="call init before step"):
            env.step("0")
        await env.init_async(row["prompt"])
        with pytest.raises(RuntimeError, match="has begun"):
            await env.init_async(row["prompt"])
        await env.step_async("0")
        with pytest.raises(RuntimeError, match="is over"):
            await env.step_async("0")
        await env.close_async()

    @pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
    async def test_odd_texts_are_judged(self, text: str) -> None:
        row = row_of(self.sums, 2)
        output, env = await play(row, text)
        assert output["done"]
        assert env.get_metrics()["correct"] == 0.0
        output, _ = await play(row_of(self.game), text, "1")
        assert output["reward"] == 1.0

    @pytest.mark.parametrize("text", ["x" * 10**6, "<think>" * 10**5, "<tool_call>{" * 10**5, "\ud800" * 10**6])
    async def test_a_megabyte_is_judged_at_once(self, text: str) -> None:
        row = row_of(self.game)
        env = env_of(row)
        await env.init_async(row["prompt"])
        with faster_than(1.0):
            await env.step_async(text)
        assert (await env.step_async("1"))["reward"] == 1.0
        await env.close_async()

    def test_a_row_that_is_not_of_rows_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no extra_info\.verifiers; write the dataset with .*verifiers\.rows"):
            VerifiersEnv({"id": self.sums}, {"extra_info": {"example_id": 1}})

    @pytest.mark.parametrize("written", ["{", "[]", '{"id": "x"}', 7])
    def test_what_is_not_of_rows_is_named(self, written: Any) -> None:
        with pytest.raises(ValueError, match=r"the row has extra_info\.verifiers='.*'; write the dataset with"):
            VerifiersEnv({"id": self.sums}, {"extra_info": {"verifiers": written}})

    def test_arguments_are_a_section(self) -> None:
        with pytest.raises(ValueError, match=r"environment\.skyrl_gym\.verifiers\.args='x' must be a section"):
            env_of(row_of(self.sums), args="x")

    def test_the_id_may_be_written_in_several_ways(self) -> None:
        row = row_of(self.sums)
        for env_id in (self.sums, self.sums.replace("-", "_"), f"me/{self.sums}@0.1.0"):
            env_of(row, id=env_id)
        with pytest.raises(ValueError, match=rf"id='other', but the row is of '{self.sums}'"):
            env_of(row, id="other")

    def test_an_unknown_key_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"environment\.skyrl_gym\.verifiers\.arg.*did you mean args"):
            env_of(row_of(self.sums), arg={})

    def test_what_is_not_installed_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = row_of(self.sums)
        with pytest.raises(ImportError, match="there is no module no_such_env; install the package"):
            rows("no-such-env")
        with pytest.raises(ValueError, match=r"json .* holds no environment of verifiers"):
            rows("json")
        monkeypatch.setitem(sys.modules, "verifiers", None)
        with pytest.raises(ImportError, match=r"pip install '\./skyrl-gym\[verifiers\]'"):
            env_of(row)
