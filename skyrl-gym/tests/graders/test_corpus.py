"""Answers in unusual and in tempting forms, with the score that each grader must give them and the reason.

Each YAML file has the answers to one grader, in groups: the ground truth, the score, the reason, the answers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_kit.databases import write_database
from gym_kit.games import HEX, POKER, TAKEN_HEX
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_gym import maths, queries
from skyrl_gym.adapters.mcp import _reward
from skyrl_gym.envs.aime.env import AIMEEnv
from skyrl_gym.envs.aime.grading import normalize_answer
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.gsm8k.env import GSM8kEnv
from skyrl_gym.envs.gsm8k.grading import extract_solution
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv
from skyrl_gym.envs.lcb.env import LCBEnv
from skyrl_gym.envs.lcb.grading import extract_code, is_same_output
from skyrl_gym.envs.multiply.env import MultiplyEnv
from skyrl_gym.envs.openspiel.answers import parse_answer
from skyrl_gym.envs.openspiel.moves import LegalMoves
from skyrl_gym.envs.search.env import SearchEnv
from skyrl_gym.envs.searchcode.env import SearchCodeEnv
from skyrl_gym.envs.sql.grading import Match, compute_score, has_order
from skyrl_gym.tools.calls import strip_thoughts

FOLDER = Path(__file__).parent
SUMS = [{"input": f"{a}\n{b}\n", "output": str(a + b), "testtype": "stdin"} for a, b in ((1, 2), (-3, 3))]
CALLS = [
    {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional", "metadata": {"func_name": "add"}},
    {"input": "[]\n1", "output": "[]", "testtype": "functional", "metadata": '{"func_name": "add"}'},
]

Score = Callable[[Any, Any], float | None]


@pytest.fixture(scope="module", autouse=True)
def workers_end_with_this_module() -> Iterator[None]:
    yield
    maths.close()
    queries.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_database(
        tmp_path_factory.mktemp("shop") / "shop.sqlite",
        "CREATE TABLE goods (name TEXT, price REAL); CREATE TABLE shops (town TEXT);"
        "INSERT INTO goods VALUES ('pen', 1.5), ('pen', 1.5), ('ink', 4.0), ('tack', 0.1);"
        "INSERT INTO shops VALUES ('Bern'), ('Rome');"
        "CREATE TABLE stores (name TEXT); INSERT INTO stores VALUES ('s0'), ('s1'), ('s2');"
        "CREATE TABLE boxes (store TEXT, value REAL, note TEXT);"
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 39) INSERT INTO boxes"
        " SELECT 's' || (i % 3), 0.1 * (i + 1) * (CASE i % 2 WHEN 0 THEN 1 ELSE -1 END) + 100 + i / 3.0,"
        " CASE i % 4 WHEN 0 THEN NULL WHEN 1 THEN '' ELSE 'Zürich' END FROM n;",
    )


GROUPS = [
    (file.stem, group)
    for file in sorted(FOLDER.glob("*.yaml"))
    for group in yaml.safe_load(file.read_text(encoding="utf-8"))
]
CASES = [
    pytest.param(grader, group["gold"], answer, group["score"], id=f"{grader}-{answer!r:.60}-{group['gold']!r:.20}")
    for grader, group in GROUPS
    for answer in group["answers"]
]


def play(env: BaseTextEnv, replies: Any) -> float:
    """Return the total reward of an episode with these replies, or with the first of them until it is done."""
    total = 0.0
    with env:
        for reply in [replies] if isinstance(replies, str) else replies:
            output = env.step(reply)
            total += output["reward"] or 0.0
            if output["done"]:
                break
    return total


def row(gold: Any, field: str = "reward_spec") -> dict[str, Any]:
    return {field: {"ground_truth": gold}, "max_turns": 1}


def is_read(legal: LegalMoves, reply: str, move: str) -> float:
    parsed = parse_answer(reply, legal).move
    return float((parsed.text if parsed is not None else "none") == move)


def score_mcp(name: str, reply: str, gold: list[str]) -> float | None:
    extras = {"reward_spec": {"ground_truth": gold}}
    return _reward(name, extras)(strip_thoughts(reply).strip(), extras)


SCORES: dict[str, Score] = {
    "aime_minerva": lambda reply, gold: play(AIMEEnv(None, row(gold, "reward_model")), reply),
    "aime_strict_box": lambda reply, gold: play(AIMEEnv({"grader": "strict_box"}, row(gold, "reward_model")), reply),
    "gsm8k_flexible": lambda reply, gold: play(GSM8kEnv({"grader": "flexible"}, row(gold)), reply),
    "gsm8k_multi_turn": lambda replies, gold: play(GSM8kMultiTurnEnv(None, row(gold) | {"max_turns": 5}), replies),
    "gsm8k_strict": lambda reply, gold: play(GSM8kEnv(None, row(gold)), reply),
    "lcb": lambda code, _: play(LCBEnv({"timeout": 5.0}, row(SUMS)), f"```python\n{code}\n```"),
    "lcb_functional": lambda code, _: play(LCBEnv({"timeout": 5.0}, row(CALLS)), f"```python\n{code}\n```"),
    "lcb_output": lambda printed, expected: float(is_same_output(printed, expected)),
    "lcb_reply": lambda reply, output: play(LCBEnv(None, row([{"input": "", "output": output}])), reply),
    "math_reply": lambda reply, gold: play(GSM8kEnv({"grader": "math_verify"}, row(gold)), reply),
    "math_verify": lambda answer, gold: float(maths.verify(answer, gold).is_correct),
    "mcp_contains": lambda reply, gold: score_mcp("contains", reply, gold),
    "mcp_exact": lambda reply, gold: score_mcp("exact", reply, gold),
    "multiply": lambda reply, gold: play(MultiplyEnv(None, row(gold)), reply),
    "openspiel": lambda reply, move: is_read(HEX, reply, move),
    "openspiel_taken": lambda reply, move: is_read(TAKEN_HEX, reply, move),
    "openspiel_poker": lambda reply, move: is_read(POKER, reply, move),
    "search": lambda reply, gold: play(SearchEnv(None, row({"target": gold})), reply),
    "searchcode": lambda reply, gold: play(SearchCodeEnv(None, row(gold)), reply),
}


@pytest.mark.parametrize(("grader", "gold", "answer", "score"), CASES)
def test_score(grader: str, gold: Any, answer: Any, score: float, shop: Path) -> None:
    if grader in ("text2sql", "text2sql_exact"):
        match: Match = "exact" if grader == "text2sql_exact" else "set"
        assert compute_score(f"<think>x</think><solution>{answer}</solution>", gold, shop, match) == score
    elif grader == "text2sql_format":
        assert compute_score(answer, gold, shop) == score
    else:
        assert SCORES[grader](answer, gold) == score


PARSERS: dict[str, Callable[[str], Any]] = {
    "aime.normalize_answer": normalize_answer,
    "gsm8k.flexible": partial(extract_solution, method="flexible"),
    "gsm8k.strict": extract_solution,
    "lcb.extract_code": extract_code,
    "maths.final_answer": maths.final_answer,
    "maths.last_boxed": maths.last_boxed,
    "sql.has_order": has_order,
}
PARSED: dict[str, dict[Any, list[str]]] = yaml.safe_load((FOLDER / "parsed/texts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("parser", PARSED)
def test_what_is_read_in_texts(parser: str) -> None:
    for expected, texts in PARSED[parser].items():
        assert {text: PARSERS[parser](text) for text in texts} == dict.fromkeys(texts, expected)


ATTEMPTS = {
    "aime_minerva": ("Answer: {}", -1),
    "aime_strict_box": (r"\boxed{{{}}}", -1),
    "gsm8k_flexible": ("= {}", -1),
    "gsm8k_strict": ("#### {}", 0),
    "math_reply": (r"\boxed{{{}}}", -1),
    "multiply": (r"\boxed{{{}}}", 0),
    "search": ("<answer>{}</answer>", -1),
    "searchcode": ("<solution>#### {}</solution>", -1),
    "text2sql_format": ("<think>x</think><solution>SELECT {}</solution>", -1),
}
"""How an attempt is written for each grader, and which of several attempts counts: the first or the last."""
HEDGES = (" or ", ", ", " and ", " ", "; ", "/", " = ", "-")


def score_of(grader: str, reply: str, shop: Path) -> float:
    if grader == "text2sql_format":
        return compute_score(reply, "SELECT 42", shop)
    score = SCORES[grader](reply, ["42"] if grader == "search" else "42")
    assert score is not None
    return score


@pytest.mark.parametrize("grader", ATTEMPTS)
@settings(max_examples=8, deadline=None)
@given(
    attempts=st.lists(st.sampled_from(["42", "41", "4", "2"]), min_size=1, max_size=4),
    texts=st.lists(st.text(alphabet="abc ,.\n", max_size=20), min_size=5, max_size=5),
)
def test_more_attempts_and_more_text_never_raise_the_score(
    grader: str, attempts: list[str], texts: list[str], shop: Path
) -> None:
    form, position = ATTEMPTS[grader]
    reply = texts[0] + "".join(
        f"{form.format(tried)}\n{text}" for tried, text in zip(attempts, texts[1:], strict=False)
    )
    assert score_of(grader, reply, shop) <= score_of(grader, form.format(attempts[position]), shop)


@pytest.mark.parametrize("grader", sorted(ATTEMPTS.keys() - {"gsm8k_flexible"}))  # reads the last of any numbers
@settings(max_examples=8, deadline=None)
@given(
    wrong=st.lists(st.sampled_from(["41", "7", "100"]), min_size=1, max_size=3),
    place=st.integers(0, 3),
    hedge=st.sampled_from(HEDGES),
)
def test_right_number_among_others_in_one_answer_is_wrong(
    grader: str, wrong: list[str], place: int, hedge: str, shop: Path
) -> None:
    answers = [*wrong[:place], "42", *wrong[place:]]
    form = ATTEMPTS[grader][0]
    if answers[0] != "42" or hedge != " = " or grader not in ("gsm8k_strict", "searchcode"):  # 42 = 6 * 7 is fine
        assert score_of(grader, form.format(hedge.join(answers)), shop) <= score_of(grader, form.format("41"), shop)


@given(st.lists(st.sampled_from(["#### 41", "#### 42", "#### 4,2", "no idea", ""]), min_size=1, max_size=5))
def test_episode_earns_no_more_than_its_last_reply(replies: list[str]) -> None:
    extras = {"reward_spec": {"ground_truth": "42"}, "max_turns": len(replies)}
    last = play(GSM8kMultiTurnEnv(None, extras | {"max_turns": 1}), replies[-1])
    assert play(GSM8kMultiTurnEnv(None, extras), replies) == (1.0 if "#### 42" in replies else last)


@given(
    st.lists(st.sampled_from(["Paris", "Rome", "Oslo", "Bern", "New York"]), min_size=3, unique=True),
    st.sampled_from([", ", "; ", "\n", "/"]),
)
def test_list_of_answers_is_not_a_mention(items: list[str], separator: str) -> None:
    assert score_mcp("contains", separator.join(items), ["Paris"]) == 0.0


def test_every_group_has_a_reason() -> None:
    assert all(group["reason"] and group["answers"] and group["score"] in (-1, 0, 0.2, 1) for _, group in GROUPS)
    assert len(CASES) >= 500
