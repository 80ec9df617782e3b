import asyncio
import random
import re
from typing import Any

import pytest
from gym_kit.messages import message_text, user
from gym_kit.texts import linear_time, long_text
from omegaconf import OmegaConf

import skyrl_gym
from skyrl_gym.adapters.textarena import TextArenaEnv

PROMPT = user("Let us play.")
GUESS = {"env_id": "GuessTheNumber-v0"}
TICTACTOE = {"env_id": "TicTacToe-v0", "num_players": 2}


def start_env(env_config: dict[str, Any], **extras: Any) -> TextArenaEnv:
    env = TextArenaEnv(env_config, extras)
    env.init(PROMPT)
    return env


class FirstFreeCell:
    """Plays the first free cell, and records its views."""

    views: list[str] = []  # noqa: RUF012, of all games

    def __call__(self, seen: str) -> str:
        self.views.append(seen)
        return re.findall(r"'(\[\d\])'", seen.splitlines()[-1])[0]


def rule_breaker(seen: str) -> str:
    return "[99]"


def play_bisection(env: Any) -> list[Any]:
    """Play with bisection; return all outputs."""
    low, high = 1, 20
    outputs = []
    while not outputs or not outputs[-1]["done"]:
        middle = (low + high) // 2
        outputs.append(env.step(f"<think>[99]?</think>[{middle}]"))
        if not outputs[-1]["done"]:
            low, high = (middle + 1, high) if "higher" in message_text(outputs[-1]) else (low, middle - 1)
    return outputs


def test_a_number_is_guessed() -> None:
    skyrl_gym.register(id="textarena", entry_point="skyrl_gym.adapters.textarena:TextArenaEnv")
    with skyrl_gym.make("textarena", env_config=OmegaConf.create(GUESS), extras={"max_turns": 20}) as env:
        prompt, _ = env.init(PROMPT)
        assert prompt[0]["content"].startswith("Let us play.\n\n[GAME] You are Player 0. You are playing Guess")
        outputs = play_bisection(env)
        assert outputs[-1]["reward"] == 1.0
        assert all(output["reward"] == 0.0 for output in outputs[:-1])
        assert env.get_metrics() == {"steps": len(outputs), "invalid_actions": 0, "finished": 1}
        with pytest.raises(RuntimeError, match="over"):
            env.step("[1]")


def test_game_decides_on_illegal_moves() -> None:
    with start_env(GUESS, seed=1) as env:
        assert message_text(env.step("[1]")).startswith("[GAME] The target number is ")  # and no earlier text
        env.step("[0]")
        env.step("[2]")
        env.step("[0]")
        assert env.get_metrics() == {"steps": 4, "invalid_actions": 2, "finished": 0}
    with start_env(GUESS, seed=1) as env:
        assert "attempted an invalid move" in message_text(env.step("I do not know"))
        output = env.step("")
        assert (output["done"], output["reward"]) == (True, 0.0)
        assert env.get_metrics() == {"steps": 2, "invalid_actions": 2, "finished": 1}


@pytest.mark.parametrize("env_config", [GUESS, TICTACTOE, {"env_id": "ConnectFour-v0", "num_players": 2}], ids=str)
@pytest.mark.parametrize(
    "reply", [f"[{'9' * 5000}]", long_text("[1"), long_text("<answer>"), "٣" * 10**4], ids=range(4)
)
def test_any_move_is_accepted_in_time(env_config: dict[str, Any], reply: str) -> None:
    with start_env(env_config, seed=1) as env, linear_time():
        env.step(reply)
        assert env.get_metrics()["invalid_actions"] == 1


def test_end_of_a_long_reply_is_the_move() -> None:
    with start_env(TICTACTOE, seed=1) as env:
        assert "in cell 4." in message_text(env.step("I wonder. " * 1000 + "[4]"))
        assert env.get_metrics()["invalid_actions"] == 0


@pytest.mark.parametrize(("section", "reward"), [({}, None), ({"missing_reward": -1}, -1.0)])
def test_unfinished_game_has_missing_reward(section: dict[str, Any], reward: float | None) -> None:
    with start_env(GUESS | section, seed=1, max_turns=1) as env:
        output = env.step("[1]")
        assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])


def test_opponent_plays_the_other_seat_and_may_break_rules() -> None:
    FirstFreeCell.views.clear()
    with TextArenaEnv({**TICTACTOE, "opponents": f"{__name__}:FirstFreeCell"}, {}) as env:
        prompt, _ = env.init(PROMPT)
        assert "'[0]', '[1]'" in prompt[0]["content"]
        seen = message_text(env.step("<think>[4] is in the middle</think>I take [4]."))
        assert "[Player 1] [0]" in seen
        assert "I take" not in seen
        assert "Let us" not in FirstFreeCell.views[0]
        assert "You are Player 1 in Tic Tac Toe" in FirstFreeCell.views[0]
        assert "[Player 0] I take [4]." in FirstFreeCell.views[0]
        env.step("[6]")
        output = env.step("[2]")
        assert (output["reward"], output["done"]) == (1.0, True)
        assert output["metadata"] == {"rewards": {0: 1.0, 1: -1.0}}
        metrics = {"steps": 3, "invalid_actions": 0, "finished": 1, "won": 1, "drawn": 0, "lost": 0}
        assert env.get_metrics() == {**metrics, "opponent_illegal": 0}
    with start_env({**TICTACTOE, "opponents": f"{__name__}:rule_breaker"}) as env:
        assert env.step("[4]")["reward"] == 1.0
        assert (env.get_metrics()["won"], env.get_metrics()["opponent_illegal"]) == (1, 1)


@pytest.mark.parametrize(
    ("env_id", "move"), [("ConnectFour-v0", "[col 3]"), ("IteratedPrisonersDilemma-v0", "[Defect]")]
)
def test_random_opponent_ignores_moves_offered_by_the_model(env_id: str, move: str) -> None:
    with start_env({"env_id": env_id, "num_players": 2}, seed=1) as env:
        assert "zzz" not in message_text(env.step(f"{move}\nYou had better play '[zzz]'."))
        assert env.get_metrics()["finished"] == 0


def test_custom_view_is_shown() -> None:
    with TextArenaEnv({"env_id": "TicTacToe-v0-train", "num_players": 2}, {"seed": 1}) as env:
        first = env.init(PROMPT)[0][0]["content"]
        seen = message_text(env.step("4"))
        for text in (first, seen):
            assert "You are Player 0 in Tic Tac Toe" in text
        assert " O " in seen


def test_seed_determines_the_game() -> None:
    def game(seed: int, *, is_disturbed: bool) -> list[str]:
        with TextArenaEnv({"env_id": "KuhnPoker-v0", "num_players": 2}, {"extra_info": {"seed": seed}}) as env:
            seen = [env.init(PROMPT)[0][0]["content"]]
            for _ in range(4):
                if is_disturbed:
                    random.random()
                    start_env(GUESS, seed=5).close()
                if (output := env.step("[check]"))["done"]:
                    break
                seen.append(message_text(output))
            return seen

    assert game(1, is_disturbed=False) == game(1, is_disturbed=True)
    assert len({game(seed, is_disturbed=False)[0] for seed in range(8)}) > 1


async def test_games_in_threads_are_independent() -> None:
    def game(seed: int) -> list[Any]:
        with start_env(GUESS, seed=seed) as env:
            return [output["observations"] for output in play_bisection(env)]

    alone = [game(seed) for seed in range(10)]
    assert await asyncio.gather(*(asyncio.to_thread(game, seed) for seed in range(10))) == alone


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({}, r"textarena\.env_id is missing"),
        ({"env_id": "TicTacTo-v0"}, r"env_id='TicTacTo-v0' is not a game of TextArena; did you mean 'TicTacToe-v0'"),
        ({**TICTACTOE, "seat": 2}, "seat=2 must be from 0 to num_players - 1 = 1"),
        ({**TICTACTOE, "opponents": []}, r"opponents=\[\] must be 1"),
    ],
)
def test_invalid_config_raises(env_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextArenaEnv(env_config, {})


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({"env_id": "TicTacToe-v0"}, "num_players=1"),
        ({"env_id": "Breakthrough-v0-tiny", "num_players": 2, "seat": 1}, "offers no moves in quotes; set opponents"),
    ],
)
def test_unplayable_game_raises_in_init(env_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_env(env_config, seed=1)
