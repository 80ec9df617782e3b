import json
from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_gym.checkup.rules import Checkup
from skyrl_gym.envs.openspiel.cases import AVAILABLE_CASES
from skyrl_gym.envs.openspiel.env import OpenSpielEnv
from skyrl_gym.envs.openspiel.rewards import move_value
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks
from skyrl_gym.envs.registration import EnvSpec

TASKS = OpenSpielTasks({"cases": ["hex(board_size=5)", "leduc_poker"], "num_tasks_per_case": 5})


def extras(task_id: int = 0, **more: Any) -> dict[str, Any]:
    (row,) = TASKS.rows([task_id])
    return {key: value for key, value in row.items() if key not in ("prompt", "env_class")} | {"max_turns": 1, **more}


def test_reward_of_a_legal_move_is_its_outcome() -> None:
    env = OpenSpielEnv(env_config={}, extras=extras(1))
    task = TASKS.generate(1)
    move = task.legal.moves[3]
    out = env.step(f"Let me think. \\boxed{{{move.text}}}")
    assert out["reward"] == move_value(task.state, task.player, move.action, 8, "0/1")
    assert (out["observations"], out["done"]) == ([], True)
    assert out["metadata"] == {
        "reward_components": {"outcome": out["reward"]},
        "legal": True,
        "outcome": out["reward"],
        "action": move.action,
        "move": move.text,
        "parsed_by": "text",
        "answer": move.text,
    }
    assert env.get_metrics() == {"legal": 1, "outcome": out["reward"]}
    assert env.turns == env.max_turns == 1


@pytest.mark.parametrize("reply", ["", "I pass", "<think>a1", "\x00", "c3"])  # c3 is taken
@pytest.mark.parametrize("mode", ["outcome", "legal"])
def test_reply_without_a_legal_move_has_reward_0(reply: str, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    env = OpenSpielEnv({"reward_mode": mode}, extras())
    out = env.step(reply)
    assert (out["reward"], out["metadata"]["legal"], out["metadata"]["action"]) == (0.0, False, None)
    assert env.get_metrics()["legal"] == 0
    assert capfd.readouterr() == ("", "")


def test_row_with_only_a_task_id_has_the_same_reward() -> None:
    config = {"cases": list(TASKS.config.cases), "num_tasks_per_case": 5}
    move = TASKS.generate(3).legal.moves[0].text
    rewards = {OpenSpielEnv({}, extras(3)).step(move)["reward"] for _ in range(5)}
    assert rewards == {OpenSpielEnv(config, {"extra_info": {"task_id": 3}}).step(move)["reward"]}


def test_every_case_can_be_played_and_scored() -> None:
    tasks = OpenSpielTasks({"num_tasks_per_case": 2, "n_playouts": 1})
    for row in tasks.rows(range(tasks.total)):
        with OpenSpielEnv({"n_playouts": 1}, row) as env:
            move = env.task.legal.moves[-1]
            assert 0.0 <= (env.step(move.text)["reward"] or 0.0) <= 1.0
            assert env.parsed is not None
            assert env.parsed.move == move
    assert tasks.total == 2 * len(AVAILABLE_CASES)


def test_config_row_and_defaults() -> None:
    row = extras(0, reward_spec={"method": "legal"})
    assert OpenSpielEnv({}, row).config.reward_mode == "legal"
    assert OpenSpielEnv({"reward_mode": "outcome"}, row).config.reward_mode == "outcome"
    assert OpenSpielEnv({}, extras(0, reward_spec={"method": "rule"})).config.reward_mode == "outcome"
    assert OpenSpielEnv(OmegaConf.create({"n_playouts": 3}), extras()).config.n_playouts == 3
    for config, row in (({"reward_mode": "win"}, extras()), ({}, extras(reward_spec={"method": "win"}))):
        with pytest.raises(ValueError, match="reward_mode='win' is unknown"):
            OpenSpielEnv(config, row)


def test_second_answer_raises() -> None:
    env = OpenSpielEnv({}, extras())
    assert env.get_metrics() == {}
    env.step("a1")
    with pytest.raises(RuntimeError, match="create a new OpenSpielEnv"):
        env.step("a1")


def test_extra_info_may_be_json_and_long_answers_are_truncated() -> None:
    row = extras(4)
    row["extra_info"] = json.dumps(row["extra_info"])
    env = OpenSpielEnv({}, row)
    assert env.task.task_id == 4
    metadata = env.step("x" * 1_000_000)["metadata"]
    assert len(metadata["answer"]) == 200
    json.dumps(metadata)


@pytest.mark.parametrize("case", ["chess", "goofspiel(num_cards=8)", "hearts"])
def test_it_passes_the_checkup(case: str) -> None:
    (row,) = OpenSpielTasks({"cases": [case]}).rows([1])
    findings = list(Checkup(EnvSpec("one_move", "skyrl_gym.envs.openspiel.env:OpenSpielEnv"), row, {}).run())
    assert [finding for finding in findings if finding.verdict != "passed"] == []
