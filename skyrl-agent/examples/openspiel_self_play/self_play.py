"""A tiny model learns tic-tac-toe in games against frozen copies of itself.

    PYTHONPATH=../skyrl-agent/examples python -m openspiel_self_play.self_play --seed 42

At the start, it knows only the format: it replies with any number from 0 to 8, while moves are numbered from 0 to the
number of free cells. First it learns legal moves: nothing else is rewarded. Then it is frozen, and the first generation
learns to win whole games against that copy. Then the winner is frozen, and the second generation plays against the new
copy. An illegal move loses the game. Each step plays every first move, by either player. Exit status 1 means that a
generation did not beat its copy.

Replies of a copy are sampled without a seed, so numbers vary slightly between runs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import skyrl_gym
from examples.learning import LearningRun, Recipe
from openspiel_self_play.main_self_play import SelfPlayEval, SelfPlayExp
from skyrl_gym.data.files import Row
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig
from skyrl_report.learning_curve import compare_curves
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import run_command

N_PLAYERS, N_CELLS = 2, 9
N_TASKS = 100  # enough to draw every first move
N_GENERATIONS = 2
N_LEGAL_STEPS, N_STEPS = 10, 25
WON, OUTCOME = "eval/environment/won", "eval/environment/outcome"
GAME = "environment.skyrl_gym.openspiel_game"
RULES = {"illegal": "lose", "n_retries": 0}

LEGAL_MOVES = (
    f"{GAME}.opponent=random",
    f"{GAME}.legal_move_reward=1",
    "generator.reward_weights.legal=1",
    "generator.reward_weights.outcome=0",  # the outcome is rewarded later
    "trainer.algorithm.kl_loss_coef=0.03",  # keeps the probability of all legal moves up
)
"""Settings of the first copy."""

WINNING = (
    "trainer.policy_mini_batch_size=3",  # six updates per step, cheaper than the games
    "trainer.algorithm.use_entropy_loss=true",  # prevents both sides from repeating the same game
    "trainer.algorithm.entropy_loss_coef=0.003",
)
"""Settings of the generations."""


def write_data(folder: Path) -> None:
    """Write every first move, followed by either player's turn, as training and validation data."""
    config = {"cases": ["tic_tac_toe"], "max_random_steps": 1, "num_tasks_per_case": N_TASKS, "reward_mode": "legal"}
    openings = {
        _position(row): row for row in OpenSpielTasks(TaskConfig.from_options(config)).game_rows(range(N_TASKS))
    }
    rows = [
        row | {"extra_info": row["extra_info"] | {"seat": seat}}
        for row in openings.values()
        for seat in range(N_PLAYERS)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def _position(row: Row) -> str:
    return str(row["extra_info"]["serialized_game_and_state"])


def attempt(row: Row, rng: random.Random) -> ConversationType:
    """Play arbitrary numbers against a random player, up to the first illegal move."""
    with skyrl_gym.make("openspiel_game", env_config=RULES, extras=row) as env:
        messages, is_over = list(env.init(row["prompt"])[0]), False
        while not is_over:
            messages.append({"role": "assistant", "content": f"\\boxed{{{rng.randrange(N_CELLS)}}}"})
            output = env.step(messages[-1]["content"])
            messages += output["observations"]
            is_over = output["done"]
    return messages


RECIPE = Recipe(
    name="self_play",
    write_data=write_data,
    attempt=attempt,
    overrides=(
        "trainer.train_batch_size=18",
        "trainer.policy_mini_batch_size=6",
        "generator.n_samples_per_prompt=14",
        "generator.max_turns=5",
        "generator.sampling_params.max_generate_length=8",
        "generator.eval_sampling_params.temperature=1",  # like the copy
        "generator.eval_n_samples_per_prompt=20",
        "environment.skyrl_gym.max_env_workers=128",  # number of games that wait for the copy simultaneously
        *(f"{GAME}.{name}={value}" for name, value in RULES.items()),
    ),
    metric=OUTCOME,
    required=0.55,  # an even match scores 0.5, ± 0.03 by chance with this number of games
    chance=0.06,
    n_steps=N_STEPS,
)


@dataclass(frozen=True)
class Score:
    """Fractions of games that a model won, drew and lost. An illegal move loses the game."""

    won: float
    drawn: float
    lost: float

    @property
    def points(self) -> float:
        """Points per game: 1 for a win and ½ for a draw."""
        return self.won + self.drawn / 2

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Score:
        """Return the score from the metrics of an evaluation."""
        drawn = max(0.0, 2 * (metrics[OUTCOME] - metrics[WON]))
        return cls(metrics[WON], drawn, 1 - metrics[WON] - drawn)

    def __str__(self) -> str:
        return f"won {self.won:4.0%}, drawn {self.drawn:4.0%}, lost {self.lost:4.0%}"


@dataclass(frozen=True)
class SelfPlay:
    """All runs of the example: learning legal moves, then the generations, each against its predecessor."""

    output_dir: Path
    seed: int
    n_steps: int = N_STEPS
    n_legal_steps: int = N_LEGAL_STEPS
    n_generations: int = N_GENERATIONS
    overrides: tuple[str, ...] = ()

    @property
    def legal_moves(self) -> LearningRun:
        """The run whose model is the first copy."""
        return self._run("legal-moves", self.n_legal_steps, LEGAL_MOVES)

    @property
    def generations(self) -> list[LearningRun]:
        """The runs against a copy, in order."""
        runs, before = [], self.legal_moves
        for number in range(1, self.n_generations + 1):
            model = f"trainer.policy.model.path='{before.exported_model}'"
            before = self._run(f"generation{number}", self.n_steps, (*WINNING, model), SelfPlayExp)
            runs.append(before)
        return runs

    def play(self) -> list[dict[int, Score]]:
        """Train all runs. Return each generation's scores against its copy, by step."""
        runs = [self.legal_moves, *self.generations]
        runs[0].check()
        runs[0].prepare()
        if runs[-1].is_finished:
            for run in runs:
                run.move_aside()
        for run in runs:
            if not run.is_finished:
                run.train()
        return [{row["step"]: Score.of(row) for row in run.metrics() if WON in row} for run in runs[1:]]

    def last_against_first(self) -> Score:
        """Play the last generation against the first copy. That copy only knows legal moves."""
        models = (
            f"trainer.policy.model.path='{self.generations[-1].exported_model}'",
            f"trainer.ref.model.path='{self.legal_moves.exported_model}'",
        )
        run = self._run("last-against-first", 1, models, SelfPlayEval)
        run.train()
        return Score.of(run.metrics()[-1])

    def draw(self) -> Path:
        """Plot the curves of all generations in sequence."""
        curves = {
            f"generation {number}": [
                {**row, "step": row["step"] + (number - 1) * self.n_steps} for row in run.metrics()
            ]
            for number, run in enumerate(self.generations, start=1)
        }
        plot = self.legal_moves.folder.path.with_name(f"seed{self.seed}-generations.png")
        title = "Points per game of tic-tac-toe against a frozen copy"
        return compare_curves(curves, plot, metric=OUTCOME, title=title, baselines={"an even match": 0.5})

    def _run(
        self, label: str, n_steps: int, overrides: tuple[str, ...], experiment: type[RLExperiment] = RLExperiment
    ) -> LearningRun:
        overrides = (*overrides, *self.overrides)
        return LearningRun(RECIPE, self.output_dir, self.seed, n_steps, overrides, label, experiment)


def report(games: SelfPlay) -> bool:
    """Train, print the scores, and return True if every generation beat its copy."""
    started = time.monotonic()
    generations = games.play()
    last = games.last_against_first()
    print(f"\nAgainst a frozen copy ({games.n_steps} steps each, {time.monotonic() - started:.0f} s)\n")
    for number, scores in enumerate(generations, start=1):
        print(f"  generation {number}")
        for step, score in scores.items():
            print(f"    after {step:3} steps    {score}")
    print(f"  generation {len(generations)}, against the first copy\n    after {games.n_steps:3} steps    {last}")
    has_learned = all(scores[max(scores)].points >= RECIPE.required for scores in generations)
    print(
        f"\n{'Passed' if has_learned else 'FAILED'}: {RECIPE.required} points per game required, where a draw counts "
        "half a point"
    )
    print(f"Learning curve: {games.draw()}")
    return has_learned


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Exit with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=42, help="seed of the model, the data order and sampling")
    add("--output_dir", type=Path, default=Path("outputs"), help="folder of the run folders")
    add("--steps", type=int, default=N_STEPS, help="training steps of each generation")
    add("--legal_steps", type=int, default=N_LEGAL_STEPS, help="training steps of the first copy")
    add("--generations", type=int, default=N_GENERATIONS, help="number of successive copies to play against")
    add("overrides", nargs="*", help="configuration overrides key=value")
    args = parser.parse_args(argv)
    if args.generations < 1:
        parser.error(f"--generations={args.generations} must be at least 1")
    output_dir = args.output_dir.expanduser().resolve()
    games = SelfPlay(output_dir, args.seed, args.steps, args.legal_steps, args.generations, tuple(args.overrides))
    results: list[bool] = []
    run_command(lambda: results.append(report(games)))
    sys.exit(0 if results[0] else 1)


if __name__ == "__main__":
    main()
