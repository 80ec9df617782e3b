"""TextArena games. The model plays one seat, opponents play the rest.

    environment.env_class=textarena environment.skyrl_gym.textarena.env_id=GuessTheNumber-v0

Many games need only the package: GuessTheNumber, TicTacToe, ConnectFour, KuhnPoker, Nim, Sudoku, and so on. Word games
(Wordle, Hangman, …) download a word list when they are made, and games with a jury (Debate, …) need an API key. While
such a game waits, it blocks all other games in this process.
"""

import difflib
import importlib
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.actions import ActionError, extract_action
from skyrl_gym.adapters.isolated_random import IsolatedRandom
from skyrl_gym.adapters.observations import append_observation, user_message
from skyrl_gym.adapters.settings import NO_LIMIT, read_settings, reset_arguments
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.envs.row import read_max_turns
from skyrl_gym.error import InvalidSettings
from skyrl_gym.optional import require

GAME = -1
"""The sender of the game's own messages."""

Opponent = Callable[["View"], str]
"""A function from a player's view of the game to a move."""

MAX_MOVE_CHARS = 4000
"""Maximum length of a move. Only the end of a longer reply counts, because some games search moves in quadratic time
and `int` raises for numbers of more than 4300 digits."""

OFFERED = re.compile(r"'(\[[^\[\]\n]{1,40}\])'")
MAX_MOVES_IN_A_ROW = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArenaSettings:
    """The section `environment.skyrl_gym.textarena`.

    env_id: the argument of `textarena.make`, e.g. ``TicTacToe-v0``.
    kwargs: the other arguments of `textarena.make`.
    reset: arguments of `reset`. A row's `seed` and `reset`, or its `extra_info`'s, override them.
    num_players, seat: the number of players, and the index of the model among them.
    opponents: the players in the other seats, one for all or a list. ``random`` plays one of the moves that the game
        writes in quotes, as '[4]'. ``module:name`` is a function from the whole text seen so far to a move, or a class
        whose instances are such functions.
    missing_reward: the reward of an unfinished game. None makes the rollout invalid.
    """

    env_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reset: Mapping[str, Any] = field(default_factory=dict)
    num_players: int = 1
    seat: int = 0
    opponents: str | Sequence[str] = "random"
    missing_reward: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seat < self.num_players:
            raise ValueError(f"seat={self.seat} must be from 0 to num_players - 1 = {self.num_players - 1}")
        if not isinstance(self.opponents, str) and len(self.opponents) != self.num_players - 1:
            raise ValueError(f"opponents={self.opponents!r} must be {self.num_players - 1}, one for each other seat")


@dataclass(frozen=True, slots=True)
class View:
    """A player's view of the game.

    new: the text that is new since the player's last view, without the player's own messages.
    seen: the whole text so far.
    from_game: the part of `seen` that the game wrote, not a player.
    """

    new: str
    seen: str
    from_game: str


class TextArenaEnv(BaseTextEnv):
    """One game of TextArena. The game defines the rules, the penalty for illegal moves, and the reward at the end.

    Observations show only new text. Thoughts and `<action>` tags are removed before the game reads a move. If the game
    or an opponent raises, the rollout fails.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        require("textarena", "textarena", "TextArena environments")
        self.settings = read_settings(TextArenaSettings, "textarena", env_config, extras)
        self.max_turns = read_max_turns(extras, NO_LIMIT)
        self._reset_arguments = reset_arguments(self.settings.reset, extras)
        seed = self._reset_arguments.get("seed")
        self._random = IsolatedRandom(seed)
        self._opponents = _opponents(self.settings, random.Random(seed))
        with self._random.activate():
            self._game = _Game(self.settings)
        self._n_invalid = 0
        self._is_done = False
        self._rewards: Mapping[int, float] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Start the game, make the opponents' first moves, and append the model's view to the prompt."""
        with self._random.activate():
            self._game.reset(self._reset_arguments)
        self._play_opponents()
        if self._is_done:
            raise RuntimeError(f"{self.settings.env_id} ended before seat {self.settings.seat} could move")
        return append_observation(prompt, self._new_text()), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Make the model's move, and the opponents' moves until its next turn."""
        if self._is_done:
            raise RuntimeError("this game is over; create a new TextArenaEnv for the next episode")
        self.turns += 1
        self._move(_parse_move(action))
        self._n_invalid += self._game.was_illegal
        self._play_opponents()
        is_last = self._is_done or self.turns >= self.max_turns
        reward: float | None = 0.0
        if is_last:
            reward = self._rewards.get(self.settings.seat, self.settings.missing_reward)
        self._is_done = is_last
        return BaseTextEnvStepOutput(
            observations=[] if is_last else [user_message(self._new_text())],
            reward=None if reward is None else float(reward),
            done=is_last,
            metadata={"rewards": dict(self._rewards)},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns and illegal moves, and the result of a finished game.

        `opponent_illegal` is 1 if the game ended because an opponent broke the rules: an easy win.
        """
        metrics: dict[str, Any] = {"steps": self.turns, "invalid_actions": self._n_invalid}
        metrics["finished"] = int(bool(self._rewards))
        if len(self._rewards) > 1:
            own = self._rewards.get(self.settings.seat, 0.0)
            best_other = max(value for seat, value in self._rewards.items() if seat != self.settings.seat)
            metrics |= {"won": int(own > best_other), "drawn": int(own == best_other), "lost": int(own < best_other)}
            metrics["opponent_illegal"] = int(bool(self._game.rule_breakers() - {self.settings.seat}))
        return metrics

    def _move(self, move: str) -> None:
        with self._random.activate():
            self._is_done = self._game.step(move)
            if self._is_done:
                self._rewards = self._game.rewards()

    def _play_opponents(self) -> None:
        for _ in range(MAX_MOVES_IN_A_ROW):
            if self._is_done or self._game.to_move == self.settings.seat:
                return
            seat = self._game.to_move
            with self._random.activate():
                view = self._game.look()
            self._move(self._opponents[seat](view))
        raise RuntimeError(f"{self.settings.env_id}: the opponents made {MAX_MOVES_IN_A_ROW} moves in a row")

    def _new_text(self) -> str:
        with self._random.activate():
            view = self._game.look()
        return view.new


class _Game:
    """A game and the views of its players. Its methods use the global random generators."""

    def __init__(self, settings: TextArenaSettings) -> None:
        self._settings = settings
        self._env = _make(settings)
        layers = [self._env]
        while isinstance(layers[-1], _library().Wrapper):
            layers.append(layers[-1].env)
        *wrappers, self._core = layers
        self._has_custom_view = any(map(_is_custom_view, wrappers))
        self._seen: dict[int, str] = {}
        self._from_game: dict[int, str] = {}
        self.was_illegal = False

    @property
    def to_move(self) -> int:
        """Seat whose turn it is."""
        return int(self._core.state.current_player_id)

    def reset(self, arguments: Mapping[str, Any]) -> None:
        """Start the game. Raises ValueError if it rejects the arguments."""
        try:
            self._env.reset(num_players=self._settings.num_players, **arguments)
        except (AssertionError, ValueError, TypeError) as problem:
            raise ValueError(
                f"{self._settings.env_id} cannot start with num_players={self._settings.num_players} and "
                f"{dict(arguments)}: {problem}"
            ) from problem

    def step(self, move: str) -> bool:
        """Make a move. Return True if the game is over."""
        seat, n_errors = self.to_move, self._n_errors()
        is_over, _ = self._env.step(action=move)
        self.was_illegal = seat in self.rule_breakers() if is_over else self._n_errors() > n_errors
        return bool(is_over)

    def rewards(self) -> dict[int, float]:
        """Return the rewards by seat after the end of the game."""
        rewards, _ = self._env.close()
        return {int(seat): float(reward) for seat, reward in (rewards or {}).items()}

    def rule_breakers(self) -> set[int]:
        """Return the seats that lost by an illegal move."""
        return {seat for seat, facts in self._core.state.game_info.items() if facts.get("invalid_move")}

    def look(self) -> View:
        """Return the view of the player whose turn it is."""
        seat = self.to_move
        before = self._seen.get(seat, "")
        from_game = (text for sender, text, _ in self._core.state.observations[seat] if sender == GAME)
        self._from_game[seat] = "\n".join((self._from_game.get(seat, ""), *from_game))
        if self._has_custom_view:
            _, now = self._env.get_observation()
            new, self._seen[seat] = now.removeprefix(before), now
        else:
            _, messages = self._core.get_observation()
            new = self._format(message for message in messages if message[0] != seat)
            self._seen[seat] = "\n".join(filter(None, (before, self._format(messages))))
        return View(new.strip(), self._seen[seat], self._from_game[seat])

    def _format(self, messages: Iterable[tuple[int, str, Any]]) -> str:
        names = {GAME: "GAME", **self._core.state.role_mapping}
        return "\n".join(f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages)

    def _n_errors(self) -> int:
        return int(getattr(self._core.state, "error_count", 0))  # consecutive illegal moves. Not all games count them.


def _make(settings: TextArenaSettings) -> Any:
    """Make the game without starting it.

    Raises:
        InvalidSettings: the id is unknown.
    """
    library = _library()
    games = library.envs.registration.ENV_REGISTRY
    if settings.env_id not in games:
        nearest = difflib.get_close_matches(settings.env_id, games, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise InvalidSettings(
            f"environment.skyrl_gym.textarena.env_id={settings.env_id!r} is not a game of TextArena{hint}"
        )
    try:
        return library.make(settings.env_id, **settings.kwargs)
    except Exception as problem:
        problem.add_note(f"while making {settings.env_id}, which may need data or an API key; see TextArena's docs")
        raise


def _library() -> Any:
    """Import the package. It has no type annotations."""
    return importlib.import_module("textarena")


def _is_custom_view(wrapper: Any) -> bool:
    """Return True if a wrapper shows a custom view each time, such as the current board.

    The default wrapper repeats the whole game, but the conversation already contains it.
    """
    library = _library()
    is_default = type(wrapper) is library.wrappers.LLMObservationWrapper
    return isinstance(wrapper, library.ObservationWrapper) and not is_default


def _opponents(settings: TextArenaSettings, generator: random.Random) -> dict[int, Opponent]:
    """Create the opponents in all seats except the model's."""
    others = [seat for seat in range(settings.num_players) if seat != settings.seat]
    names = [settings.opponents] * len(others) if isinstance(settings.opponents, str) else settings.opponents
    return {seat: _opponent(name, settings.env_id, generator) for seat, name in zip(others, names, strict=True)}


def _opponent(name: str, env_id: str, generator: random.Random) -> Opponent:
    if name == "random":
        return _RandomOpponent(env_id, generator)
    opponent: Any = load_attribute(name)
    play: Callable[[str], str] = opponent() if isinstance(opponent, type) else opponent
    return lambda view: play(view.seen)


class _RandomOpponent:
    """An opponent that plays one of the moves the game offered last. Quotes in players' messages are ignored."""

    def __init__(self, env_id: str, generator: random.Random) -> None:
        self._env_id = env_id
        self._generator = generator

    def __call__(self, view: View) -> str:
        """Choose a move. Raises ValueError if the game offers none in quotes."""
        for line in reversed(view.from_game.splitlines()):
            if offered := OFFERED.findall(line):
                return self._generator.choice(offered)
        raise ValueError(f"{self._env_id} offers no moves in quotes; set opponents to a function, 'module:name'")


def _parse_move(reply: str) -> str:
    """Return the move in a reply. An empty move is also passed on, because the game decides its penalty."""
    try:
        return extract_action(reply)[-MAX_MOVE_CHARS:]
    except ActionError:
        return ""
