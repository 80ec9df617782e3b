"""Opponents: who plays the seats that the model does not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.openspiel import prompts
from skyrl_gym.envs.openspiel.answers import parse_answer
from skyrl_gym.envs.openspiel.cases import Game, State, open_spiel
from skyrl_gym.envs.openspiel.match import Turn
from skyrl_gym.envs.openspiel.options import finite_number, given, reject_unknown, whole_number
from skyrl_gym.envs.openspiel.states import legal_actions

_GUESSABLE = frozenset({"euchre", "gin_rummy", "kuhn_poker", "leduc_poker", "oh_hell", "universal_poker"})
"""Games in which OpenSpiel guesses well what is hidden. Most others it refuses; in hearts it guesses positions that
cannot be, on which its search crashes the process."""


class LanguageModel(Protocol):
    """What answers a conversation: a function from messages to the reply.

    It may block, for environments are called in threads; it is no coroutine. It raises when it has no answer.
    """

    def __call__(self, messages: ConversationType, /) -> str: ...


@dataclass(frozen=True, slots=True)
class MctsConfig:
    """How far Monte-Carlo tree search looks. 100 simulations cost 1 ms in hex 5x5, 150 ms in chess.

    n_simulations: random games for one search.
    uct_c: how much it explores.
    n_worlds: in games with hidden information, how many guesses at what is hidden are searched, each on its own.
    max_memory_mb: of one search tree.
    """

    n_simulations: int = 100
    uct_c: float = 2.0
    n_worlds: int = 8
    max_memory_mb: int = 64

    def __post_init__(self) -> None:
        for name in ("n_simulations", "n_worlds", "max_memory_mb"):
            whole_number(getattr(self, name), name, at_least=1)
        finite_number(self.uct_c, "uct_c", at_least=0.0)

    @staticmethod
    def of(options: Mapping[str, Any] | None) -> MctsConfig:
        """The configuration in `options`. Raises `ValueError` where one is unknown or wrong."""
        options = given(options)
        reject_unknown(options, [option.name for option in fields(MctsConfig)], "mcts")
        return MctsConfig(**options)


class RandomOpponent:
    """Plays any legal move, all with the same probability."""

    def choose(self, turn: Turn, rng: random.Random) -> int:
        """See `Opponent.choose`."""
        return rng.choice(turn.legal.moves).action


class MctsOpponent:
    """Plays what Monte-Carlo tree search finds.

    Where information is hidden, it does not look: it guesses `n_worlds` times what is hidden, from what its player
    knows, searches each guess, and plays the move that most searches found.

    Raises:
        ValueError: the game has simultaneous moves, rewards along the way, or secrets that OpenSpiel does not guess.
    """

    def __init__(self, game: Game, config: MctsConfig) -> None:
        spiel = open_spiel()
        kind = game.get_type()
        is_open = kind.information == spiel.GameType.Information.PERFECT_INFORMATION
        reason = ""
        if kind.dynamics != spiel.GameType.Dynamics.SEQUENTIAL:
            reason = "its players move at the same time"
        elif kind.reward_model != spiel.GameType.RewardModel.TERMINAL:
            reason = "it gives rewards before its end"
        elif not is_open and kind.short_name not in _GUESSABLE:
            reason = "what is hidden in it cannot be guessed"
        if reason:
            raise ValueError(f"opponent=mcts cannot play {game}: {reason}; use opponent=random or policy")
        self._game = game
        self._config = config
        self._is_open = is_open

    def choose(self, turn: Turn, rng: random.Random) -> int:
        """See `Opponent.choose`."""
        if self._is_open:
            return self._search(turn.state, rng)
        worlds = [self._guess(turn, rng) for _ in range(self._config.n_worlds)]
        votes = Counter(self._search(world, rng) for world in worlds)
        return max(votes, key=lambda action: (votes[action], -action))

    def _search(self, state: State, rng: random.Random) -> int:
        spiel = open_spiel()
        evaluator = spiel.RandomRolloutEvaluator(1, rng.getrandbits(31))
        bot = spiel.MCTSBot(
            self._game,
            evaluator,
            self._config.uct_c,
            self._config.n_simulations,
            self._config.max_memory_mb,
            True,  # stop where a win is proven
            rng.getrandbits(31),
            False,
        )
        return int(bot.step(state))

    def _guess(self, turn: Turn, rng: random.Random) -> State:
        """A state that could be the true one, as far as the player knows."""
        world = turn.state.resample_from_infostate(turn.player, rng.random)
        assert legal_actions(world, turn.player) == legal_actions(turn.state, turn.player)
        return world


class PolicyOpponent:
    """Plays what a language model answers, which reads what the trained one would read in this seat.

    It keeps its own conversation. After `n_retries` illegal answers in a row a random move is played for it: the game
    is not won by the other side's bad spelling. `n_illegal` counts such answers.

    What the model raises is passed on: a game without an opponent has no result.
    """

    def __init__(self, model: LanguageModel, max_listed_moves: int, n_retries: int) -> None:
        self.n_illegal = 0
        self._model = model
        self._max_listed_moves = max_listed_moves
        self._n_retries = n_retries
        self._messages: ConversationType = []
        self._news: tuple[str, ...] = ()

    def choose(self, turn: Turn, rng: random.Random) -> int:
        """See `Opponent.choose`."""
        self._hear(self._decision(turn))
        for n_left in range(self._n_retries, -1, -1):
            reply = self._model([dict(message) for message in self._messages])
            if not isinstance(reply, str):
                raise TypeError(f"the language model of the opponent must return its reply as text, got {reply!r}")
            self._messages.append({"role": "assistant", "content": reply})
            if move := parse_answer(reply, turn.legal).move:
                return move.action
            self.n_illegal += 1
            if n_left:
                self._hear(prompts.illegal_answer(n_left))
        move = rng.choice(turn.legal.moves)
        self._news = (prompts.played_at_random(move.text),)
        return move.action

    def _decision(self, turn: Turn) -> str:
        events, self._news = self._news + turn.events, ()
        decision = prompts.decision(turn.state, turn.player, turn.legal, self._max_listed_moves, events)
        return decision if self._messages else f"{prompts.introduction(turn.state.get_game())}\n\n{decision}"

    def _hear(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
