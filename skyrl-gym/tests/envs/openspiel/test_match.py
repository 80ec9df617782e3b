import random

import pytest

from skyrl_gym.envs.openspiel.cases import AVAILABLE_CASES, load_game
from skyrl_gym.envs.openspiel.match import Match, MatchTurn
from skyrl_gym.envs.openspiel.opponents import RandomOpponent
from skyrl_gym.envs.openspiel.states import draw_position, is_simultaneous, legal_actions


class Scripted:
    """Plays given actions in order, and records its turns."""

    def __init__(self, *actions: int) -> None:
        self.actions = list(actions)
        self.turns: list[MatchTurn] = []

    def choose(self, turn: MatchTurn, rng: random.Random) -> int:
        self.turns.append(turn)
        return self.actions.pop(0)


def test_opponents_play_until_the_seats_turn() -> None:
    other = Scripted(4, 8)
    match = Match(load_game("tic_tac_toe").new_initial_state(), 1, {0: other}, random.Random(0))
    match.advance()
    assert match.state.history() == [4]
    assert match.turn().events == ("Player 0 played x(1,1).",)
    match.play(0)
    assert match.state.history() == [4, 0, 8]
    assert other.turns[1].events == ("Player 1 played o(0,0).",)
    assert match.turn().events == ("Player 0 played x(2,2).",)


def test_hidden_moves_are_no_events() -> None:
    match = Match(draw_position(load_game("leduc_poker"), 0, 0), 1, {0: Scripted(2)}, random.Random(0))
    match.advance()
    assert match.turn().events == ()
    other = Scripted(6, 5)
    state = load_game("goofspiel(num_cards=8,points_order=descending)").new_initial_state()
    match = Match(state, 0, {1: other}, random.Random(0))
    match.advance()
    assert match.turn().events == ()
    match.play(7)
    assert other.turns[0].events == ()
    assert match.turn().events == ("Player 1 played Bid: 7.",)
    match.play(0)
    assert other.turns[1].events == ("Player 0 played Bid: 8.",)
    assert match.state.history() == [7, 6, 0, 5]


@pytest.mark.parametrize("case", AVAILABLE_CASES)
def test_every_case_is_played_to_its_end(case: str) -> None:
    game = load_game(case)
    for seat in range(game.num_players()):
        opponents = {player: RandomOpponent() for player in range(game.num_players()) if player != seat}
        state, own = draw_position(game, seat, 0), random.Random(99)
        history = state.history()
        match = Match(state, seat, opponents, random.Random(seat))
        match.advance()
        while not match.is_over:
            assert is_simultaneous(match.state) or match.state.current_player() == seat
            turn = match.turn()
            assert turn.player == seat
            assert [move.action for move in turn.legal.moves] == legal_actions(match.state, seat)
            match.play(own.choice(turn.legal.moves).action)
        assert match.state.is_terminal()
        assert state.history() == history
