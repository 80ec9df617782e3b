import json
import random
from typing import Any

import pytest
from gym_kit.messages import message_text
from gym_kit.servers import ModelServer

from skyrl_gym.chat_endpoint import EndpointError
from skyrl_gym.checkup.rules import Checkup
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.openspiel import prompts
from skyrl_gym.envs.openspiel.game_env import OpenSpielGameEnv
from skyrl_gym.envs.openspiel.rewards import scaled_return
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks
from skyrl_gym.envs.registration import EnvSpec

TIC_TAC_TOE = {"cases": ["tic_tac_toe"], "max_random_steps": 0, "num_tasks_per_case": 1}


def make_row(task_id: int = 0, **options: Any) -> dict[str, Any]:
    (row,) = OpenSpielTasks(TIC_TAC_TOE | options).game_rows([task_id])
    return row


def new_game(row: dict[str, Any] | None = None, **config: Any) -> OpenSpielGameEnv:
    """Return a game that has been started."""
    row = make_row() if row is None else row
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    env = OpenSpielGameEnv(env_config=config, extras=extras)
    env.init(row["prompt"])
    return env


def play_at_random(env: OpenSpielGameEnv, seed: int = 0) -> list[dict[str, Any]]:
    """Play the seat at random; return every step."""
    rng = random.Random(seed)
    steps: list[dict[str, Any]] = []
    while not steps or not steps[-1]["done"]:
        assert env._turn is not None
        steps.append(dict(env.step(f"\\boxed{{{rng.choice(env._turn.legal.moves).text}}}")))
    return steps


def test_first_decision_is_appended_to_the_prompt() -> None:
    row = make_row()
    env = OpenSpielGameEnv({"seat": 1}, row)
    (message,), facts = env.init(row["prompt"])
    assert facts == {"seat": 1, "case": "tic_tac_toe", "task_id": 0}
    introduction, news, position, moves, answer = message["content"].split("\n\n")
    assert introduction == row["prompt"][0]["content"]
    assert news.startswith("Player 0 played x(")
    assert position.startswith("You are player 1.\nCurrent state (your turn):\n")
    assert moves.startswith("Legal actions:\n0: o(")
    assert answer == prompts.ANSWER_FORMAT


@pytest.mark.parametrize(
    ("prompt", "roles"),
    [
        ([{"role": "system", "content": "Play well."}], ["system", "user"]),
        ([{"role": "system", "content": "Play well."}, {"role": "user", "content": "Go."}], ["system", "user"]),
        ([], ["user"]),
    ],
)
def test_prompt_of_the_row_is_kept(prompt: ConversationType, roles: list[str]) -> None:
    before = json.dumps(prompt)
    messages, _ = OpenSpielGameEnv({"seat": 0}, make_row()).init(prompt)
    assert [message["role"] for message in messages] == roles
    assert json.dumps(prompt) == before
    assert "Legal actions:" in messages[-1]["content"]
    if prompt:
        assert messages[0]["content"].startswith("Play well.")


def test_reward_of_a_finished_game_is_its_scaled_return() -> None:
    outcomes = set()
    for seed in range(6):
        env = new_game(seat=0, seed=seed)
        *before, last = play_at_random(env, seed)
        assert all(step["reward"] == 0.0 and not step["done"] for step in before)
        assert all(step["observations"][0]["role"] == "user" for step in before)
        returns = env._match.state.returns()
        assert last["reward"] == scaled_return(env.task.game, returns, 0)
        assert last["observations"] == []
        assert last["metadata"]["returns"] == returns
        assert env.get_metrics() == {
            "steps": len(before) + 1,
            "legal": 1.0,
            "finished": 1,
            "outcome": last["reward"],
            "won": int(returns[0] > 0),
        }
        outcomes.add(last["reward"])
    assert outcomes >= {0.0, 1.0}


@pytest.mark.parametrize(
    ("case", "opponent"),
    [
        ("backgammon", "random"),
        ("leduc_poker", "mcts"),
        ("hex(board_size=5)", "mcts"),
        ("goofspiel(num_cards=8)", "random"),
    ],
)
def test_same_replies_play_the_same_game(case: str, opponent: str) -> None:
    row = make_row(3, cases=[case], max_random_steps=2, num_tasks_per_case=5)
    config = {"opponent": opponent, "mcts": {"n_simulations": 2, "n_worlds": 2}, "max_turns": 12}
    games = [play_at_random(new_game(row, **config), seed=1) for _ in range(2)]
    assert games[0] == games[1]
    other_seed = play_at_random(new_game(row, seed=1, **config), seed=1)
    assert other_seed != games[0]


def test_seat_alternates_unless_it_is_set() -> None:
    options = {"num_tasks_per_case": 4}
    assert [new_game(make_row(k, **options)).seat for k in range(4)] == [0, 1, 0, 1]
    assert [new_game(make_row(k, **options), seat=1).seat for k in range(4)] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"seat=2, but tic_tac_toe\(\) has 2 players"):
        new_game(seat=2)


def test_illegal_answers_may_be_corrected_or_replaced() -> None:
    env = new_game(seat=0, n_retries=2)
    first = env.step("z9")
    assert message_text(first) == prompts.format_illegal_answer(2)
    assert (first["reward"], first["done"]) == (0.0, False)
    assert "1 more try" in message_text(env.step(""))
    assert env.step("x(1,1)")["metadata"]["legal"]
    assert "you have 2 more tries" in message_text(env.step("x(1,1)"))  # a new decision, new tries
    assert env.get_metrics()["legal"] == 0.25
    env = new_game(seat=0, illegal="random")
    out = env.step("z9")
    message = "Your answer was not a legal action; a random one was played for you: x("
    assert message_text(out).startswith(message)
    assert len(env._match.state.history()) == 2
    assert (env.get_metrics()["legal"], out["metadata"]["legal"], out["done"]) == (0.0, False, False)
    env = new_game(seat=0, max_turns=2, n_retries=5)
    assert "1 more try" in message_text(env.step("z9"))
    last = env.step("z9")
    assert (last["reward"], last["done"]) == (0.0, True)
    assert new_game(seat=0, n_retries=1).max_turns == 18  # fits the longest game


@pytest.mark.parametrize(("config", "n_steps"), [({"n_retries": 1}, 2), ({"illegal": "lose"}, 1)])
def test_illegal_answers_lose(config: dict[str, Any], n_steps: int) -> None:
    env = new_game(seat=0, **config)
    *before, last = [env.step("z9") for _ in range(n_steps)]
    assert not any(output["done"] for output in before)
    assert (last["reward"], last["done"], last["observations"]) == (0.0, True, [])
    assert last["metadata"]["returns"] is None
    assert env.get_metrics() == {"steps": n_steps, "legal": 0.0, "finished": 0, "outcome": 0.0, "won": 0}


def test_legal_moves_may_be_rewarded() -> None:
    env = new_game(seat=0, legal_move_reward=0.01)
    out = env.step("x(1,1)")
    assert (out["reward"], out["metadata"]["reward_components"]) == (0.01, {"outcome": 0.0, "legal": 0.01})
    assert env.step("z9")["reward"] == 0.0
    last = play_at_random(env)[-1]
    assert last["reward"] == pytest.approx(last["metadata"]["outcome"] + 0.01)


@pytest.mark.parametrize(("trainer", "configured"), [(2, None), (None, 2), (9, 2), (2, 9)])
def test_unfinished_game_is_scored_by_random_games(trainer: int | None, configured: int | None) -> None:
    row = make_row(0, cases=["hex(board_size=7)"]) | ({} if trainer is None else {"max_turns": trainer})
    config = {} if configured is None else {"max_turns": configured}
    env = new_game(row, seat=0, n_playouts=50, **config)
    first, last = play_at_random(env)
    assert env.max_turns == 2
    assert (first["done"], last["done"], last["observations"]) == (False, True, [])
    assert 0.0 < last["reward"] < 1.0
    assert env.get_metrics()["finished"] == 0


def test_game_that_ends_before_the_seats_turn_is_restarted_and_then_refused() -> None:
    """In this nim the first player takes the only object, so the second player never has a turn."""
    row = make_row(0, cases=["nim(pile_sizes=1;0)"])
    with pytest.raises(ValueError, match="ended 10 times before the first turn of seat=1"):
        new_game(row, seat=1)
    assert new_game(row, seat=0).step("0")["done"]


def test_wrong_order_of_calls_raises() -> None:
    env = OpenSpielGameEnv({}, make_row())
    assert env.get_metrics() == {}
    with pytest.raises(RuntimeError, match="call init before step"):
        env.step("0")
    env.init([])
    with pytest.raises(RuntimeError, match="has started"):
        env.init([])
    play_at_random(env)
    with pytest.raises(RuntimeError, match="create a new OpenSpielGameEnv"):
        env.step("0")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"opponent": "human"}, "opponent='human' is unknown; use one of random, mcts, policy"),
        ({"illegal": "ignore"}, "illegal='ignore' is unknown"),
        ({"n_retries": -1}, "n_retries=-1 must be at least 0"),
        ({"max_turns": 0}, "max_turns=0 must be at least 1"),
        ({"legal_move_reward": float("nan")}, "legal_move_reward=nan must be a finite number"),
        ({"mcts": {"n": 1}}, "mcts has no option 'n'"),
        ({"mcts": {"n_simulations": 0}}, "n_simulations=0 must be at least 1"),
        ({"mcts": {"uct_c": -1}}, "uct_c=-1 must be at least 0"),
        ({"opponent": "policy"}, "set policy.base_url and policy.model"),
    ],
)
def test_invalid_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenSpielGameEnv(config, make_row())


def test_self_play_against_a_model_behind_a_url(model_server: ModelServer) -> None:
    def first_legal(messages: ConversationType) -> str:
        listed = messages[-1]["content"].partition("Legal actions:\n")[2]
        return f"<think>I wonder.</think>\\boxed{{{listed.splitlines()[0].partition(': ')[2]}}}"

    model_server.answer = first_legal
    policy = {"base_url": model_server.url, "model": "frozen", "sampling_params": {"temperature": 0.7}}
    with new_game(opponent="policy", policy=policy, seat=1) as env:
        steps = play_at_random(env)
        assert steps[-1]["reward"] == scaled_return(env.task.game, env._match.state.returns(), 1)
        assert env.get_metrics()["opponent_illegal"] == 0
    asked = [request.body for request in model_server.requests]
    assert len(asked) >= 3
    assert all(body["model"] == "frozen" and body["temperature"] == 0.7 for body in asked)
    first, second = asked[0]["messages"], asked[1]["messages"]
    assert first[0]["content"].startswith("Game: tic_tac_toe\n")
    assert "You are player 0." in first[0]["content"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[2]["content"].startswith("Player 1 played o(")


def test_unreachable_opponent_raises(model_server: ModelServer) -> None:
    policy = {"base_url": model_server.url, "model": "frozen", "n_attempts": 1}
    model_server.answer = lambda messages: (500, b"out of memory")
    with pytest.raises(EndpointError, match="out of memory"):
        new_game(opponent="policy", policy=policy, seat=1)
    model_server.answer = lambda messages: "0"
    with new_game(opponent="policy", policy=policy, seat=1) as env:
        model_server.answer = lambda messages: (500, b"out of memory")
        with pytest.raises(EndpointError, match="out of memory"):
            env.step("0")
        assert "outcome" not in env.get_metrics()


@pytest.mark.parametrize(("case", "opponent"), [("chess", "random"), ("backgammon", "mcts"), ("leduc_poker", "mcts")])
def test_it_passes_the_checkup(case: str, opponent: str) -> None:
    row = make_row(1, cases=[case], num_tasks_per_case=2)
    settings = {"opponent": opponent, "mcts": {"n_simulations": 3, "n_worlds": 2}}
    findings = list(Checkup(EnvSpec("game", "skyrl_gym.envs.openspiel.game_env:OpenSpielGameEnv"), row, settings).run())
    assert [finding for finding in findings if finding.verdict != "passed"] == []
