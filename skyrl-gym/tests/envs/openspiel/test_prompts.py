from __future__ import annotations

import pytest

from skyrl_gym.envs.openspiel import prompts
from skyrl_gym.envs.openspiel.cases import AVAILABLE_CASES, State, load_game
from skyrl_gym.envs.openspiel.moves import legal_moves
from skyrl_gym.envs.openspiel.states import opening


def position(case: str, seed: int = 0, n_random_steps: int = 0) -> State:
    return opening(load_game(case), seed, n_random_steps)


def test_a_decision_shows_who_what_and_how() -> None:
    state = position("hex(board_size=3)")
    text = prompts.decision(state, 0, legal_moves(state, 0), 100, ("Player 1 played b2.",))
    assert text == (
        "Player 1 played b2.\n\n"
        "You are player 0.\nCurrent state (your turn):\n. . . \n . . . \n  . . . \n\n"
        "Legal actions:\n0: a1\n1: b1\n2: c1\n3: a2\n4: b2\n5: c2\n6: a3\n7: b3\n8: c3\n\n" + prompts.ANSWER_FORMAT
    )


def test_the_introduction_names_the_case_and_explains_it() -> None:
    text = prompts.introduction(load_game("hex(board_size=3)"))
    assert text.splitlines()[0] == "Game: hex(board_size=3)"
    assert "connects the top row with the bottom row" in text
    assert prompts.introduction(load_game("matrix_pd")) == "Game: matrix_pd"


def test_every_case_that_comes_with_the_package_is_explained() -> None:
    assert {case.split("(")[0] for case in AVAILABLE_CASES} <= set(prompts.RULES)


def test_of_many_moves_the_first_are_listed_and_the_rest_counted() -> None:
    legal = legal_moves(position("hex(board_size=11)"), 0)
    lines = prompts.move_list(legal, 3).splitlines()
    assert lines == [
        "Legal actions:",
        "0: a1",
        "1: b1",
        "2: c1",
        "... (121 in all; the others are legal too, by their text)",
    ]
    assert len(prompts.move_list(legal, 121).splitlines()) == 122


@pytest.mark.parametrize(
    "case", ["leduc_poker", "liars_dice", "hearts", "euchre", "gin_rummy", "cribbage", "blackjack"]
)
def test_what_is_hidden_is_not_shown(case: str) -> None:
    """Two deals that look the same to a player read the same, and the full state is not shown."""
    for seed in range(5):
        state = position(case, seed)
        player = state.current_player()
        assert prompts.observation(state, player) != str(state).strip("\n")


def test_an_opponents_hand_is_not_shown() -> None:
    state = load_game("leduc_poker").new_initial_state()
    for card in (5, 2):
        state.apply_action(card)
    other = load_game("leduc_poker").new_initial_state()
    for card in (5, 0):
        other.apply_action(card)
    assert prompts.observation(state, 0) == prompts.observation(other, 0)
    assert prompts.observation(state, 1) != prompts.observation(other, 1)


def test_cards_are_shown_in_words_where_the_game_has_them() -> None:
    assert "Dealer: Cards: ??" in prompts.observation(position("blackjack"), 0)
    assert "State of player's ships" in prompts.observation(position("battleship"), 0)


def test_no_observation_writes_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    for case in (
        *AVAILABLE_CASES,
        "hearts",
        "phantom_ttt",
        "matrix_pd",
        "2048",
        "goofspiel(imp_info=True,num_cards=4)",
    ):
        state = position(case)
        for player in range(state.num_players()):
            assert prompts.observation(state, player)
    assert capfd.readouterr() == ("", "")
