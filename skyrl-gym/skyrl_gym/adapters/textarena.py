"""Games of TextArena: the model holds one seat, and opponents the others.

    environment.env_class=textarena environment.skyrl_gym.textarena.env_id=GuessTheNumber-v0

Many games need nothing but the package: GuessTheNumber, TicTacToe, ConnectFour, KuhnPoker, Nim, Sudoku, and so on. The
games of words (Wordle, Hangman, …) load a list of words from the net when they are made, and those with a jury (Debate,
…) need an API key. While such a game waits, the others of this process wait too.
"""

from __future__ import annotations

import difflib
import importlib
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.actions import ActionError, said
from skyrl_gym.adapters.observations import user_message, with_observation
from skyrl_gym.adapters.own_random import OwnRandom
from skyrl_gym.adapters.settings import max_turns, read_settings, reset_arguments
from skyrl_gym.entry_point import load_attribute
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.optional import require
from skyrl_gym.tools.messages import readable

GAME = -1
"""The seat from which the game itself speaks."""

Opponent = Callable[["View"], str]
"""Reads what its player sees of the game, and returns a move."""

MAX_MOVE_CHARS = 4000
"""Of a longer reply, games read the end: some search it for moves in quadratic time, and `int` raises for a number of
more than 4300 digits."""

OFFERED = re.compile(r"'(\[[^\[\]\n]{1,40}\])'")
MAX_MOVES_IN_A_ROW = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArenaSettings:
    """The section `environment.skyrl_gym.textarena`.

    env_id: what `textarena.make` takes, e.g. ``TicTacToe-v0``.
    kwargs: the other arguments of `textarena.make`.
    reset: arguments of `reset`; the `seed` and `reset` of a row, or of its `extra_info`, come on top.
    num_players, seat: how many play, and which of them is the model, counted from 0.
    opponents: who holds the other seats, one for all of them or a list: ``random`` plays one of the moves that the game
        writes in quotes, as '[4]'; ``module:name`` is a function from all that was seen to a move, or a class of such.
    missing_reward: the reward of a game that was not played to its end; None makes its rollout invalid.
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
            raise ValueError(f"seat={self.seat} is none of num_players={self.num_players}; they count from 0")
        if not isinstance(self.opponents, str) and len(self.opponents) != self.num_players - 1:
            raise ValueError(f"opponents={self.opponents!r} must be {self.num_players - 1}, one for each other seat")


@dataclass(frozen=True, slots=True)
class View:
    """What a player sees.

    news: what it has not seen yet, without its own words.
    seen: all that it has seen.
    of_game: what of that the game said, and no player.
    """

    news: str
    seen: str
    of_game: str


class TextArenaEnv(BaseTextEnv):
    """One game of TextArena. The rules, and what an illegal move costs, are the game's; its reward comes at its end.

    Every turn shows what is new. Thoughts and `<action>` tags are taken off before the game reads a move. What the game
    or an opponent raises fails the rollout.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        require("textarena", "textarena", "TextArena environments")
        self.settings = read_settings(TextArenaSettings, "textarena", env_config, extras)
        self.max_turns = max_turns(extras)
        self._reset_arguments = reset_arguments(self.settings.reset, extras)
        seed = self._reset_arguments.get("seed")
        self._random = OwnRandom(seed)
        self._opponents = _opponents(self.settings, random.Random(seed))
        with self._random.lent():
            self._game = _Game(self.settings)
        self._n_invalid = 0
        self._is_done = False
        self._rewards: Mapping[int, float] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Deal the game, let others move first where they do, and append what the model sees to the prompt."""
        with self._random.lent():
            self._game.reset(self._reset_arguments)
        self._let_others_move()
        if self._is_done:
            raise RuntimeError(f"{self.settings.env_id} ended before seat {self.settings.seat} could move")
        return with_observation(prompt, self._seen()), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Make the model's move, and those of the others until it is its turn again."""
        if self._is_done:
            raise RuntimeError("this game is over; make a new TextArenaEnv for the next one")
        self.turns += 1
        self._move(_move_in(action))
        self._n_invalid += self._game.was_illegal
        self._let_others_move()
        is_last = self._is_done or self.turns >= self.max_turns
        reward: float | None = 0.0
        if is_last:
            reward = self._rewards.get(self.settings.seat, self.settings.missing_reward)
        self._is_done = is_last
        return BaseTextEnvStepOutput(
            observations=[] if is_last else [user_message(self._seen())],
            reward=None if reward is None else float(reward),
            done=is_last,
            metadata={"rewards": dict(self._rewards)},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Turns, illegal moves, and of games that came to their end: whether the model won, drew or lost.

        `opponent_illegal` says that a game ended because somebody else broke the rules, which is an easy win.
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
        with self._random.lent():
            self._is_done = self._game.step(move)
            if self._is_done:
                self._rewards = self._game.rewards()

    def _let_others_move(self) -> None:
        for _ in range(MAX_MOVES_IN_A_ROW):
            if self._is_done or self._game.to_move == self.settings.seat:
                return
            seat = self._game.to_move
            with self._random.lent():
                view = self._game.look()
            self._move(self._opponents[seat](view))
        raise RuntimeError(f"{self.settings.env_id}: the others made {MAX_MOVES_IN_A_ROW} moves in a row")

    def _seen(self) -> str:
        with self._random.lent():
            view = self._game.look()
        return readable(view.news)


class _Game:
    """A game, and what each player has seen of it. What is called here draws from the global generators."""

    def __init__(self, settings: TextArenaSettings) -> None:
        self._settings = settings
        self._env = _made(settings)
        *wrappers, self._core = _layers(self._env)
        self._has_own_view = any(map(_is_own_view, wrappers))
        self._seen: dict[int, str] = {}
        self._of_game: dict[int, str] = {}
        self.was_illegal = False

    @property
    def to_move(self) -> int:
        """The seat whose turn it is."""
        return int(self._core.state.current_player_id)

    def reset(self, arguments: Mapping[str, Any]) -> None:
        """Deal. Raises ValueError where the game does not begin so."""
        try:
            self._env.reset(num_players=self._settings.num_players, **arguments)
        except (AssertionError, ValueError, TypeError) as problem:
            raise ValueError(
                f"{self._settings.env_id} does not begin with num_players={self._settings.num_players} and "
                f"{dict(arguments)}: {problem}"
            ) from problem

    def step(self, move: str) -> bool:
        """Make a move; whether the game is over."""
        seat, n_errors = self.to_move, self._n_errors()
        is_over, _ = self._env.step(action=move)
        self.was_illegal = seat in self.rule_breakers() if is_over else self._n_errors() > n_errors
        return bool(is_over)

    def rewards(self) -> dict[int, float]:
        """What each seat got, once the game is over."""
        rewards, _ = self._env.close()
        return {int(seat): float(reward) for seat, reward in (rewards or {}).items()}

    def rule_breakers(self) -> set[int]:
        """Seats that lost by an illegal move."""
        return {seat for seat, facts in self._core.state.game_info.items() if facts.get("invalid_move")}

    def look(self) -> View:
        """What the player to move sees."""
        seat = self.to_move
        before = self._seen.get(seat, "")
        of_game = (text for sender, text, _ in self._core.state.observations[seat] if sender == GAME)
        self._of_game[seat] = "\n".join((self._of_game.get(seat, ""), *of_game))
        if self._has_own_view:
            _, now = self._env.get_observation()
            news, self._seen[seat] = now.removeprefix(before), now
        else:
            _, messages = self._core.get_observation()
            news = self._written(message for message in messages if message[0] != seat)
            self._seen[seat] = "\n".join(filter(None, (before, self._written(messages))))
        return View(news.strip(), self._seen[seat], self._of_game[seat])

    def _written(self, messages: Iterable[tuple[int, str, Any]]) -> str:
        names = {GAME: "GAME", **self._core.state.role_mapping}
        return "\n".join(f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages)

    def _n_errors(self) -> int:
        return int(getattr(self._core.state, "error_count", 0))  # of illegal moves in a row; not all games count


def _made(settings: TextArenaSettings) -> Any:
    """The game, not dealt yet.

    Raises:
        ValueError: there is none of that id.
    """
    library = _library()
    games = library.envs.registration.ENV_REGISTRY
    if settings.env_id not in games:
        nearest = difflib.get_close_matches(settings.env_id, games, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"environment.skyrl_gym.textarena.env_id={settings.env_id!r} is no game of TextArena{hint}")
    try:
        return library.make(settings.env_id, **settings.kwargs)
    except Exception as problem:
        problem.add_note(f"while making {settings.env_id}, which may need data or a key: see the docs of TextArena")
        raise


def _library() -> Any:
    """The package, which has no types."""
    return importlib.import_module("textarena")


def _layers(env: Any) -> list[Any]:
    """The wrappers around a game, and the game."""
    layers = [env]
    while isinstance(layers[-1], _library().Wrapper):
        layers.append(layers[-1].env)
    return layers


def _is_own_view(wrapper: Any) -> bool:
    """Whether a wrapper shows a view of its own making each time, such as the board as it is now.

    The usual one shows the whole game again each time. A conversation has that already.
    """
    library = _library()
    is_usual = type(wrapper) is library.wrappers.LLMObservationWrapper
    return isinstance(wrapper, library.ObservationWrapper) and not is_usual


def _opponents(settings: TextArenaSettings, generator: random.Random) -> dict[int, Opponent]:
    """Who holds which seat, but for the model's."""
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
    """Plays one of the moves that the game offered last; what other players offer it does not read."""

    def __init__(self, env_id: str, generator: random.Random) -> None:
        self._env_id = env_id
        self._generator = generator

    def __call__(self, view: View) -> str:
        """A move. Raises ValueError where the game offers none in quotes."""
        for line in reversed(view.of_game.splitlines()):
            if offered := OFFERED.findall(line):
                return self._generator.choice(offered)
        raise ValueError(f"{self._env_id} offers no moves in quotes; set opponents to a function, 'module:name'")


def _move_in(reply: str) -> str:
    """What the game reads of a reply. To say nothing is a move too, and the game says what it costs."""
    try:
        return said(reply)[-MAX_MOVE_CHARS:]
    except ActionError:
        return ""
