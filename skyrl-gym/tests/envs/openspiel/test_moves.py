import random

import pytest
from gym_kit.games import BACKGAMMON, walk

from skyrl_gym.envs.openspiel.cases import AVAILABLE_CASES, load_game
from skyrl_gym.envs.openspiel.moves import LegalMoves, Move, legal_moves, lower_ascii
from skyrl_gym.envs.openspiel.states import draw_position, is_simultaneous, legal_actions, random_step


def first_decision(case: str, player: int = 0) -> LegalMoves:
    return legal_moves(draw_position(load_game(case), 0, 0), player)


@pytest.mark.parametrize(
    ("case", "player", "text", "raw"),
    [
        ("hex(board_size=5)", 0, "a1", "a1"),
        ("go(board_size=9)", 0, "a1", "B a1"),
        ("gin_rummy", 0, "Draw upcard", "Player: 0 Action: Draw upcard"),
        ("goofspiel(num_cards=8)", 1, "Bid: 1", "[P1]Bid: 1"),
        ("backgammon", 1, "8/3 6/2", "137 - 8/3 6/2"),
        ("universal_poker", 0, "Call", "player=0 move=Call"),
        (
            "battleship",
            0,
            "place ship horizontally with top-left corner in (0, 0)",
            "Pl0: place ship horizontally with top-left corner in (0, 0)",
        ),
    ],
)
def test_text_of_moves(case: str, player: int, text: str, raw: str) -> None:
    state = draw_position(load_game(case), 0, 0)
    first = legal_moves(state, state.current_player() if not is_simultaneous(state) else player).moves[0]
    assert (first.text, first.raw) == (text, raw)


def test_texts_and_numbers_are_distinct_in_every_case() -> None:
    for case in AVAILABLE_CASES:
        game = load_game(case)
        for seed in range(3):
            state, rng = draw_position(game, seed, 0), random.Random(seed)
            for _ in range(30):
                if state.is_terminal():
                    break
                for player in range(game.num_players()):
                    if state.is_chance_node() or not legal_actions(state, player):
                        continue
                    moves = legal_moves(state, player).moves
                    assert [move.action for move in moves] == legal_actions(state, player)
                    assert len({move.text for move in moves}) == len(moves)
                    assert len({move.number for move in moves}) == len(moves)
                random_step(state, rng)


def test_moves_count_from_zero_and_bids_have_their_value() -> None:
    assert [move.number for move in first_decision("hex(board_size=3)").moves] == list(range(9))
    state = load_game("goofspiel(num_cards=8,points_order=descending)").new_initial_state()
    state.apply_actions([2, 0])
    assert [(move.number, move.text) for move in legal_moves(state, 0).moves][:3] == [
        (1, "Bid: 1"),
        (2, "Bid: 2"),
        (4, "Bid: 4"),
    ]


def test_number_that_is_a_moves_text_is_not_used_for_another_move() -> None:
    seen_mixed = False
    for seed in range(20):
        for legal in walk("dou_dizhu", seed):
            by_text = {move.text: move for move in legal.moves}
            for move in legal.moves:
                assert by_text.get(str(move.number), move) is move
            seen_mixed |= "7" in by_text and len(legal.moves) > 7
    assert seen_mixed


def test_moves_with_equal_texts_are_distinguished_by_their_ids() -> None:
    double = next(move for move in BACKGAMMON.moves if move.text.endswith(")"))
    assert double.text.endswith(f" ({double.action})")
    assert double.text.removesuffix(f" ({double.action})") in {move.text for move in BACKGAMMON.moves}


def test_case_of_names_is_ignored_unless_it_matters() -> None:
    ambiguous = LegalMoves((Move(0, "b4", 0, "b4"), Move(1, "B4", 1, "B4")))
    assert (ambiguous.by_name["b4"].action, ambiguous.by_name["B4"].action) == (0, 1)
    clash = LegalMoves((Move(0, "Bc", 0, "Bc"), Move(1, "bC", 1, "bC")))
    assert "bc" not in clash.by_name
    assert lower_ascii("ABCz İßΣ１") == "abcz İßΣ１"  # of the same length
