import pytest
from gym_kit.games import position

from skyrl_gym.envs.openspiel import prompts
from skyrl_gym.envs.openspiel.cases import AVAILABLE_CASES, State, load_game
from skyrl_gym.envs.openspiel.moves import legal_moves
from skyrl_gym.envs.openspiel.states import draw_position


def opening_of(case: str, seed: int = 0) -> State:
    return draw_position(load_game(case), seed, 0)


def test_introduction_names_the_case_and_its_rules() -> None:
    text = prompts.format_introduction(load_game("hex(board_size=3)"))
    assert text.splitlines()[0] == "Game: hex(board_size=3)"
    assert "connects the top row with the bottom row" in text
    assert prompts.format_introduction(load_game("matrix_pd")) == "Game: matrix_pd"
    assert {case.split("(")[0] for case in AVAILABLE_CASES} <= set(prompts.RULES)


def test_long_move_list_is_truncated() -> None:
    legal = legal_moves(opening_of("hex(board_size=11)"), 0)
    assert prompts.format_moves(legal, 3).splitlines() == [
        *("Legal actions:", "0: a1", "1: b1", "2: c1"),
        "... (121 in all; the others are legal too, by their text)",
    ]
    assert len(prompts.format_moves(legal, 121).splitlines()) == 122


@pytest.mark.parametrize(
    "case", ["leduc_poker", "liars_dice", "hearts", "euchre", "gin_rummy", "cribbage", "blackjack"]
)
def test_hidden_information_is_not_shown(case: str) -> None:
    """Two deals that look the same to a player have the same text, which is not the full state."""
    for seed in range(3):
        state = opening_of(case, seed)
        assert prompts.format_observation(state, state.current_player()) != str(state).strip("\n")


def test_observations_are_shown_without_the_opponents_hand() -> None:
    state, other = position("leduc_poker", 5, 2), position("leduc_poker", 5, 0)
    assert prompts.format_observation(state, 0) == prompts.format_observation(other, 0)
    assert prompts.format_observation(state, 1) != prompts.format_observation(other, 1)
    assert "Dealer: Cards: ??" in prompts.format_observation(opening_of("blackjack"), 0)
    assert "State of player's ships" in prompts.format_observation(opening_of("battleship"), 0)


def test_no_observation_writes_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    more = ("hearts", "phantom_ttt", "matrix_pd", "2048", "goofspiel(imp_info=True,num_cards=4)")
    for case in (*AVAILABLE_CASES, *more):
        state = opening_of(case)
        assert all(prompts.format_observation(state, player) for player in range(state.num_players()))
    assert capfd.readouterr() == ("", "")
