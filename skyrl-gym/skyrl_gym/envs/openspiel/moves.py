"""Moves: the legal actions of a decision as a model reads and names them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from skyrl_gym.envs.openspiel.cases import State
from skyrl_gym.envs.openspiel.states import legal_actions

# What OpenSpiel puts before some moves: who moves, or the number of the action.
_PREFIX = re.compile(r"^(Player: \d+ Action: |\[P\d+\]|Pl\d+: |player=\d+ move=|Player \d+ (?=bid)|p\d+:|\d+ - (?=\S))")
_STONE = re.compile(r"^[BW] ")
_STONE_GAMES = frozenset({"go", "phantom_go"})
_CASE_MATTERS = frozenset({"antichess", "chess", "crazyhouse", "dark_chess", "shogi", "xiangqi"})
"""Games in which b and B are different pieces."""

_WHOLE_NUMBER = re.compile(r"(?<!\S)(?:0|[1-9]\d*)(?!\S)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Move:
    """A legal action, e.g. ``Move(action=52, text="Draw upcard", number=0, raw="Player: 0 Action: Draw upcard")``.

    action: OpenSpiel's id.
    text: the move as the prompt shows it; no two legal moves share one.
    number: the number that the prompt shows beside it.
    raw: OpenSpiel's own text.
    """

    action: int
    text: str
    number: int
    raw: str


@dataclass(frozen=True)
class LegalMoves:
    """All that one player may do at one decision, in OpenSpiel's order."""

    moves: tuple[Move, ...]
    is_case_sensitive: bool = False

    @cached_property
    def by_number(self) -> dict[int, Move]:
        """Moves by the number that the prompt shows."""
        return {move.number: move for move in self.moves}

    @cached_property
    def by_name(self) -> dict[str, Move]:
        """Moves by what a model may call them: their text or OpenSpiel's, exactly or, if that is clear, in any case."""
        names = {_one_line(move.raw): move for move in self.moves} | {move.text: move for move in self.moves}
        if self.is_case_sensitive:
            return names
        folded: dict[str, list[Move]] = {}
        for name, move in names.items():
            folded.setdefault(lower_ascii(name), []).append(move)
        clear = {name: moves[0] for name, moves in folded.items() if len({move.action for move in moves}) == 1}
        return clear | names


def legal_moves(state: State, player: int) -> LegalMoves:
    """What `player` may do at this decision."""
    game_name = state.get_game().get_type().short_name
    actions = legal_actions(state, player)
    raw = [state.action_to_string(player, action) for action in actions]
    texts = _distinct([_readable(text, game_name) for text in raw], actions)
    numbers = _numbers(texts)
    moves = tuple(map(Move, actions, texts, numbers, raw))
    return LegalMoves(moves, is_case_sensitive=game_name in _CASE_MATTERS)


def lower_ascii(text: str) -> str:
    """`text` with A-Z in lower case and every other character as it is, so that it keeps its length."""
    return text.translate(_LOWER)


_LOWER = {ord(letter): ord(letter) + 32 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


def _readable(raw: str, game_name: str) -> str:
    text = _PREFIX.sub("", _one_line(raw), count=1)
    return _STONE.sub("", text, count=1) if game_name in _STONE_GAMES else text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _distinct(texts: list[str], actions: list[int]) -> list[str]:
    """`texts`, in which the id of the action tells moves apart that read alike."""
    seen: set[str] = set()
    distinct = []
    for text, action in zip(texts, actions, strict=True):
        distinct.append(f"{text} ({action})".strip() if not text or text in seen else text)
        seen.add(text)
    return distinct


def _numbers(texts: list[str]) -> list[int]:
    """One number for each move, from 0 up.

    Where each move names one number of its own, as bids do, it has that one: "3" cannot mean two things. A number that
    is the text of a move is given to no other.
    """
    own = [_WHOLE_NUMBER.findall(text) for text in texts]
    if all(len(numbers) == 1 for numbers in own) and len({numbers[0] for numbers in own}) == len(texts):
        return [int(numbers[0]) for numbers in own]
    taken = {int(text) for text in texts if _WHOLE_NUMBER.fullmatch(text)}
    free = (number for number in range(len(texts) + len(taken)) if number not in taken)
    return [int(text) if _WHOLE_NUMBER.fullmatch(text) else next(free) for text in texts]
