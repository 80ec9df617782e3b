from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.catch.env import CatchEnv, CatchReward, parse_action
from skyrl_gym.metrics import default_aggregate_metrics

CAUGHT, MISSED = "RRRSS", "RRSSS"


def new_game(reward: dict[str, Any] | None = None, **start: Any) -> CatchEnv:
    """Create a game with ball 5 and paddle 2 on the default grid; keyword arguments change the row."""
    extras = {"reward_spec": reward or {}, "extra_info": {"ball_x": 5, "paddle_x": 2} | start}
    return CatchEnv(env_config={}, extras=extras)


def rewards_of(env: CatchEnv, replies: str) -> list[float]:
    return [env.step(reply)["reward"] for reply in replies]


AMOUNTS = {"mode": "shaped", "step_penalty": -0.5, "terminal_catch": 3, "terminal_miss": -7}


@pytest.mark.parametrize(
    ("reward", "replies", "expected"),
    [
        ({}, CAUGHT, [1 / 6 - 0.01] * 3 + [-0.01, 0.99]),
        ({}, "LSSSS", [-1 / 6 - 0.01, -0.01, -0.01, -0.01, -1.01]),
        ({"mode": "episodic"}, CAUGHT, [0, 0, 0, 0, 1.0]),
        ({"mode": "episodic"}, MISSED, [0, 0, 0, 0, -1.0]),
        (AMOUNTS, CAUGHT, [1 / 6 - 0.5] * 3 + [-0.5, 2.5]),
        (AMOUNTS, MISSED, [1 / 6 - 0.5] * 2 + [-0.5, -0.5, -7.5]),
    ],
)
def test_rewards_of_a_game(reward: dict[str, Any], replies: str, expected: list[float]) -> None:
    assert rewards_of(new_game(reward), replies) == pytest.approx(expected)
    env = new_game(reward)
    for turn in map(env.step, replies):
        assert sum(turn["metadata"]["reward_components"].values()) == turn["reward"]


@pytest.mark.parametrize(
    ("start", "replies", "rewards"),
    [
        ({"grid_w": 1, "ball_x": 0, "paddle_x": 0}, "RRRRR", [-0.01] * 4 + [0.99]),  # a single column needs no move
        ({"paddle_x": 0}, "L", [-0.01]),  # a wall costs only the step penalty
        ({"ball_x": 3, "ball_y": 4, "max_turns": 1}, "R", [0.99 + 1 / 6]),  # the paddle moves before the ball lands
    ],
)
def test_rewards_at_the_edges(start: dict[str, int], replies: str, rewards: list[float]) -> None:
    assert rewards_of(new_game(**start), replies) == pytest.approx(rewards)


@given(st.text("LRS", min_size=5, max_size=5), st.integers(0, 6), st.integers(0, 6))
def test_shaping_adds_up_to_the_distance_gained(replies: str, ball_x: int, paddle_x: int) -> None:
    env = new_game(ball_x=ball_x, paddle_x=paddle_x)
    total = sum(rewards_of(env, replies))
    gained = (abs(ball_x - paddle_x) - env.state.distance) / 6
    assert total == pytest.approx(gained - 0.05 + (1.0 if env.state.is_caught else -1.0))


@pytest.mark.parametrize(
    ("replies", "action"),
    [
        (["L", "l", "\n\tL\n", "\u3000L", "LR"], "L"),
        (["R", "r", "  R", "Right", "R<|im_end|>"], "R"),
        (["S", "", "   ", "I move R", "<think>", "7", "左", "🏓L", "ß", "\u017f", "\uff2c", "\ufffd"], "S"),
    ],
)
def test_the_first_letter_of_a_reply_decides(replies: list[str], action: str) -> None:
    assert {reply: parse_action(reply) for reply in replies} == dict.fromkeys(replies, action)


@given(st.text())
def test_every_reply_is_an_action_and_plays_a_turn(reply: str) -> None:
    env = new_game()
    metadata = env.step(reply)["metadata"]
    assert (metadata["caught"], metadata["action"]) == (False, parse_action(reply))
    assert metadata["action"] in {"L", "R", "S"}
    assert env.turns == 1


def test_a_turn_shows_the_next_state() -> None:
    step = new_game().step("R")
    text = "State: grid_w=7, grid_h=6, ball=(5,1), paddle_x=3, turns_left=4.\nAction (L/R/S):"
    assert step["observations"] == [{"role": "user", "content": text}]
    assert step["done"] is False


@pytest.mark.parametrize(("replies", "caught"), [(CAUGHT, True), (MISSED, False)])
def test_the_last_turn_has_no_observation_and_reports_the_catch(replies: str, caught: bool) -> None:
    env = new_game()
    *_, last = map(env.step, replies)
    assert (last["observations"], last["done"]) == ([], True)
    components = {"approach": 0.0, "step": -0.01, "ending": 1.0 if caught else -1.0}
    assert last["metadata"] == {"caught": caught, "action": "S", "reward_components": components}
    assert env.get_metrics() == {"steps": 5, "caught": int(caught)} | ({} if caught else {"failure": "missed by 1"})


def test_the_game_ends_with_the_ball_or_the_last_turn() -> None:
    assert new_game(max_turns=50, ball_y=4).step("S")["done"] is True
    env = new_game(max_turns=2, ball_x=2)
    assert env.step("S")["done"] is False
    assert env.get_metrics() == {"steps": 1, "caught": 0}
    last = env.step("S")
    assert (last["done"], last["metadata"]["caught"], last["reward"]) == (True, False, pytest.approx(-1.01))
    with pytest.raises(RuntimeError, match="this game ended after turn 2"):
        env.step("S")


def test_missing_values_of_a_row_take_defaults() -> None:
    """Missing values of a parquet row are None."""
    assert CatchEnv({}, {"extra_info": {"ball_x": 0, "paddle_x": 0}}).reward == CatchReward("shaped", -0.01, 1.0, -1.0)
    env = new_game({"mode": None}, grid_w=None, max_turns=None, seed=None)
    state = env.state
    assert (state.grid_w, state.grid_h, state.ball_y, state.turns_left) == (7, 6, 0, 5)
    assert (env.max_turns, env.reward.mode) == (5, "shaped")
    assert new_game(grid_h=9).max_turns == 8


def test_max_turns_of_the_trainer_and_other_keys_are_ignored() -> None:
    start = {"ball_x": 5, "paddle_x": 2, "max_turns": 5, "split": "train", "seed": 7}
    env = CatchEnv({}, {"max_turns": 1, "data_source": "synthetic_catch", "extra_info": start})
    assert env.max_turns == 5


@pytest.mark.parametrize(
    ("reward", "start", "message"),
    [
        ({"mode": "sparse"}, {}, "reward mode='sparse' is unknown; use one of shaped, episodic"),
        ({"step_penalty": float("nan")}, {}, "step_penalty=nan must be a finite number"),
        ({"terminal_catch": "1.0"}, {}, "terminal_catch='1.0' must be a finite number"),
        ({"terminal_miss": float("-inf")}, {}, "terminal_miss=-inf must be a finite number"),
        ({}, {"ball_x": None}, r"extra_info has no 'ball_x'; it has \['ball_x', 'paddle_x'\]"),
        ({}, {"ball_x": 2.5}, "ball_x=2.5 must be a whole number, got float"),
        ({}, {"paddle_x": "2"}, "paddle_x='2' must be a whole number, got str"),
        ({}, {"ball_y": 5}, r"ball_y=5 is the bottom row \(grid_h=6\)"),
        ({}, {"max_turns": 0}, "max_turns=0, grid_h=6: a game needs at least 1 turn and 2 rows"),
        ({}, {"grid_h": 1}, "max_turns=0, grid_h=1: a game needs at least 1 turn and 2 rows"),
        ({}, {"grid_w": 0}, "grid_w=0, grid_h=6: a ball needs at least 1 column and 2 rows"),
    ],
)
def test_a_row_with_an_invalid_reward_or_start_is_refused(
    reward: dict[str, Any], start: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        new_game(reward, **start)


def test_a_row_without_extra_info_is_refused() -> None:
    with pytest.raises(ValueError, match="extra_info has no 'ball_x'; it has"):
        CatchEnv({}, {})


def test_metrics_of_a_batch_are_catch_rate_and_mean_length() -> None:
    games = [{"steps": 5, "caught": 1}, {"steps": 3, "caught": 0}]
    assert CatchEnv.aggregate_metrics(games) == {"avg_steps": 4.0, "catch_rate": 0.5}
    assert CatchEnv.aggregate_metrics([]) == {}
    assert default_aggregate_metrics(games) == {"steps": 4.0, "caught": 0.5}
