"""Self-play against a frozen copy: small runs of the example, with the real engine, endpoint and environment."""

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from openspiel_self_play import self_play
from openspiel_self_play.main_self_play import SelfPlayEval, SelfPlayExp, opponent_config
from openspiel_self_play.self_play import GAME, RECIPE, Score, attempt, main

from examples import learning, tiny_model
from examples.learning import LearningRun
from examples.tiny_model import encode, train_language_model
from skyrl_gym.data.files import Row
from skyrl_train.config import parse_cli
from skyrl_train.dataset.files import read_rows
from skyrl_train.entrypoints.tiny import tiny_qwen3
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_tokenizer

SMALL_RECIPE = dataclasses.replace(RECIPE, n_start_steps=2)
SEED = 1
SMALL = (
    "generator.n_samples_per_prompt=2",
    "generator.eval_n_samples_per_prompt=1",
    "trainer.dump_trajectories=true",
    "trainer.ckpt_interval=-1",
)
AFTER_ITS_MOVE = re.compile(
    r"Player \d played [xo]\((\d),(\d)\)\.\n\nYou are player \d\.\nCurrent state \(your turn\):\n((?:[.xo]{3}\n){3})"
)


class Zeros(random.Random):
    """A random generator that always draws 0."""

    def randrange(self, *_: Any) -> int:
        return 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and tiny model of the example, and `first_mover`, which always plays number 0."""
    folder = tmp_path_factory.mktemp("self-play")
    with pytest.MonkeyPatch.context() as constants:
        constants.setattr(learning, "N_CONVERSATIONS", 64)
        constants.setattr(tiny_model, "BATCH_SIZE", 4)
        constants.setattr(tiny_model, "LEARNING_RATE", 6e-3)
        LearningRun(SMALL_RECIPE, folder, SEED, n_steps=1).prepare()
        rows = read_rows(str(folder / "self_play/data/train.parquet"))
        tokenizer = load_tokenizer(str(folder / f"self_play/models/tiny-qwen3-seed{SEED}"))
        model = tiny_qwen3(tokenizer, seed=SEED)
        conversations = [attempt(row, Zeros(n)) for row in rows for n in range(4)]
        train_language_model(model, encode(conversations, tokenizer), SEED, n_steps=100)
    for saved in (tokenizer, model):
        saved.save_pretrained(folder / "first_mover")
    return folder


@pytest.fixture
def run(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearningRun:
    """A run of two steps with prepared data and model."""
    monkeypatch.setattr(self_play, "RECIPE", SMALL_RECIPE)
    shutil.copytree(models / "self_play", tmp_path / "self_play")
    return LearningRun(SMALL_RECIPE, tmp_path, SEED, n_steps=2)


def games(run: LearningRun) -> list[Row]:
    """Return all dumped games."""
    files = [file for kind in ("trajectories", "evals") for file in run.folder.path.glob(f"{kind}/**/*.jsonl")]
    return [row for file in files if file.stem != "aggregated_results" for row in read_rows(str(file))]


def opponents_moves(game: Row) -> list[tuple[str, int]]:
    """Return the board after each opponent's move that the policy saw, and the cell of the move."""
    text = game["input_prompt"] + game["output_response"]
    return [
        (board.replace("\n", ""), 3 * int(row) + int(column)) for row, column, board in AFTER_ITS_MOVE.findall(text)
    ]


@pytest.mark.parametrize("experiment", [pytest.param(SelfPlayExp, marks=pytest.mark.nightly), SelfPlayEval])
def test_games_are_played_against_the_reference(experiment: type[SelfPlayExp], run: LearningRun, models: Path) -> None:
    """The reference always takes the first free cell; neither a random player nor the policy does."""
    overrides = (
        *SMALL,
        f"trainer.ref.model.path='{models}/first_mover'",
        f"{GAME}.policy.sampling_params.temperature=0",
        f"{GAME}.illegal=random",  # an untrained model continues after illegal moves
    )
    dataclasses.replace(run, overrides=overrides, experiment=experiment).train()
    played = games(run)
    moves = [move for game in played for move in opponents_moves(game)]
    assert len(played) >= 18
    assert len(moves) > len(played)
    assert all("." not in board[:cell] for board, cell in moves)
    assert len({cell for _, cell in moves}) > 3
    assert {game["env_metrics"]["opponent_illegal"] for game in played} == {0}


def test_the_example_end_to_end(run: LearningRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The budget is too small to learn anything, which must be reported. Earlier finished runs are moved aside."""
    folder = run.output_dir / "self_play"
    for name in ("legal-moves", "generation1", "generation2"):
        earlier = folder / f"seed{SEED}-{name}"
        earlier.mkdir()
        (earlier / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(SystemExit) as status:
        main(["--output_dir", str(run.output_dir), "--seed", str(SEED), "--steps", "1", "--legal_steps", "1", *SMALL])
    assert status.value.code == 1
    output = capsys.readouterr().out
    score = r" +won +\d+%, drawn +\d+%, lost +\d+%\n"
    before_and_after = rf" +after +0 steps{score} +after +1 steps{score}"
    assert re.search(
        rf"generation 1\n{before_and_after} +generation 2\n{before_and_after}"
        rf" +generation 2, against the first copy\n +after +1 steps{score}",
        output,
    )
    assert "FAILED: 0.55 points per game required" in output
    assert (folder / f"seed{SEED}-generations.png").stat().st_size > 0
    assert len(list(folder.glob(f"seed{SEED}-generation?-before-*"))) == 2
    log = (folder / f"seed{SEED}-generation2/train.log").read_text()
    assert set(re.findall(r"Loaded the \S+ from (\S+):", log)) == {
        f"{folder}/seed{SEED}-generation1/export/global_step_1/policy"
    }
    assert "The endpoint of model 'opponent' listens" in log


def test_zero_generations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--generations", "0"])
    assert "--generations=0 must be at least 1" in capsys.readouterr().err


def test_a_score_is_three_shares_of_the_games() -> None:
    score = Score.of({"eval/environment/won": 0.5, "eval/environment/outcome": 0.625})
    assert (score.won, score.drawn, score.lost, score.points) == (0.5, 0.25, 0.25, 0.625)
    assert str(score) == "won  50%, drawn  25%, lost  25%"


def test_the_opponent_uses_the_sampling_parameters_of_the_policy_by_default() -> None:
    sampling = ["generator.sampling_params.max_generate_length=9", "generator.sampling_params.temperature=0.7"]
    gym = opponent_config(parse_cli(sampling), "http://127.0.0.1:1/v1")
    assert gym.env_config("openspiel_game") == {
        "opponent": "policy",
        "policy": {
            "base_url": "http://127.0.0.1:1/v1",
            "model": "opponent",
            "sampling_params": {"temperature": 0.7, "max_tokens": 9},
        },
    }
    overrides = [
        f"{GAME}.policy.sampling_params.temperature=0",
        f"{GAME}.illegal=lose",
        "environment.skyrl_gym.search.topk=1",
    ]
    gym = opponent_config(parse_cli([*sampling, *overrides]), "http://127.0.0.1:1/v1")
    assert gym.env_config("openspiel_game")["policy"]["sampling_params"] == {"temperature": 0, "max_tokens": 9}
    assert gym.env_config("openspiel_game")["illegal"] == "lose"
    assert gym.env_config("search") == {"topk": 1}


def test_environments_that_block_their_opponent_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_env_workers=0 calls environments in the thread that serves their"):
        opponent_config(parse_cli(["environment.skyrl_gym.max_env_workers=0"]), "http://127.0.0.1:1/v1")
