import random

import pytest

from skyrl_gym.envs.openspiel.cases import load_game
from skyrl_gym.envs.openspiel.states import (
    advance_chance,
    apply_jointly,
    apply_move,
    deserialize,
    draw_position,
    is_simultaneous,
    player_to_move,
)


def test_openings_without_random_moves() -> None:
    game = load_game("leduc_poker")
    for seed in (0, 42):
        state = draw_position(game, seed, 4)
        assert state.history() == draw_position(game, seed, 0).history()
        assert len(state.history()) == 2  # the two cards
    first, again, other = (str(draw_position(load_game("gin_rummy"), seed, 0)) for seed in (3, 3, 4))
    assert first == again != other
    with pytest.raises(ValueError, match=r"no player of the game hex\(board_size=0\) can move \(seed 0\)"):
        draw_position(load_game("hex(board_size=0)"), 0, 0)


def test_chance_events_follow_their_probabilities() -> None:
    game = load_game("pig(piglet=True)")  # a 1, or anything else
    drawn = []
    for seed in range(600):
        state = game.new_initial_state()
        state.apply_action(state.legal_actions()[0])  # roll
        ones = state.chance_outcomes()[0]
        advance_chance(state, random.Random(seed))
        drawn.append(state.history()[-1])
    assert ones[1] == pytest.approx(1 / 6)
    assert 70 < drawn.count(ones[0]) < 130


def test_others_move_at_random_in_simultaneous_games() -> None:
    game = load_game("goofspiel(num_cards=8,points_order=descending)")
    others = set()
    for seed in range(40):
        state = game.new_initial_state()
        assert is_simultaneous(state)
        assert player_to_move(state, 1) == 1
        apply_move(state, 1, 7, random.Random(seed))
        own, other = state.history()[1], state.history()[0]
        assert own == 7
        others.add(other)
    assert len(others) > 5
    state = game.new_initial_state()
    apply_jointly(state, {0: 2, 1: 5}, random.Random(0))
    assert state.history() == [2, 5]


@pytest.mark.parametrize("text", ["", "hello", "[Game]\nhexx()\n[State]\n1\n", "[Meta]\nVersion: 1\n[Game]\n"])
def test_invalid_state_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="serialized_game_and_state is not a state of OpenSpiel"):
        deserialize(text)
