"""The contract of both generations of verifiers environments, tested with `verifiers_packages`."""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import skyrl_gym
from gym_kit.messages import message_text, user
from gym_kit.processes import no_leaks, wait_for_no_tasks
from skyrl_gym.adapters.verifiers import VerifiersEnv, rows
from skyrl_gym.adapters.verifiers.package import load_package
from skyrl_gym.runtime.worker import EnvWorker

ENTRY_POINT = "skyrl_gym.adapters.verifiers:VerifiersEnv"
ODD_TEXTS = ("", "\0", "\ud800", "٤", "</think>", "<think>4", '<tool_call>{"name": "x"}')


def make_row(env_id: str, index: int = 0, **arguments: Any) -> dict[str, Any]:
    return list(rows(env_id, n_rows=index + 1, **arguments))[index]


def make_env(row: dict[str, Any], max_turns: int = 9, **env_config: Any) -> VerifiersEnv:
    """Make the environment of a row, as the trainer does."""
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return VerifiersEnv(env_config, {**extras, "max_turns": max_turns})


async def play(row: dict[str, Any], *replies: str, max_turns: int = 9, **env_config: Any) -> tuple[Any, VerifiersEnv]:
    """Play an episode with these replies; return the last output and the environment."""
    env = make_env(row, max_turns, **env_config)
    try:
        await env.init_async(row["prompt"])
        for reply in replies:
            output = await env.step_async(reply)
        return output, env
    finally:
        await env.close_async()


class VerifiersContract:
    """Tests of two environments per generation: sums, which take one reply, and a guessing game."""

    sums: str
    game: str

    def log(self) -> list[str]:
        """Return the list of events that environments of the game append to."""
        log: list[str] = sys.modules[self.game.replace("-", "_")].log
        return log

    def test_format_of_rows(self) -> None:
        *_, row = all_rows = list(rows(self.sums, {"n_tasks": 4}))
        assert len(all_rows) == 4
        assert row["prompt"] == [{"role": "system", "content": "Answer with a number."}, *user("What is 3 + 3?")]
        assert (row["env_class"], row["data_source"]) == ("verifiers", self.sums)
        assert row["reward_spec"] == {"method": "verifiers", "ground_truth": "6"}
        assert row["extra_info"]["example_id"] == 3

    async def test_rows_survive_parquet(self, tmp_path: Path) -> None:
        records = [make_row(self.sums, 2), make_row(self.game, 1)]
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "train.parquet")
        sums, game = pq.read_table(tmp_path / "train.parquet").to_pylist()
        assert (await play(sums, "4"))[1].get_metrics()["correct"] == 1.0
        assert (await play(game, "2"))[0]["reward"] == 1.0

    def test_number_and_split_of_rows(self) -> None:
        assert len(list(rows(self.sums, {"n_tasks": 4}, n_rows=2))) == 2
        with pytest.raises(ValueError, match="split='test'"):
            rows(self.sums, split="test")

    async def test_several_turns(self) -> None:
        row = make_row(self.game, 1)
        env = make_env(row)
        assert (await env.init_async(row["prompt"]))[0] == user("Guess my number.")
        output = await env.step_async("7")
        assert (output["reward"], output["done"]) == (0.0, False)
        assert message_text(output)
        output = await env.step_async("2")
        assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
        assert env.get_metrics()["steps"] == 2
        await env.close_async()
        await wait_for_no_tasks()

    async def test_last_turn_of_the_trainer_is_scored(self) -> None:
        row = make_row(self.game)
        lost, env = await play(row, "7", "8", max_turns=2)
        assert (lost["reward"], lost["done"], lost["observations"]) == (0.0, True, [])
        assert "found" in env.get_metrics()
        assert (await play(row, "7", "1", max_turns=2))[0]["reward"] == 1.0

    async def test_limits_of_the_environment_apply(self) -> None:
        row = make_row(self.game)
        assert (await play(row, *"78787"))[0]["done"]  # its max_turns is 5
        output, _ = await play(row, "I give up")
        assert (output["done"], output["metadata"]["stop_condition"]) == (True, "gave_up")

    async def test_rollouts_share_nothing(self) -> None:
        game = list(rows(self.game, n_rows=3))

        async def one(i: int) -> list[float]:
            env = make_env(game[i % 3])
            await env.init_async(game[i % 3]["prompt"])
            rewards = []
            for guess in ["9"] * (i % 4) + [str(i % 3 + 1)]:
                rewards.append((await env.step_async(guess))["reward"])
                await asyncio.sleep(0)
            await env.close_async()
            return rewards

        played = await asyncio.gather(*(one(i) for i in range(12)))
        assert played == [[0.0] * (i % 4) + [1.0] for i in range(12)]
        await wait_for_no_tasks()

    def test_threads_load_an_environment_once(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            loaded = set(pool.map(lambda _: load_package(self.sums, {"n_tasks": 5}, {}), range(16)))
        assert len(loaded) == 1

    def test_blocking_episode_leaves_nothing_behind(self) -> None:
        row = make_row(self.game)
        skyrl_gym.register(id="verifiers", entry_point=ENTRY_POINT)
        env_config = OmegaConf.create({"id": self.game, "args": {}})
        with no_leaks(), skyrl_gym.make("verifiers", env_config=env_config, extras=row) as env:
            env.init(row["prompt"])
            assert not env.step("7")["done"]
        env.close()

    def test_separate_process_can_play_it(self) -> None:
        row = make_row(self.game)
        extras = json.loads(json.dumps({"extra_info": row["extra_info"], "max_turns": 3}))
        worker = EnvWorker()
        worker.call("make", ["verifiers", ENTRY_POINT, {}, {}, extras])
        worker.call("init", [row["prompt"]])
        assert not worker.call("step", ["7"])["done"]
        assert worker.call("step", ["1"])["reward"] == 1.0
        worker.call("close", [])

    @pytest.mark.parametrize("is_blocking", [False, True])
    async def test_unfinished_episode_is_cleaned_up_once(self, is_blocking: bool) -> None:
        row = make_row(self.game)
        env = make_env(row)
        await env.init_async(row["prompt"])
        await env.step_async("7")
        n_before = len(self.log())
        if is_blocking:
            env.close()
            await wait_for_no_tasks()
        await env.close_async()
        await env.close_async()
        assert len(self.log()) == n_before + 1
        await wait_for_no_tasks()
        with pytest.raises(RuntimeError, match="this episode is over"):
            await env.step_async("1")

    async def test_wrong_order_of_calls_raises(self) -> None:
        row = make_row(self.sums)
        env = make_env(row)
        with pytest.raises(RuntimeError, match="call init before step"):
            await env.step_async("0")
        await env.init_async(row["prompt"])
        with pytest.raises(RuntimeError, match="has started"):
            await env.init_async(row["prompt"])
        await env.close_async()

    @pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
    async def test_unusual_replies_are_scored(self, text: str) -> None:
        row = make_row(self.sums, 2)
        output, env = await play(row, text)
        assert output["done"]
        assert env.get_metrics()["correct"] == 0.0
        output, _ = await play(make_row(self.game), text, "1")
        assert output["reward"] == 1.0

    @pytest.mark.parametrize("records", ["{", "[]", '{"id": "x"}', 7])
    def test_invalid_record_is_refused(self, records: Any) -> None:
        with pytest.raises(ValueError, match=r"the row has extra_info\.verifiers='.*'; write the dataset with"):
            VerifiersEnv({"id": self.sums}, {"extra_info": {"verifiers": records}})
        with pytest.raises(ValueError, match=r"no extra_info\.verifiers; write the dataset with .*verifiers\.rows"):
            VerifiersEnv({"id": self.sums}, {"extra_info": {"example_id": 1}})

    def test_invalid_config_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"environment\.skyrl_gym\.verifiers\.args='x' must be a section"):
            make_env(make_row(self.sums), args="x")
        with pytest.raises(ValueError, match=r"environment\.skyrl_gym\.verifiers\.arg.*did you mean args"):
            make_env(make_row(self.sums), arg={})

    def test_id_has_several_spellings(self) -> None:
        row = make_row(self.sums)
        for env_id in (self.sums, self.sums.replace("-", "_"), f"me/{self.sums}@0.1.0"):
            make_env(row, id=env_id)
        with pytest.raises(ValueError, match=rf"id='other', but the row is of '{self.sums}'"):
            make_env(row, id="other")

    def test_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = make_row(self.sums)
        with pytest.raises(ImportError, match="the module no_such_env is not installed"):
            rows("no-such-env")
        with pytest.raises(ValueError, match=r"json .* contains no environment of verifiers"):
            rows("json")
        monkeypatch.setitem(sys.modules, "verifiers", None)
        with pytest.raises(ImportError, match=r"pip install '\./skyrl-gym\[verifiers\]'"):
            make_env(row)
