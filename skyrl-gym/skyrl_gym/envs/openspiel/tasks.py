"""Numbered positions as tasks. The same configuration and task id always give the same position."""

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
from skyrl_gym.envs.openspiel.rewards import REWARD_MODES, utility_range
from skyrl_gym.envs.openspiel.states import deserialize, draw_position, player_to_move, serialize
from skyrl_gym.envs.options import one_of, reject_unknown, set_options
from skyrl_gym.envs.row import whole_number

logger = logging.getLogger(__name__)

_CASE_OPTIONS = ("cases", "game_list", "game_configs", "game_types")
_OPTION_ALIASES = {"num_tasks_per_game": "num_tasks_per_case"}


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Configuration of the positions, their prompts and a move's reward.

    cases: load strings of games. `resolve_cases` describes the alternatives.
    num_tasks_per_case: number of positions of each case.
    max_random_steps: random moves from the start of a game to its position, including dealt cards and dice. With 0, all
        positions of a game without chance are the same.
    seed: task k of every case is drawn with ``seed + k``.
    reward_mode: ``outcome``, the mean result of `n_playouts` random games after the move, or ``legal``, 1 for a legal
        move.
    n_playouts: number of random games. Each costs 0.1 to 3 ms.
    max_listed_moves: maximum number of legal moves in a prompt. The model may also play unlisted moves by their text.
    seat: the model's player where all players move at once. By default, it alternates from task to task.
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
    def from_options(options: Mapping[str, Any] | None = None) -> TaskConfig:
        """Create the configuration from options: the fields above, `game_list`, `game_configs` and `game_types`.

        The environment variable GAME_TYPES (``hex,go``) is the default of `game_types`.

        Raises:
            ValueError: an option is unknown or has an invalid value.
        """
        values = {_OPTION_ALIASES.get(name, name): value for name, value in set_options(options).items()}
        reject_unknown(values, TASK_OPTIONS, "the OpenSpiel configuration")
        case_options = {name: values.pop(name) for name in _CASE_OPTIONS if name in values}
        case_options.setdefault("game_types", os.environ.get("GAME_TYPES"))
        return TaskConfig(cases=resolve_cases(**case_options), **values)


TASK_OPTIONS = frozenset({*(option.name for option in fields(TaskConfig)), *_CASE_OPTIONS, *_OPTION_ALIASES})
"""Every option of `TaskConfig.from_options`."""


@dataclass(frozen=True, slots=True)
class OpenSpielTask:
    """One position and the player to move.

    task_id: from 0 to the number of tasks - 1.
    case: e.g. ``hex(board_size=5)``.
    player: the player to move, or the seat where all players move at once.
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
        """The description of the game and the position."""
        decision = prompts.format_decision(self.state, self.player, self.legal, self.config.max_listed_moves)
        return f"{prompts.format_introduction(self.game)}\n\n{decision}"

    @property
    def facts(self) -> dict[str, Any]:
        """JSON values that `read_task` restores the position from. `legal_actions` are pairs of id and text."""
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
    """The tasks of a configuration: `num_tasks_per_case` of the first case, then of the second, and so on.

    Raises:
        ValueError: a case cannot be loaded, or an option has an invalid value.
    """

    def __init__(self, config: TaskConfig | Mapping[str, Any] | None = None) -> None:
        self.config = config if isinstance(config, TaskConfig) else TaskConfig.from_options(config)
        for case in self.config.cases:
            self._check(case)

    @property
    def total(self) -> int:
        """Number of tasks."""
        return len(self.config.cases) * self.config.num_tasks_per_case

    def __len__(self) -> int:
        return self.total

    def generate(self, task_id: int) -> OpenSpielTask:
        """Return the task `task_id`, modulo the number of tasks."""
        task_id = whole_number(task_id, "task_id") % self.total
        case_index, task_index = divmod(task_id, self.config.num_tasks_per_case)
        case = self.config.cases[case_index]
        game = load_game(case)
        state = draw_position(game, self.config.seed + task_index, self.config.max_random_steps)
        return _task(task_id, case, game, state, self.config)

    def rows(self, task_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Return dataset rows for single moves, with values that JSON and parquet can store."""
        return [self._row(self.generate(task_id)) for task_id in task_ids]

    def game_rows(self, task_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Return dataset rows for whole games from their positions. The environment adds the position to the prompt.

        With ``max_random_steps=0`` games are played from the start.
        """
        rows = []
        for task in map(self.generate, task_ids):
            prompt = [{"role": "user", "content": prompts.format_introduction(task.game)}]
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


def read_task(facts: Mapping[str, Any], config: TaskConfig) -> OpenSpielTask:
    """Return the task in a row's `extra_info`, from its serialized state or else its `task_id` under `config`.

    Raises:
        ValueError: the row has neither, or its state contradicts its player or its legal actions.
    """
    text = facts.get("serialized_game_and_state")
    if text is None and facts.get("task_id") is None:
        raise ValueError(
            f"extra_info has neither serialized_game_and_state nor task_id; it has {sorted(facts)}. "
            "OpenSpielTasks.rows creates rows that have both"
        )
    task_id = whole_number(facts.get("task_id", 0), "task_id")
    if text is None:
        return _cached_tasks(config).generate(task_id)
    game, state = deserialize(text)
    if state.is_terminal() or state.is_chance_node():
        raise ValueError(f"serialized_game_and_state is not a decision of a player; got {text!r}")
    task = _task(task_id, str(facts.get("case", game)), game, state, config, _row_player(facts, game, state))
    _check_legal(task, facts.get("legal_actions"))
    return task


@functools.lru_cache(maxsize=16)
def _cached_tasks(config: TaskConfig) -> OpenSpielTasks:
    return OpenSpielTasks(config)


def _task(
    task_id: int, case: str, game: Game, state: State, config: TaskConfig, seat: int | None = None
) -> OpenSpielTask:
    """Create the task for a decision. `seat` is the player if all move at once. It alternates by default."""
    if seat is None:
        seat = config.seat if config.seat is not None else task_id % game.num_players()
    player = player_to_move(state, seat)
    legal = legal_moves(state, player)
    if not legal.moves:
        raise ValueError(f"player {player} has no legal action in task {task_id} of {case}; choose another seat")
    return OpenSpielTask(task_id, case, game, state, player, legal, config)


def _row_player(facts: Mapping[str, Any], game: Game, state: State) -> int | None:
    """Return the player in the row, or None if the row leaves it to the configuration."""
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
    """Raise if the row's legal actions differ from its state's, because another version of the game wrote it."""
    if recorded is None:
        return
    ids = [entry["id"] if isinstance(entry, Mapping) else entry[0] for entry in recorded]
    legal = [move.action for move in task.legal.moves]
    if ids != legal:
        raise ValueError(
            f"task {task.task_id} of {task.case}: the row lists the legal actions {ids}, but its state has {legal}; "
            "regenerate the rows with this version of OpenSpiel"
        )
