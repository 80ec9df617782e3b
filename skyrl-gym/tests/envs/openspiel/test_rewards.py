import random

import pytest
from gym_kit.games import position

from skyrl_gym.envs.openspiel.cases import State, load_game
from skyrl_gym.envs.openspiel.rewards import move_value, scaled_return, utility_range
from skyrl_gym.envs.openspiel.states import draw_position, is_simultaneous


@pytest.mark.parametrize(
    ("case", "returns", "player", "reward"),
    [
        ("hex", [1.0, -1.0], 0, 1.0),
        ("hex", [1.0, -1.0], 1, 0.0),
        ("chess", [0.0, 0.0], 1, 0.5),
        ("leduc_poker", [-13.0, 13.0], 0, 0.0),
        ("leduc_poker", [3.0, -3.0], 0, 16 / 26),
        ("gin_rummy", [25.0, -25.0], 0, 0.75),
        ("gin_rummy", [62.0, -62.0], 0, 1.0),
        ("gin_rummy", [62.0, -62.0], 1, 0.0),
        ("gin_rummy(gin_bonus=100)", [198.0, -198.0], 0, 1.0),
        ("gin_rummy(gin_bonus=100)", [50.0, -50.0], 0, (50 + 198) / 396),
        ("hearts", [26.0, 13.0, 0.0, 13.0], 0, 1.0),
        ("hearts", [26.0, 13.0, 0.0, 13.0], 3, 0.5),
        ("hearts(jd_bonus=True)", [36.0, 13.0, 0.0, 13.0], 1, 13 / 36),
        ("cribbage", [1121.0, -907.0], 0, (1121 + 1149) / 2298),
    ],
)
def test_return_is_scaled_to_the_utility_range(case: str, returns: list[float], player: int, reward: float) -> None:
    assert scaled_return(load_game(case), returns, player) == pytest.approx(reward)


def test_value_is_the_mean_over_random_games() -> None:
    state = position("tic_tac_toe", 0, 2)
    for action in (4, 8):
        value = move_value(state, 0, action, 4000, "0/0")
        assert value == pytest.approx(exact_value(state.child(action)), abs=0.02)


def test_value_of_a_move_is_deterministic() -> None:
    state = draw_position(load_game("hex(board_size=5)"), 0, 0)
    before = str(state)
    first = [move_value(state, 0, action, 4, "0/7") for action in (0, 12)]
    random.random()
    assert [move_value(state, 0, action, 4, "0/7") for action in (12, 0)] == first[::-1]
    seeds = {move_value(state, 0, 12, 4, f"0/{task_id}") for task_id in range(20)}
    assert len(seeds) > 1
    assert str(state) == before


def test_own_move_is_kept_in_simultaneous_games() -> None:
    state = draw_position(load_game("goofspiel(num_cards=2,points_order=descending)"), 0, 0)
    assert is_simultaneous(state)
    high, low = (move_value(state, 0, action, 400, "0/0") for action in (1, 0))
    # 2 for the card 2 wins or ties both cards, 1 for it loses or ties
    assert high == pytest.approx(0.75, abs=0.05)
    assert low == pytest.approx(0.25, abs=0.05)


def test_game_without_a_utility_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"utilities of the game 2048\(max_tile=0\) range from 0.0 to nan"):
        utility_range(load_game("2048(max_tile=0)"))


def exact_value(state: State) -> float:
    """Return the mean scaled return of player 0 over all games of random play from `state` on."""
    if state.is_terminal():
        return float(state.returns()[0] + 1) / 2
    actions = state.legal_actions()
    return sum(exact_value(state.child(action)) for action in actions) / len(actions)
