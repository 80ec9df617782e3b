"""The legal moves of a decision, and the names by which a model refers to them."""

import re
from dataclasses import dataclass
from functools import cached_property

from skyrl_gym.envs.openspiel.cases import State
from skyrl_gym.envs.openspiel.states import legal_actions

# OpenSpiel's prefix on some moves: the player, or the action's number.
_PREFIX = re.compile(r"^(Player: \d+ Action: |\[P\d+\]|Pl\d+: |player=\d+ move=|Player \d+ (?=bid)|p\d+:|\d+ - (?=\S))")
_STONE = re.compile(r"^[BW] ")
_STONE_GAMES = frozenset({"go", "phantom_go"})
_CASE_MATTERS = frozenset({"antichess", "chess", "crazyhouse", "dark_chess", "shogi", "xiangqi"})
"""Games whose move notation is case-sensitive, e.g. with different pieces b and B."""

_WHOLE_NUMBER = re.compile(r"(?<!\S)(?:0|[1-9]\d*)(?!\S)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Move:
    """A legal action, e.g. ``Move(action=52, text="Draw upcard", number=0, raw="Player: 0 Action: Draw upcard")``.

    action: OpenSpiel's id.
    text: the move as the prompt shows it. Unique among the legal moves.
    number: the number of the move in the prompt.
    raw: OpenSpiel's own text.
    """

    action: int
    text: str
    number: int
    raw: str


@dataclass(frozen=True)
class LegalMoves:
    """A player's legal moves at one decision, in OpenSpiel's order."""

    moves: tuple[Move, ...]
    is_case_sensitive: bool = False

    @cached_property
    def by_number(self) -> dict[int, Move]:
        """Moves by their numbers in the prompt."""
        return {move.number: move for move in self.moves}

    @cached_property
    def by_name(self) -> dict[str, Move]:
        """Moves by their text or OpenSpiel's, exact or, if unambiguous, in lower case."""
        names = {_one_line(move.raw): move for move in self.moves} | {move.text: move for move in self.moves}
        if self.is_case_sensitive:
            return names
        folded: dict[str, list[Move]] = {}
        for name, move in names.items():
            folded.setdefault(lower_ascii(name), []).append(move)
        unambiguous = {name: moves[0] for name, moves in folded.items() if len({move.action for move in moves}) == 1}
        return unambiguous | names


def legal_moves(state: State, player: int) -> LegalMoves:
    """Return the legal moves of `player` at this decision."""
    game_name = state.get_game().get_type().short_name
    actions = legal_actions(state, player)
    raw = [state.action_to_string(player, action) for action in actions]
    texts = _make_distinct([_strip_prefix(text, game_name) for text in raw], actions)
    numbers = _numbers(texts)
    moves = tuple(map(Move, actions, texts, numbers, raw))
    return LegalMoves(moves, is_case_sensitive=game_name in _CASE_MATTERS)


def lower_ascii(text: str) -> str:
    """Lowercase A-Z only. This preserves the length."""
    return text.translate(_LOWER)


_LOWER = {ord(letter): ord(letter) + 32 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


def _strip_prefix(raw: str, game_name: str) -> str:
    text = _PREFIX.sub("", _one_line(raw), count=1)
    return _STONE.sub("", text, count=1) if game_name in _STONE_GAMES else text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _make_distinct(texts: list[str], actions: list[int]) -> list[str]:
    """Append the id of the action to empty texts and duplicates."""
    seen: set[str] = set()
    distinct = []
    for text, action in zip(texts, actions, strict=True):
        distinct.append(f"{text} ({action})".strip() if not text or text in seen else text)
        seen.add(text)
    return distinct


def _numbers(texts: list[str]) -> list[int]:
    """Return a number for each move, from 0 up.

    If each text contains exactly one number and all differ, as in bids, these are the moves' numbers, so "3" is
    unambiguous. A number that is the whole text of a move is never assigned to a different move.
    """
    own = [_WHOLE_NUMBER.findall(text) for text in texts]
    if all(len(numbers) == 1 for numbers in own) and len({numbers[0] for numbers in own}) == len(texts):
        return [int(numbers[0]) for numbers in own]
    taken = {int(text) for text in texts if _WHOLE_NUMBER.fullmatch(text)}
    free = (number for number in range(len(texts) + len(taken)) if number not in taken)
    return [int(text) if _WHOLE_NUMBER.fullmatch(text) else next(free) for text in texts]
