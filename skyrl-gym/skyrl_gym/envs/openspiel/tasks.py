"""Tasks: positions by number. The same configuration and task id always give the same position."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from skyrl_gym.envs.openspiel import prompts
from skyrl_gym.envs.openspiel.cases import Game, State, load_game, resolve_cases
from skyrl_gym.envs.openspiel.moves import LegalMoves, legal_moves
from skyrl_gym.envs.openspiel.options import given, one_of, reject_unknown, whole_number
from skyrl_gym.envs.openspiel.rewards import REWARD_MODES, utility_range
from skyrl_gym.envs.openspiel.states import deserialize, opening, player_to_move, serialize

logger = logging.getLogger(__name__)

_CASE_OPTIONS = ("cases", "game_list", "game_configs", "game_types")
_OPTION_ALIASES = {"num_tasks_per_game": "num_tasks_per_case"}


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Which positions there are, how they are shown and how a move is scored.

    cases: game load strings; see `resolve_cases` for what else they come from.
    num_tasks_per_case: positions of each case.
    max_random_steps: random moves from the beginning of a game to its position, dealt cards and dice included. With 0,
        all positions of a game without chance are the same one.
    seed: task k of every case is drawn with ``seed + k``.
    reward_mode: ``outcome``, the mean of `n_playouts` random games from the move on; or ``legal``, 1 for a legal move.
    n_playouts: how many random games; one costs 0.1 to 3 ms.
    max_listed_moves: legal moves that a prompt lists; any more are legal, but the model must know their text.
    seat: who the model is where all players move at once; by default, the players take turns from task to task.
    """

    cases: tuple[str, ...] = field(default_factory=resolve_cases)
    num_tasks_per_case: int = 100
    max_random_steps: int = 4
    seed: int = 0
    reward_mode: str = "outcome"
    n_playouts: int = 8
    max_listed_moves: int = 400
    seat: int | None = None

    def __post_init__(self) -> None:
        minimum = {"num_tasks_per_case": 1, "max_random_steps": 0, "seed": None, "n_playouts": 1, "max_listed_moves": 1}
        for name, at_least in minimum.items():
            whole_number(getattr(self, name), name, at_least)
        one_of(self.reward_mode, "reward_mode", REWARD_MODES)
        if self.seat is not None:
            whole_number(self.seat, "seat", 0)

    @staticmethod
    def of(options: Mapping[str, Any] | None = None) -> TaskConfig:
        """The configuration in `options`: the fields above, and `game_list`, `game_configs` and `game_types`.

        Where `game_types` is not given, the environment variable GAME_TYPES (``hex,go``) may.

        Raises:
            ValueError: an option is unknown or has a value that it may not have.
        """
        named = {_OPTION_ALIASES.get(name, name): value for name, value in given(options).items()}
        reject_unknown(named, TASK_OPTIONS, "the OpenSpiel configuration")
        choice = {name: named.pop(name) for name in _CASE_OPTIONS if name in named}
        choice.setdefault("game_types", os.environ.get("GAME_TYPES"))
        return TaskConfig(cases=resolve_cases(**choice), **named)


TASK_OPTIONS = frozenset({*(option.name for option in fields(TaskConfig)), *_CASE_OPTIONS, *_OPTION_ALIASES})
"""Every name that `TaskConfig.of` takes."""


@dataclass(frozen=True, slots=True)
class OpenSpielTask:
    """One position, with the player whose move is asked for.

    task_id: the id, from 0 up to the number of tasks.
    case: e.g. ``hex(board_size=5)``.
    player: who is to move, or the seat where all move at once.
    """

    task_id: int
    case: str
    game: Game
    state: State
    player: int
    legal: LegalMoves
    config: TaskConfig

    @property
    def prompt(self) -> str:
        """The position in words, and what to answer."""
        decision = prompts.decision(self.state, self.player, self.legal, self.config.max_listed_moves)
        return f"{prompts.introduction(self.game)}\n\n{decision}"

    @property
    def facts(self) -> dict[str, Any]:
        """What brings the position back, as JSON can hold it; `legal_actions` are pairs of id and text."""
        return {
            "serialized_game_and_state": serialize(self.game, self.state),
            "game_short_name": self.game.get_type().short_name,
            "case": self.case,
            "legal_actions": [[move.action, move.text] for move in self.legal.moves],
            "current_player": self.player,
            "task_id": self.task_id,
            "num_players": self.game.num_players(),
            "seed": self.config.seed,
        }


class OpenSpielTasks:
    """All tasks of a configuration: `num_tasks_per_case` of the first case, then of the second, and so on.

    Raises:
        ValueError: a case cannot be loaded, or an option has a value that it may not have.
    """

    def __init__(self, config: TaskConfig | Mapping[str, Any] | None = None) -> None:
        self.config = config if isinstance(config, TaskConfig) else TaskConfig.of(config)
        for case in self.config.cases:
            self._check(case)

    @property
    def total(self) -> int:
        """How many tasks there are."""
        return len(self.config.cases) * self.config.num_tasks_per_case

    def __len__(self) -> int:
        return self.total

    def generate(self, task_id: int) -> OpenSpielTask:
        """The task `task_id`, modulo the number of tasks."""
        task_id = whole_number(task_id, "task_id") % self.total
        case_index, task_index = divmod(task_id, self.config.num_tasks_per_case)
        case = self.config.cases[case_index]
        game = load_game(case)
        state = opening(game, self.config.seed + task_index, self.config.max_random_steps)
        return _task(task_id, case, game, state, self.config)

    def rows(self, task_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Dataset rows that ask for one move each, as JSON and parquet can hold them."""
        return [self._row(self.generate(task_id)) for task_id in task_ids]

    def game_rows(self, task_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Dataset rows from whose positions whole games are played; the environment adds the position to the prompt.

        With ``max_random_steps=0`` games are played from their beginning.
        """
        rows = []
        for task in map(self.generate, task_ids):
            prompt = [{"role": "user", "content": prompts.introduction(task.game)}]
            rows.append(self._row(task) | {"prompt": prompt, "env_class": "openspiel_game"})
        return rows

    def _row(self, task: OpenSpielTask) -> dict[str, Any]:
        facts = task.facts
        facts["legal_actions"] = [{"id": action, "text": text} for action, text in facts["legal_actions"]]
        return {
            "prompt": [{"role": "user", "content": task.prompt}],
            "env_class": "openspiel",
            "data_source": f"openspiel_{facts['game_short_name']}",
            "reward_spec": {"method": self.config.reward_mode, "ground_truth": ""},
            "extra_info": {"env": "openspiel", **facts},
        }

    def _check(self, case: str) -> None:
        game = load_game(case)
        if self.config.reward_mode == "outcome":
            utility_range(game)
        seat = self.config.seat
        if seat is not None and seat >= game.num_players():
            raise ValueError(f"seat={seat}, but the case {case!r} has {game.num_players()} players, counted from 0")
        if self.config.num_tasks_per_case == 1 or self.config.max_random_steps > 0:
            return
        if not game.new_initial_state().is_chance_node():
            logger.warning(
                "All %d tasks of %s are the same position: set max_random_steps above 0, or num_tasks_per_case to 1",
                self.config.num_tasks_per_case,
                case,
            )


def task_of_row(facts: Mapping[str, Any], config: TaskConfig) -> OpenSpielTask:
    """The task of a row's `extra_info`: from its serialised state, or else from its `task_id` under `config`.

    Raises:
        ValueError: the row has neither, or its state is not one in which it says who is to move and what is legal.
    """
    text = facts.get("serialized_game_and_state")
    if text is None and facts.get("task_id") is None:
        raise ValueError(
            f"extra_info has neither serialized_game_and_state nor task_id; it has {sorted(facts)}. "
            "OpenSpielTasks.rows makes rows that have both"
        )
    task_id = whole_number(facts.get("task_id", 0), "task_id")
    if text is None:
        return _tasks_of(config).generate(task_id)
    game, state = deserialize(text)
    if state.is_terminal() or state.is_chance_node():
        raise ValueError(f"serialized_game_and_state is no decision of a player; got {text!r}")
    task = _task(task_id, str(facts.get("case", game)), game, state, config, _row_player(facts, game, state))
    _check_legal(task, facts.get("legal_actions"))
    return task


@functools.lru_cache(maxsize=16)
def _tasks_of(config: TaskConfig) -> OpenSpielTasks:
    return OpenSpielTasks(config)


def _task(
    task_id: int, case: str, game: Game, state: State, config: TaskConfig, seat: int | None = None
) -> OpenSpielTask:
    """The task of a decision. `seat` is who is asked where all move at once; by default, players take turns."""
    if seat is None:
        seat = config.seat if config.seat is not None else task_id % game.num_players()
    player = player_to_move(state, seat)
    legal = legal_moves(state, player)
    if not legal.moves:
        raise ValueError(f"player {player} has no legal action in task {task_id} of {case}; choose another seat")
    return OpenSpielTask(task_id, case, game, state, player, legal, config)


def _row_player(facts: Mapping[str, Any], game: Game, state: State) -> int | None:
    """The player that the row asks; None where it leaves that to the configuration."""
    if facts.get("current_player") is None:
        return None
    player = whole_number(facts["current_player"], "current_player", 0)
    if player != player_to_move(state, player) or player >= game.num_players():
        raise ValueError(
            f"extra_info says current_player={player}, but its state has player {state.current_player()} to move, "
            f"of {game.num_players()}"
        )
    return player


def _check_legal(task: OpenSpielTask, recorded: Any) -> None:
    """Raise when the row lists other legal actions than its state has: it comes from another version of the game."""
    if recorded is None:
        return
    ids = [entry["id"] if isinstance(entry, Mapping) else entry[0] for entry in recorded]
    legal = [move.action for move in task.legal.moves]
    if ids != legal:
        raise ValueError(
            f"task {task.task_id} of {task.case}: the row lists the legal actions {ids}, but its state has {legal}; "
            "make the rows again with this version of OpenSpiel"
        )
