"""Opponents for the seats that the model does not play."""

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
from skyrl_gym.envs.openspiel.match import MatchTurn
from skyrl_gym.envs.openspiel.states import legal_actions
from skyrl_gym.envs.options import finite_number, reject_unknown, set_options
from skyrl_gym.envs.row import whole_number

_CAN_SAMPLE_HIDDEN = frozenset({"euchre", "gin_rummy", "kuhn_poker", "leduc_poker", "oh_hell", "universal_poker"})
"""Games whose hidden information OpenSpiel can sample. It rejects most other games. In hearts it samples impossible
positions, so its search crashes the process.
"""


class LanguageModel(Protocol):
    """A function from the messages of a conversation to the reply. It raises if there is no reply.

    It must not be a coroutine function. It may block, because environments are called in threads.
    """

    def __call__(self, messages: ConversationType, /) -> str: ...


@dataclass(frozen=True, slots=True)
class MctsConfig:
    """The effort of Monte-Carlo tree search. 100 simulations cost 1 ms in hex 5x5, 150 ms in chess.

    n_simulations: random games per search.
    uct_c: the exploration constant.
    n_worlds: in games with hidden information, the number of sampled states to search, each separately.
    max_memory_mb: maximum size of a search tree.
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
    def from_options(options: Mapping[str, Any] | None) -> MctsConfig:
        """Create the configuration from options. Raises `ValueError` if one is unknown or invalid."""
        options = set_options(options)
        reject_unknown(options, [option.name for option in fields(MctsConfig)], "mcts")
        return MctsConfig(**options)


class RandomOpponent:
    """An opponent that plays legal moves uniformly at random."""

    def choose(self, turn: MatchTurn, rng: random.Random) -> int:
        """Choose a legal move uniformly at random."""
        return rng.choice(turn.legal.moves).action


class MctsOpponent:
    """An opponent that plays by Monte-Carlo tree search.

    It does not cheat: it samples `n_worlds` states that agree with its player's knowledge, searches each, and plays the
    move found most often.

    Raises:
        ValueError: the game has simultaneous moves, intermediate rewards, or hidden information that OpenSpiel cannot
            sample.
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
        elif not is_open and kind.short_name not in _CAN_SAMPLE_HIDDEN:
            reason = "its hidden information cannot be sampled"
        if reason:
            raise ValueError(f"opponent=mcts cannot play {game}: {reason}; use opponent=random or policy")
        self._game = game
        self._config = config
        self._is_open = is_open

    def choose(self, turn: MatchTurn, rng: random.Random) -> int:
        """Choose the move that most searches agree on."""
        if self._is_open:
            return self._search(turn.state, rng)
        worlds = [self._sample_world(turn, rng) for _ in range(self._config.n_worlds)]
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
            True,  # stop when a win is proven
            rng.getrandbits(31),
            False,
        )
        return int(bot.step(state))

    def _sample_world(self, turn: MatchTurn, rng: random.Random) -> State:
        """Sample a state that agrees with the player's knowledge."""
        world = turn.state.resample_from_infostate(turn.player, rng.random)
        assert legal_actions(world, turn.player) == legal_actions(turn.state, turn.player)
        return world


class PolicyOpponent:
    """A language model as opponent. It reads the same prompts as the trained model would in this seat.

    It keeps its own conversation. After `n_retries` retries, a random move replaces an illegal answer, so the
    opponent's bad formatting never wins a game. `n_illegal` counts illegal answers.

    Errors of the model are propagated, because a game without an opponent has no result.
    """

    def __init__(self, model: LanguageModel, max_listed_moves: int, n_retries: int) -> None:
        self.n_illegal = 0
        self._model = model
        self._max_listed_moves = max_listed_moves
        self._n_retries = n_retries
        self._messages: ConversationType = []
        self._pending_events: tuple[str, ...] = ()

    def choose(self, turn: MatchTurn, rng: random.Random) -> int:
        """Choose the move that the model names, or a random move."""
        events, self._pending_events = self._pending_events + turn.events, ()
        decision = prompts.format_decision(turn.state, turn.player, turn.legal, self._max_listed_moves, events)
        text = decision if self._messages else f"{prompts.format_introduction(turn.state.get_game())}\n\n{decision}"
        self._add_message(text)
        for n_left in range(self._n_retries, -1, -1):
            reply = self._model([dict(message) for message in self._messages])
            if not isinstance(reply, str):
                raise TypeError(f"the language model of the opponent must return its reply as text, got {reply!r}")
            self._messages.append({"role": "assistant", "content": reply})
            if move := parse_answer(reply, turn.legal).move:
                return move.action
            self.n_illegal += 1
            if n_left:
                self._add_message(prompts.format_illegal_answer(n_left))
        move = rng.choice(turn.legal.moves)
        self._pending_events = (prompts.format_random_move(move.text),)
        return move.action

    def _add_message(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
