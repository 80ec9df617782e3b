"""Whole OpenSpiel games against opponents."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from skyrl_gym.chat_endpoint import ChatEndpoint, EndpointConfig
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.openspiel import prompts
from skyrl_gym.envs.openspiel.answers import parse_answer
from skyrl_gym.envs.openspiel.env import describe
from skyrl_gym.envs.openspiel.match import Match, MatchTurn, Opponent
from skyrl_gym.envs.openspiel.opponents import LanguageModel, MctsConfig, MctsOpponent, PolicyOpponent, RandomOpponent
from skyrl_gym.envs.openspiel.rewards import playout_value, scaled_return
from skyrl_gym.envs.openspiel.tasks import TASK_OPTIONS, TaskConfig, read_task
from skyrl_gym.envs.options import finite_number, one_of, row_options, set_options
from skyrl_gym.envs.row import read_extra_info, whole_number

OPPONENTS = ("random", "mcts", "policy")
ILLEGAL_RULES = ("retry", "lose", "random")
MAX_DEALS = 10
"""Maximum number of restarts of a game that ends before the seat's first turn."""


@dataclass(frozen=True, slots=True)
class GameConfig:
    """Rules and reward of a game. `tasks` configures the starting position.

    opponent: ``random``, ``mcts`` (options in `mcts`), or ``policy``, a language model (options in `policy`).
    seat: the model's player. By default, it alternates from task to task.
    illegal: the rule for answers without a legal move. ``retry``: the model may try again up to `n_retries` times in a
        row, and then loses. One slip does not lose a game, but the format is still learned, because retries use up
        turns. ``lose``: the model loses immediately. ``random``: a random move replaces the answer.
    legal_move_reward: added to the reward of a turn with a legal move.
    max_turns: the game is scored in its current state after this many turns of the model. The trainer's limit also
        applies.
    """

    tasks: TaskConfig = field(default_factory=TaskConfig)
    opponent: str = "random"
    mcts: MctsConfig = field(default_factory=MctsConfig)
    policy: EndpointConfig | None = None
    seat: int | None = None
    illegal: str = "retry"
    n_retries: int = 2
    legal_move_reward: float = 0.0
    max_turns: int | None = None

    def __post_init__(self) -> None:
        one_of(self.opponent, "opponent", OPPONENTS)
        one_of(self.illegal, "illegal", ILLEGAL_RULES)
        whole_number(self.n_retries, "n_retries", 0)
        finite_number(self.legal_move_reward, "legal_move_reward")
        if self.seat is not None:
            whole_number(self.seat, "seat", 0)
        if self.max_turns is not None:
            whole_number(self.max_turns, "max_turns", 1)

    @staticmethod
    def from_options(options: Mapping[str, Any] | None = None) -> GameConfig:
        """Create the configuration from options: the fields of this class except `tasks`, and of `TaskConfig`.

        Raises:
            ValueError: an option is unknown or has an invalid value.
        """
        options = set_options(options)
        own = {name: options.pop(name) for name in _GAME_OPTIONS if name in options}
        own["mcts"] = MctsConfig.from_options(own.get("mcts"))
        own["policy"] = EndpointConfig.from_options(own["policy"]) if "policy" in own else None
        return GameConfig(tasks=TaskConfig.from_options(options), **own)


_GAME_OPTIONS = frozenset(option.name for option in fields(GameConfig)) - {"tasks"}


class OpenSpielGameEnv(BaseTextEnv):
    """A whole game, with the model in one seat.

    `extras` is a row of `OpenSpielTasks.game_rows`: `extra_info` has the starting position and may have any option of
    `GameConfig`. `env_config` has the same options and takes precedence over the row. `init` adds the position to the
    row's prompt. Each observation shows the opponents' moves, the new position and its legal moves.

    The reward of the last turn is the seat's scaled return: 0 for the worst outcome of the game and for a game lost by
    illegal answers, 1 for the best. A game that is not over after the last turn gets the mean result of `n_playouts`
    random continuations.

    All randomness follows from the seed, the task id and the moves, so the same replies play the same game, except
    against a language model. `language_model` replaces the endpoint in `policy`.

    Raises:
        ImportError: OpenSpiel is not installed.
        ValueError: the row or the configuration is invalid. The message names the value.
        EndpointError: the opponent cannot be reached during `init` or `step`, so the game has no result.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        language_model: LanguageModel | None = None,
    ) -> None:
        super().__init__()
        extras = extras or {}
        options = row_options(extras, TASK_OPTIONS | _GAME_OPTIONS) | set_options(env_config)
        self.config = GameConfig.from_options(options)
        self.task = read_task(read_extra_info(extras), self.config.tasks)
        game, n_players = self.task.game, self.task.game.num_players()
        self.seat = self.config.seat if self.config.seat is not None else self.task.task_id % n_players
        if self.seat >= n_players:
            raise ValueError(f"seat={self.seat}, but {game} has {n_players} players, counted from 0")
        limits = [] if self.config.max_turns is None else [self.config.max_turns]
        if extras.get("max_turns") is not None:
            limits.append(whole_number(extras["max_turns"], "max_turns", 1))
        self.max_turns = min(limits) if limits else int(game.max_game_length()) * (1 + self.config.n_retries)
        self.n_legal = 0
        self.outcome: float | None = None
        self._n_illegal_in_a_row = 0
        self._rng = random.Random(f"{self.config.tasks.seed}/{self.task.task_id}")
        self._endpoint = _endpoint(self.config) if language_model is None else None
        self._model = language_model or self._endpoint
        self._opponents = self._seat_opponents()
        self._match = Match(self.task.state, self.seat, self._opponents, self._rng)
        self._turn: MatchTurn | None = None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Start the game. Append the seat's first decision to the prompt."""
        self._start()
        decision = self._decision()
        *before, last = prompt or [{"role": "user", "content": prompts.format_introduction(self.task.game)}]
        if last["role"] == "user" and isinstance(last["content"], str):
            messages = [*before, {**last, "content": f"{last['content']}\n\n{decision}"}]
        else:
            messages = [*before, last, {"role": "user", "content": decision}]
        return messages, {"seat": self.seat, "case": self.task.case, "task_id": self.task.task_id}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Play the move that the reply names, then the opponents' moves up to the seat's next turn."""
        if self._turn is None:
            raise RuntimeError("call init before step, because another player may have to move first")
        if self.outcome is not None:
            raise RuntimeError(
                f"this game ended after turn {self.turns}; create a new OpenSpielGameEnv for the next episode"
            )
        self.turns += 1
        parsed = parse_answer(action, self._turn.legal)
        observations = self._play(parsed.move.action) if parsed.move else self._after_illegal_answer()
        if self.outcome is None and self.turns >= self.max_turns:
            self.outcome = playout_value(self._match.state, self.seat, self.config.tasks.n_playouts, self._rng)
        components = {"outcome": self.outcome or 0.0}
        if self.config.legal_move_reward:
            components["legal"] = self.config.legal_move_reward if parsed.move else 0.0
        return BaseTextEnvStepOutput(
            observations=observations if self.outcome is None else [],
            reward=sum(components.values()),
            done=self.outcome is not None,
            metadata={
                "reward_components": components,
                "seat": self.seat,
                "legal": parsed.move is not None,
                "outcome": self.outcome,
                "returns": list(self._match.state.returns()) if self._match.is_over else None,
                **describe(parsed),
            },
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns, the fraction of legal answers, and the result. Empty before the first turn."""
        if not self.turns:
            return {}
        metrics: dict[str, Any] = {
            "steps": self.turns,
            "legal": self.n_legal / self.turns,
            "finished": int(self._match.is_over),
        }
        if self.outcome is not None:
            metrics |= {"outcome": self.outcome, "won": int(self._has_won())}
        if self.config.opponent == "policy":
            policies = [opponent for opponent in self._opponents.values() if isinstance(opponent, PolicyOpponent)]
            metrics["opponent_illegal"] = sum(policy.n_illegal for policy in policies)
        return metrics

    def close(self) -> None:
        """Close the connection to the opponent."""
        if self._endpoint is not None:
            self._endpoint.close()

    def _start(self) -> None:
        """Play up to the seat's first decision. Restart the game if it ends before."""
        if self._turn is not None:
            raise RuntimeError("this game has started; create a new OpenSpielGameEnv for the next episode")
        for _ in range(MAX_DEALS):
            self._match.advance()
            if not self._match.is_over:
                self._turn = self._match.turn()
                return
            self._opponents = self._seat_opponents()
            self._match = Match(self.task.state, self.seat, self._opponents, self._rng)
        raise ValueError(
            f"task {self.task.task_id} of {self.task.case} ended {MAX_DEALS} times before the first turn of "
            f"seat={self.seat}; choose another seat or fewer max_random_steps"
        )

    def _seat_opponents(self) -> dict[int, Opponent]:
        """Create an opponent for every other seat."""
        return {player: self._new_opponent() for player in range(self.task.game.num_players()) if player != self.seat}

    def _new_opponent(self) -> Opponent:
        if self.config.opponent == "random":
            return RandomOpponent()
        if self.config.opponent == "mcts":
            return MctsOpponent(self.task.game, self.config.mcts)
        assert self._model is not None
        return PolicyOpponent(self._model, self.config.tasks.max_listed_moves, self.config.n_retries)

    def _decision(self, *events: str) -> str:
        assert self._turn is not None
        turn = self._turn
        max_listed_moves = self.config.tasks.max_listed_moves
        return prompts.format_decision(turn.state, turn.player, turn.legal, max_listed_moves, (*events, *turn.events))

    def _play(self, action: int) -> ConversationType:
        self.n_legal += 1
        self._n_illegal_in_a_row = 0
        self._match.play(action)
        return self._after_play()

    def _after_illegal_answer(self) -> ConversationType:
        """Apply the rule for illegal answers."""
        if self.config.illegal == "random":
            assert self._turn is not None
            random_move = self._rng.choice(self._turn.legal.moves)
            self._match.play(random_move.action)
            return self._after_play(prompts.format_random_move(random_move.text))
        self._n_illegal_in_a_row += 1
        n_left = min(1 + self.config.n_retries - self._n_illegal_in_a_row, self.max_turns - self.turns)
        if self.config.illegal == "retry" and n_left > 0:
            return [{"role": "user", "content": prompts.format_illegal_answer(n_left)}]
        self.outcome = 0.0
        return []

    def _after_play(self, *events: str) -> ConversationType:
        """Return the next decision, or set the outcome."""
        if self._match.is_over:
            self.outcome = scaled_return(self.task.game, self._match.state.returns(), self.seat)
            return []
        self._turn = self._match.turn()
        return [{"role": "user", "content": self._decision(*events)}]

    def _has_won(self) -> bool:
        """Return True if the game ended with the best return, not shared by all, or alone with more than half."""
        if not self._match.is_over:
            return False
        returns = self._match.state.returns()
        if len(returns) == 1:
            return scaled_return(self.task.game, returns, self.seat) > 0.5
        return bool(returns[self.seat] == max(returns) > min(returns))


def _endpoint(config: GameConfig) -> ChatEndpoint | None:
    """Create a language model's endpoint if the opponent is one."""
    if config.opponent != "policy":
        return None
    if config.policy is None:
        raise ValueError(
            "opponent=policy needs a model: set policy.base_url and policy.model to an OpenAI-compatible endpoint, "
            "such as http://127.0.0.1:8000/v1"
        )
    return ChatEndpoint(config.policy)
