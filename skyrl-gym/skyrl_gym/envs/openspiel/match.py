"""A match: one game from a position to its end, with an opponent in every other seat."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from skyrl_gym.envs.openspiel.cases import Game, State, open_spiel
from skyrl_gym.envs.openspiel.moves import LegalMoves, legal_moves
from skyrl_gym.envs.openspiel.states import advance_chance, apply_jointly, is_simultaneous, legal_actions


@dataclass(frozen=True, slots=True)
class MatchTurn:
    """A decision of one player.

    legal: the player's legal moves.
    events: the other players' moves since this player's last turn, e.g. ``("Player 1 played b3.",)``. Empty in games
        with hidden information, since moves may be secret.
    """

    state: State
    player: int
    legal: LegalMoves
    events: tuple[str, ...] = ()


class Opponent(Protocol):
    """Base class for players of one seat in a match."""

    def choose(self, turn: MatchTurn, rng: random.Random) -> int:
        """Return the id of a legal action. All randomness comes from `rng`, so that matches are reproducible."""


class Match:
    """A game where `play` moves one seat, and opponents play the rest.

    All randomness comes from `rng`, in the order of play, so the same moves give the same cards, dice and random
    opponents.
    """

    def __init__(self, state: State, seat: int, opponents: Mapping[int, Opponent], rng: random.Random) -> None:
        self.game: Game = state.get_game()
        self.state = state.clone()
        self.seat = seat
        self._opponents = opponents
        self._rng = rng
        self._log: list[tuple[int, str]] = []
        self._seen = [0] * self.game.num_players()
        kind = self.game.get_type()
        self._is_open = kind.information == open_spiel().GameType.Information.PERFECT_INFORMATION

    @property
    def is_over(self) -> bool:
        """True if the game has ended."""
        return bool(self.state.is_terminal())

    def turn(self) -> MatchTurn:
        """Return the decision of the seat."""
        return self._new_turn(self.seat)

    def play(self, action: int) -> None:
        """Play a legal action of the seat, and advance to the seat's next decision or the end."""
        if is_simultaneous(self.state):
            self._play_together({self.seat: action})
        else:
            self._play_alone(self.seat, action)
        self.advance()

    def advance(self) -> None:
        """Play chance events and opponents up to the seat's next decision or the end."""
        while not self.state.is_terminal() and not self._is_seats_turn():
            if self.state.is_chance_node():
                advance_chance(self.state, self._rng)
            elif is_simultaneous(self.state):
                self._play_together({})
            else:
                player = self.state.current_player()
                self._play_alone(player, self._choice(player))

    def _is_seats_turn(self) -> bool:
        if is_simultaneous(self.state):
            return bool(legal_actions(self.state, self.seat))
        return int(self.state.current_player()) == self.seat

    def _play_together(self, actions: Mapping[int, int]) -> None:
        """Play a move of every player at once. No player sees another's move before choosing."""
        others = {
            player: self._choice(player)
            for player in self._opponents
            if player not in actions and legal_actions(self.state, player)
        }
        joint = {**actions, **others}
        for player in sorted(joint):
            self._log_move(player, joint[player])
        apply_jointly(self.state, joint, self._rng)

    def _play_alone(self, player: int, action: int) -> None:
        self._log_move(player, action)
        self.state.apply_action(action)

    def _choice(self, player: int) -> int:
        action = self._opponents[player].choose(self._new_turn(player), self._rng)
        assert action in legal_actions(self.state, player), f"player {player} chose {action}, which is not legal"
        return action

    def _log_move(self, player: int, action: int) -> None:
        if self._is_open:
            move = next(move for move in legal_moves(self.state, player).moves if move.action == action)
            self._log.append((player, move.text))

    def _new_turn(self, player: int) -> MatchTurn:
        unseen = self._log[self._seen[player] :]
        self._seen[player] = len(self._log)
        events = tuple(f"Player {other} played {text}." for other, text in unseen if other != player)
        return MatchTurn(self.state, player, legal_moves(self.state, player), events)
