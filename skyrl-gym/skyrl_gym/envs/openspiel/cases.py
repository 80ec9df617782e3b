"""Cases: OpenSpiel games with their parameters, such as ``hex(board_size=5)``."""

import difflib
import functools
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skyrl_gym.optional import install_command

Game = Any
"""A `pyspiel.Game`; the module has no type stubs."""

State = Any
"""A `pyspiel.State`."""

BOARD_SIZE_CASES = (
    "hex(board_size=5)",
    "hex(board_size=7)",
    "hex(board_size=9)",
    "go(board_size=9)",
    "go(board_size=13)",
    "breakthrough(columns=6,rows=6)",
    "breakthrough(columns=8,rows=8)",
    "dots_and_boxes(num_cols=3,num_rows=3)",
    "dots_and_boxes(num_cols=4,num_rows=4)",
    "dots_and_boxes(num_cols=5,num_rows=5)",
    "clobber(columns=5,rows=5)",
    "clobber(columns=6,rows=6)",
    "clobber(columns=7,rows=7)",
    "othello",
    "chess",
    "checkers",
)
"""Board games of growing size, as a template for custom `cases`."""

FOCUS_CASES = (
    "clobber(columns=5,rows=5)",
    "clobber(columns=6,rows=6)",
    "clobber(columns=7,rows=7)",
    "gin_rummy",
    "goofspiel",
    "goofspiel(num_cards=8)",
    "goofspiel(num_cards=10)",
    "goofspiel(num_cards=12)",
    "goofspiel(num_cards=14)",
    "goofspiel(num_cards=16)",
    "hex(board_size=5)",
    "hex(board_size=7)",
    "hex(board_size=9)",
    "hex(board_size=11)",
    "leduc_poker",
    "liars_dice",
    "othello",
)
"""The first cases of `AVAILABLE_CASES`, with the clearest learning signal."""

AVAILABLE_CASES = (
    *FOCUS_CASES,
    "battleship",
    "backgammon",
    "pig",
    "blackjack",
    "latent_ttt",
    "breakthrough(columns=6,rows=6)",
    "breakthrough(columns=8,rows=8)",
    "hearts",
    "cribbage",
    "euchre",
    "go(board_size=9)",
    "go(board_size=13)",
    "chess",
    "checkers",
    "dots_and_boxes(num_cols=3,num_rows=3)",
    "dots_and_boxes(num_cols=4,num_rows=4)",
    "dots_and_boxes(num_cols=5,num_rows=5)",
)
"""Default cases."""

DEFAULT_GAME_LIST = (
    "leduc_poker",
    "liars_dice",
    "battleship",
    "goofspiel",
    "gin_rummy",
    "backgammon",
    "pig",
    "blackjack",
    "latent_ttt",
    "breakthrough",
    "hex",
    "hearts",
    "cribbage",
    "euchre",
    "othello",
    "go",
    "chess",
    "checkers",
    "dots_and_boxes",
    "clobber",
)
"""Default `game_list` for `game_configs`."""

GAME_ALIASES = {"latent_tic_tac_toe": "latent_ttt", "phantom_tic_tac_toe": "phantom_ttt"}
PARAMETER_ALIASES = {("go", "go_board_size"): "board_size"}


def open_spiel() -> Any:
    """Import the module `pyspiel`. Raises `ImportError` with the command that installs it."""
    try:
        return importlib.import_module("pyspiel")
    except ImportError as problem:
        raise ImportError(
            f"OpenSpiel environments need the package open_spiel ({problem}): {install_command('openspiel')}"
        ) from problem


@functools.lru_cache(maxsize=1024)
def canonical(case: str) -> str:
    """Rewrite `case` with OpenSpiel's names and sorted parameters: ``go(go_board_size=9)`` is ``go(board_size=9)``.

    Raises:
        ValueError: OpenSpiel has no such game, or the game no such parameter. The message names the closest match.
    """
    name, parameters = _parse(case)
    return _text(name, parameters)


@functools.lru_cache(maxsize=256)
def load_game(case: str) -> Game:
    """Load a case's game. Games are immutable and cached.

    Raises:
        ValueError: OpenSpiel cannot load the game, or its tasks cannot be reproduced from a seed or shown as text.
    """
    spiel = open_spiel()
    try:
        game = spiel.load_game(canonical(case))
    except (spiel.SpielError, IndexError) as problem:  # IndexError: a parameter without default is missing
        raise ValueError(f"OpenSpiel cannot load the case {case!r}: {problem}") from problem
    reason = _find_obstacle(spiel, game)
    if reason:
        raise ValueError(f"the case {case!r} cannot be played here: {reason}; choose another game")
    return game


def resolve_cases(
    cases: Sequence[str] | str | None = None,
    game_list: Sequence[str] | str | None = None,
    game_configs: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    game_types: Sequence[str] | str | None = None,
) -> tuple[str, ...]:
    """Return the cases of a configuration, in order.

    Uses `cases` if given. Otherwise uses `game_list`, with one case per parameter set of each game: ``{"hex":
    [{"board_size": 5}]}`` in `game_configs`, or the game's defaults. Without either, uses `AVAILABLE_CASES`.
    `game_types` then selects by game (``hex``) or by case (``hex(board_size=5)``).

    Raises:
        ValueError: a name is unknown, or no case is selected.
    """
    chosen = [canonical(case) for case in _names(cases)]
    if not chosen and (game_list or game_configs):
        games = _names(game_list) or list(DEFAULT_GAME_LIST)
        configs = game_configs or {}
        unused = sorted({canonical(name) for name in configs} - {canonical(name) for name in games})
        if unused:
            raise ValueError(f"game_configs has {', '.join(unused)}, but game_list does not: {list(games)}")
        by_game = {canonical(name): parameter_sets for name, parameter_sets in configs.items()}
        chosen = [
            canonical(_text(canonical(name), parameters))
            for name in games
            for parameters in (by_game.get(canonical(name)) or [{}])
        ]
    chosen = chosen or [canonical(case) for case in AVAILABLE_CASES]
    types = [canonical(name) for name in _names(game_types)]
    selected = [case for case in chosen if not types or any(_is_of_type(case, game_type) for game_type in types)]
    if not selected:
        raise ValueError(f"game_types={types} matches none of the cases {chosen}")
    return tuple(selected)


def _find_obstacle(spiel: Any, game: Game) -> str:
    """Return why no tasks can be made from `game`, or "" if they can."""
    kind = game.get_type()
    if kind.dynamics == spiel.GameType.Dynamics.MEAN_FIELD:
        return "it is a mean-field game, which has no single player's move"
    if kind.chance_mode == spiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        return "it draws its chance events itself, so positions cannot be reproduced from a seed"
    if kind.provides_information_state_string or kind.provides_observation_string:
        return ""
    is_open = kind.information == spiel.GameType.Information.PERFECT_INFORMATION
    return "" if is_open else "it cannot show a player's knowledge as text"


def _is_of_type(case: str, game_type: str) -> bool:
    return case == game_type or case.startswith(f"{game_type}(")


def _names(value: Sequence[str] | str | None) -> list[str]:
    """Return names as a list. A string is split at commas outside parentheses."""
    parts = _split(value) if isinstance(value, str) else list(value or ())
    return [part.strip() for part in parts if part.strip()]


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _parse(case: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(case, str) or not re.fullmatch(r"\s*\w+\s*(\(.*\)\s*)?", case, flags=re.DOTALL):
        raise ValueError(f"the case {case!r} must be a game with its parameters, such as 'hex(board_size=5)'")
    if case.count("(") != case.count(")"):
        raise ValueError(f"the case {case!r} has {case.count('(')} '(' and {case.count(')')} ')'")
    spiel = open_spiel()
    try:
        parsed = spiel.game_parameters_from_string(case.strip())
    except spiel.SpielError as problem:
        raise ValueError(f"the case {case!r} cannot be parsed: {problem}") from problem
    values = {key.strip(): value for key, value in parsed.items()}
    name = values.pop("name").strip()
    name = GAME_ALIASES.get(name, name)
    parameters = {PARAMETER_ALIASES.get((name, key), key): value for key, value in values.items()}
    _check_known("game", name, _games(), case)
    for parameter in parameters:
        _check_known(f"parameter of {name}", parameter, _games()[name], case)
    return name, parameters


@functools.cache
def _games() -> dict[str, list[str]]:
    """Return the parameters of each OpenSpiel game."""
    return {kind.short_name: sorted(kind.parameter_specification) for kind in open_spiel().registered_games()}


def _check_known(kind: str, name: str, known: Iterable[str], case: str) -> None:
    """Raise for an unknown name before OpenSpiel does: it would also write to the terminal."""
    if name in (known := list(known)):
        return
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known) or 'none'}"
    raise ValueError(f"the case {case!r} names an unknown {kind}, {name!r}; {hint}")


def _text(name: str, parameters: Mapping[str, Any]) -> str:
    if not parameters:
        return name
    return f"{name}({','.join(f'{key}={_value(parameters[key])}' for key in sorted(parameters))})"


def _value(value: Any) -> str:
    """Format a parameter as OpenSpiel does. A nested game is a dict with its name."""
    if isinstance(value, Mapping):
        inner = {key: value[key] for key in value if key != "name"}
        return f"{value['name']}({','.join(f'{key}={_value(inner[key])}' for key in sorted(inner))})"
    return str(value).strip()
