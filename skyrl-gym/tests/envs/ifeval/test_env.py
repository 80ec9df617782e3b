import importlib.util
import json
from typing import Any

import numpy as np
import pytest

from skyrl_gym.envs.ifeval.dataset import ifeval_row
from skyrl_gym.envs.ifeval.env import IFEvalEnv

NTH = {"nth_paragraph": 3, "first_word": "a"}
WORDS = {"num_words": 3, "relation": "at least"}
RAW = {
    "key": 1000,
    "prompt": "Write at least three words. Do not use commas.",
    "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
    "kwargs": [WORDS | {"keywords": None}, {"num_words": None, "relation": None, "keywords": None}],
}


def row(*instructions: tuple[Any, Any]) -> dict[str, Any]:
    ids, kwargs = zip(*instructions, strict=True)
    return {"reward_spec": {"ground_truth": {"instruction_id_list": list(ids), "kwargs": list(kwargs)}}}


@pytest.mark.parametrize(
    ("reply", "settings", "reward"),
    [
        ("one two three", {}, 1.0),
        ("one, two", {"reward": "fraction"}, 0.0),
        ("one, two three", {"reward": "fraction"}, 0.5),
        ("one, two three", {"reward": "all"}, 0.0),
        ("Sure, here:\none two three", {}, 0.0),
        ("Sure, here:\none two three", {"loose": True}, 1.0),
        ("one, two three", {"reward": "fraction", "loose": True}, 0.5),
        ("<think>one, two</think>one two three", {}, 1.0),
        ("<think>one two three", {}, 0.0),
        ("\u200b", {"reward": "fraction"}, 0.0),
    ],
)
def test_rewards(reply: str, settings: dict[str, Any], reward: float) -> None:
    with IFEvalEnv(settings, ifeval_row(RAW)) as env:
        step = env.step(reply)
    assert (step["reward"], step["done"], step["observations"]) == (reward, True, [])


def test_metrics() -> None:
    env, other = IFEvalEnv({}, ifeval_row(RAW)), IFEvalEnv({}, row(("punctuation:no_comma", None)))
    assert env.get_metrics() == {}
    metadata = env.step("Sure, here:\none two three")["metadata"]
    assert metadata == {"strict": [True, False], "loose": [True, True]}
    other.step("one")
    assert env.get_metrics()["failure"] == "violated punctuation:no_comma"
    assert IFEvalEnv.aggregate_metrics([env.get_metrics(), other.get_metrics()]) == {
        "strict_all": 0.5,
        "strict_fraction": pytest.approx(2 / 3),  # of all instructions, as in the paper
        "loose_all": 1.0,
        "loose_fraction": 1.0,
        "n_instructions": 1.5,
    }


def test_rows_of_the_hub() -> None:
    converted = ifeval_row(RAW)
    truth = {"instruction_id_list": RAW["instruction_id_list"], "kwargs": [WORDS, {}]}
    assert json.loads(converted.pop("reward_spec")["ground_truth"]) == truth
    prompt = [{"role": "user", "content": RAW["prompt"]}]
    assert converted == {"data_source": "google/IFEval", "prompt": prompt, "env_class": "ifeval"}


def test_aliases_of_languages() -> None:
    env = IFEvalEnv({}, row(("language:response_language", {"language": "zh-CN"})))
    assert env.instructions[0].kwargs == {"language": "zh"}


def test_kwargs_as_pandas_reads_them() -> None:
    kwargs = {"num_words": 3.0, "relation": "at least", "frequency": float("nan"), "keywords": None}
    truth = {"instruction_id_list": np.array(["length_constraints:number_words"]), "kwargs": np.array([kwargs])}
    env = IFEvalEnv({}, {"reward_spec": {"ground_truth": truth}})
    assert env.instructions[0].kwargs == WORDS


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (("punctuation:no_coma", {}), r"unknown id 'punctuation:no_coma'\. Did you mean 'punctuation:no_comma'\?"),
        ((7, {}), r"unknown id 7\. The ids are: keywords:existence, "),
        (("punctuation:no_comma", {"num": 1}), r"kwargs\[0\]\.num=1 is unknown; the kwargs of \S+ are: none"),
        (("punctuation:no_comma", [1]), r"kwargs\[0\]=\[1\] of punctuation:no_comma must be a dict"),
        (("keywords:existence", {}), r"kwargs\[0\]\.keywords is missing; the kwargs of \S+ are: keywords"),
        (("keywords:existence", {"keywords": "a"}), r"keywords='a' of keywords:existence: should be a valid list"),
        (("keywords:existence", {"keywords": ["a", "\u200b"]}), r"keywords\.1='\\u200b' .* must not be blank"),
        (
            ("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": "less than"}),
            r"letter='ab' of keywords:letter_frequency: must be a single character",
        ),
        (("length_constraints:number_words", WORDS | {"num_words": 2.5}), r"num_words=2\.5 .* valid integer"),
        (("length_constraints:number_words", WORDS | {"num_words": "3"}), r"num_words='3' .* valid integer"),
        (("length_constraints:number_words", WORDS | {"num_words": 0}), r"num_words=0 .* greater than or equal to 1"),
        (("length_constraints:number_words", WORDS | {"relation": "at most"}), r"'at most' .* 'at least' or"),
        (("language:response_language", {"language": "en-GB"}), r"language='en-GB' .*: should be one of af, ar, .*"),
        (
            ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2} | NTH),
            r"nth_paragraph=3 of \S+ must be at most num_paragraphs=2",
        ),
    ],
)  # fmt: skip
def test_invalid_instructions_are_rejected(instruction: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IFEvalEnv({}, row(instruction))


@pytest.mark.parametrize("truth", ["{", "[]", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}])
def test_invalid_ground_truth_is_rejected(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"^ground_truth=.* (?:not JSON|must be \{'instruction_id_list')"):
        IFEvalEnv({}, {"reward_spec": {"ground_truth": truth}})


@pytest.mark.parametrize(("setting", "message"), [({"reward": "any"}, "reward='any'"), ({"lose": True}, "mean loose")])
def test_invalid_settings_are_rejected(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IFEvalEnv(setting, ifeval_row(RAW))


def test_only_instructions_about_languages_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    IFEvalEnv({}, ifeval_row(RAW))
    with pytest.raises(ModuleNotFoundError, match=r"languages need the package py3langid: .*skyrl-gym\[ifeval\]"):
        IFEvalEnv({}, row(("change_case:english_capital", {})))
