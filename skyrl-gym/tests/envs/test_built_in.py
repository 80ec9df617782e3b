import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gym_kit.databases import write_database
from gym_kit.messages import message_text, user
from gym_kit.processes import run_python

import skyrl_gym
from skyrl_gym.envs import register
from skyrl_gym.envs.aime.env import AIMEEnv
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.gsm8k.env import GSM8kEnv
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv
from skyrl_gym.envs.lcb.env import LCBEnv
from skyrl_gym.envs.multiply.env import MultiplyEnv
from skyrl_gym.envs.search.env import SearchEnv
from skyrl_gym.envs.searchcode.env import SearchCodeEnv
from skyrl_gym.envs.sql.env import SQLEnv, Text2SQLEnvConfig
from skyrl_gym.tools.core import tool
from skyrl_gym.tools.search import SearchToolGroup

ROW = {"reward_spec": {"ground_truth": "42"}, "max_turns": 3}
TESTS = json.dumps([{"input": "", "output": "42"}])
SKYRL = {
    "aime": AIMEEnv,
    "gsm8k": GSM8kEnv,
    "gsm8k_multi_turn": GSM8kMultiTurnEnv,
    "lcb": LCBEnv,
    "multiply": MultiplyEnv,
    "search": SearchEnv,
    "searchcode": SearchCodeEnv,
    "text2sql": SQLEnv,
}
"""The environments that SkyRL has too."""


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return a section and a row for each environment."""
    write_database(tmp_path / "spider/database/shop/shop.sqlite", "")
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {env_class: ({}, ROW) for env_class in SKYRL}
    rows["text2sql"] = {"db_path": str(tmp_path)}, ROW | {"db_id": "shop", "data": "spider"}
    rows["lcb"] = {}, ROW | {"reward_spec": {"ground_truth": TESTS}}
    return rows


def test_importing_the_package_registers_environments_without_importing_them() -> None:
    code = (
        "import sys, skyrl_gym\n"
        "from skyrl_gym.envs import BUILT_IN\n"
        "print(sorted(BUILT_IN) == sorted(skyrl_gym.registry))\n"
        "print([name for name in sys.modules if name.endswith('.env') or name.startswith('skyrl_gym.adapters')])"
    )
    assert run_python(code).stdout.splitlines() == ["True", "[]"]


@pytest.mark.parametrize("env_class", SKYRL)
def test_constructor_has_skyrl_s_defaults(env_class: str, rows: dict[str, Any]) -> None:
    section, row = rows[env_class]
    with pytest.raises(AssertionError, match="field is required"):
        SKYRL[env_class]()
    for config in (section | {"env_class": env_class}, section):
        SKYRL[env_class](env_config=config, extras=row).close()
    register("mine", SKYRL[env_class])
    skyrl_gym.make("mine", env_config=section, extras=row).close()


@pytest.mark.parametrize("env_class", ["aime", "gsm8k", "gsm8k_multi_turn"])
def test_unavailable_grader_raises_in_the_constructor(env_class: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"{env_class}\.grader=lenient is unknown; use one of .*, math_verify"):
        SKYRL[env_class]({"grader": "lenient"}, ROW)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\./skyrl-gym\[maths\]'"):
        SKYRL[env_class]({"grader": "math_verify"}, ROW)
    SKYRL[env_class]({}, ROW).close()  # other graders do not need it


@pytest.mark.parametrize(
    ("env_class", "reply", "reward", "parsed"),
    [
        ("gsm8k", "6 * 7 = 42\n#### 42", 1.0, {"parsed_answer": "42"}),
        ("gsm8k", "#### 41", 0.0, {"parsed_answer": "41"}),
        ("gsm8k", "42", 0.0, {"parsed_answer": None}),
        ("aime", "6 * 7 = 42\nAnswer: 42", 1.0, {"acc": True, "pred": "42"}),
        ("aime", "Answer: 41", -1.0, {"acc": False, "pred": "41"}),
        ("aime", "42", -1.0, {"acc": False, "pred": "[INVALID]"}),
    ],
)
def test_episodes_of_one_reply(env_class: str, reply: str, reward: float, parsed: dict[str, Any]) -> None:
    prompt = user("What is 6 * 7?")
    with SKYRL[env_class]({}, ROW) as env:
        assert env.init(prompt) == (prompt, {})
        metadata = {**parsed, "undecided": None}
        assert env.step(reply) == {"observations": [], "reward": reward, "done": True, "metadata": metadata}
        assert env.turns == env.max_turns == 1
        failure = "wrong answer" if any(answer == "41" for answer in parsed.values()) else "no answer"
        assert env.get_metrics() == ({} if reward == 1.0 else {"failure": failure})


@pytest.mark.parametrize(
    ("env_class", "reply", "right"),
    [
        ("gsm8k", "It is 42.", {"flexible"}),
        ("gsm8k", "#### 42 then 41", {"strict"}),
        ("aime", "Answer: 42", {"minerva", "math_verify"}),
        ("aime", r"\boxed{42}", {"strict_box", "math_verify"}),
        ("aime", r"Answer: \frac{84}{2}", {"math_verify"}),
    ],
)
def test_the_section_chooses_the_grader(env_class: str, reply: str, right: set[str]) -> None:
    graders = {"gsm8k": ("strict", "flexible"), "aime": ("minerva", "strict_box", "math_verify")}[env_class]
    found = {grader for grader in graders if SKYRL[env_class]({"grader": grader}, ROW).step(reply)["reward"] == 1.0}
    assert found == right


def test_rows_of_aime_may_have_both_fields() -> None:
    both = {"reward_model": {"ground_truth": "42"}, "reward_spec": {"ground_truth": "41"}}
    assert AIMEEnv({}, both).step("Answer: 42")["reward"] == 1.0


@pytest.mark.parametrize("env_class", ["aime", "gsm8k", "gsm8k_multi_turn"])
def test_math_verify_may_grade_and_what_it_cannot_decide_counts_as_wrong(env_class: str) -> None:
    for answer, is_right, undecided in ((r"\frac{84}{2}", True, None), ("1" * 10_000, False, "length")):
        env = SKYRL[env_class]({"grader": "math_verify"}, ROW)
        step = env.step(rf"\boxed{{{answer}}}")
        assert (step["reward"] == 1.0, step["metadata"]["undecided"]) == (is_right, undecided)
        assert step["reward"] in (1.0, 0.0, -1.0)
        assert env.get_metrics()["undecided"] == int(not is_right)


@pytest.mark.parametrize("env_class", SKYRL)
def test_overridden_get_reward_is_honored(env_class: str, rows: dict[str, Any]) -> None:
    base: Any = SKYRL[env_class]

    def replace(self: BaseTextEnv, action: str, done: bool = True) -> float:
        return len(action) / 10

    def extend(self: Any, *args: Any) -> float:
        return base._get_reward(self, *args) + 0.5  # type: ignore[no-any-return]

    def step(kind: Any) -> Any:
        section, row = rows[env_class]
        with kind(section, row | {"max_turns": 1}) as env:
            return env.step("no answer")

    usual, replaced, extended = (
        step(base),
        *(step(type("Mine", (base,), {"_get_reward": method})) for method in (replace, extend)),
    )
    assert (replaced["reward"], replaced["done"]) == (0.9, True)
    assert (extended["reward"], extended["metadata"]) == (usual["reward"] + 0.5, usual["metadata"])


@pytest.mark.parametrize("env_class", ["gsm8k_multi_turn", "multiply", "search", "searchcode", "text2sql"])
def test_overridden_is_done_is_honored(env_class: str, rows: dict[str, Any]) -> None:
    mine: Any = type("Mine", (SKYRL[env_class],), {"_is_done": lambda self, action: "stop" in action})
    section, row = rows[env_class]
    with mine(section, row) as env:
        assert env.step("stop")["done"]
    with mine(section, row | {"max_turns": 1}) as env:
        assert not env.step("<tool>")["done"]


@pytest.mark.parametrize(
    ("env_class", "parsed", "observation"),
    [
        ("search", [None], "<information></information>"),
        ("searchcode", ("PythonCodeExecutorToolGroup", "python", ["print(6 * 7)"]), "42"),
        ("text2sql", ("SQLCodeExecutorToolGroup", "sql", ("shop", "SELECT 6 * 7 AS answer", 1)), "42"),
    ],
)
def test_overridden_parse_action_of_tools_is_honored(
    env_class: str, parsed: Any, observation: str, rows: dict[str, Any]
) -> None:
    mine: Any = type("Mine", (SKYRL[env_class],), {"_parse_action": lambda self, action: parsed})
    section, row = rows[env_class]
    with mine(section, row) as env:
        assert observation in message_text(env.step("<search>anything</search>"))


@pytest.mark.parametrize("env_class", ["gsm8k_multi_turn", "multiply"])
def test_overridden_parse_action_of_answers_is_honored(env_class: str, rows: dict[str, Any]) -> None:
    mine: Any = type("Mine", (SKYRL[env_class],), {"_parse_action": lambda self, action: action.removeprefix("It is ")})
    section, row = rows[env_class]
    with mine(section, row) as env:
        assert env.step("It is 41")["reward"] == 0.0
        output = env.step("It is 42")
    assert (output["reward"], output["done"], output["metadata"]["parsed_answer"]) == (1.0, True, "42")


def test_skyrl_s_names_of_tools() -> None:
    group = SearchToolGroup(search_url="http://localhost:1/retrieve", topk=7, timeout=2)
    assert (group.search_url, group.topk, group.timeout) == ("http://localhost:1/retrieve", 7, 2)
    assert tool(func=str.upper).name == "upper"
    assert Text2SQLEnvConfig().match == "set"
    env = BaseTextEnv()
    env.init_tool_groups()
    assert env.tool_groups == []
