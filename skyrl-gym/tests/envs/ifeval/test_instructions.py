from typing import Any

import pytest
from gym_kit.texts import linear_time, long_text

from skyrl_gym.envs.ifeval.instructions import CHECKS, Instruction, check_loose, check_strict, parse_instructions

GERMAN = "Der Zug nach Bern fährt heute leider später ab, weil ein Baum auf den Gleisen liegt. "
ENGLISH = "the train to bern leaves late today because a tree has fallen on the tracks. "
HINDI = "मैं घर जा रहा हूँ और खाना खाऊँगा"
SHOPS = {"relation": "at least", "keyword": "shop", "frequency": 2}
PARAGRAPH = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"}

TABLE: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["art", "in Bern"]}, ["_Art_ in\nBern!"], ["a party in Bern", "art"]),
    ("keywords:existence", {"keywords": ["घर"]}, [HINDI], ["घरों में"]),
    ("keywords:existence", {"keywords": ["苹果", "café"]}, ["我喜欢苹果。Cafe\u0301"], ["果", ""]),
    ("keywords:frequency", SHOPS, ["Shop, shop!"], ["shop shopping", "shop"]),
    ("keywords:frequency", SHOPS | {"relation": "less than"}, ["a shop"], ["SHOP shop"]),
    ("keywords:forbidden_words", {"forbidden_words": ["bad", "C++"]}, ["badly"], ["b\u200bad", "ＢＡＤ", "in c++", ""]),
    ("keywords:letter_frequency", {"letter": "L", "let_frequency": 3, "let_relation": "at least"}, ["LlL"], ["Ll"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": "less than"}, ["a"], ["#a"]),
    ("language:response_language", {"language": "hi"},
     [HINDI * 3], [ENGLISH, HINDI + ENGLISH * 20, "म घर जाँदैछु र खाना खान्छु", "x", "1"]),
    ("language:response_language", {"language": "de"},
     [GERMAN * 30, GERMAN + "\n```python\n" + "print()\n" * 99], [ENGLISH, GERMAN * 30 + ENGLISH * 30]),
    ("language:response_language", {"language": "da"}, ["Hun spiser et eple hver dag"], ["Jag bor i Sverige"]),
    ("language:response_language", {"language": "sl"}, ["Vlak danes zamuja."], ["To je dobar dan"]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     ["Hi. Go! Why?", "1. Hi\n2. Go\n3. Why", "日本。中国。韓国。", "So do I. Now go... “Why?”"],
     ["Mr. J. Doe pays 3.50, e.g. today. Fine.", ". . . ! ?", "One line,\nand the next. End"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["Hi"], ["Hi\n\nGo"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n\n***\nb ***", "a *** b"], ["a\n\nb", "a *** ! *** b", "***a*** b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"},
     ["don't well-known", "है हिंदी में", "日本人"], ["a -- b", "है हिंदी"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"},
     ["one two", "don't go"], ["a/b/c", ""]),
    ("length_constraints:nth_paragraph_first_word", PARAGRAPH,
     ["a\n \n**weekend** b", 'a\n\n"Weekend'],
     ["a\n\nweekends", "a\n\nA weekend", "a\nweekend", "weekend\n\na", ".\n\na\n\nweekend"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name], [your address]", "```\n[name] [[city]]\n```"],
     ["[name]", "[ ] [x] [1]", "a[i] b[j]", "[a](b) [c](d)", "```python\n[a] [b]\n```", r"\[ x \] \[ y \]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["Bye\n**p. s.** call"], ["P.S. only", "Bye. P.S.", "Bye. P.P.S. call"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye P.P.S. call"], ["Bye P.S. call"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n  - b", "- a\n---\n* b\n*c*"], ["* a", "* a\n* b\n* c", "• a\n• b", "```sh\n- a\n- b\n```", "* \n- !"]),
    ("detectable_format:constrained_response", {},
     ["Well. My answer is no."], ["My answer is yes. My answer is no.", "No.", "my answer is no."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and **b c**", "***a*** *b*"], ["*a*", "* a\n* b\n* c", "**** *!* **a**", "*a\n* *b*"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["**SECTION 1**\na\n## Section 2: b"],
     ["Section 1\nSection 2\na", "In Section 1 and Section 2", "Section 1 a\nSection 1 b", "Section 1"]),
    ("detectable_format:json_format", {},
     ['{"a": [1]}', '```json\n[{"a": 1}]\n```', "```\n{}\n```"],
     ['{"a": NaN}', '"text"', "5", 'So: {"a": 1}', "{'a': 1}", "```python\n[]\n```", "[" * 9999]),
    ("detectable_format:title", {},
     ["<<poem of joy>>\na"], ["<title>", "<< >>", "<<a\nb>>", "```cpp\ncout << x >> y;\n```"]),
    ("combination:two_responses", {},
     ["a\n******\nb", "a *******\n\nb\n******"], ["a", "a ****** A!", "a *** b", "a ****** b ****** c", "a ******"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say  hi. "},
     ["say hi.\nHi"], ["Say hi.", "Sure: Say hi. Hi", "Say hello. Hi"]),
    ("startend:end_checker", {"end_phrase": "be well."},
     ["So be well.", '"Now **Be\nwell.**"'], ["Be well. Bye.", "maybe well.", "be well"]),
    ("startend:end_checker", {"end_phrase": '"Bye!"'}, ['Well, "bye!"'], ["Bye? No."]),
    ("startend:quotation", {}, ['"a"', "“a”"], ['"a', "'a'", '""', '"', 'a "b"']),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["I AM not"], ["AM Not 12", "É"]),
    ("change_case:english_capital", {}, [ENGLISH.upper(), "YES, 1"], [ENGLISH, "1", GERMAN.upper()]),
    ("change_case:english_lowercase", {}, [ENGLISH, "acme™"], [ENGLISH + "É", "1", GERMAN.lower()]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b", "a、b", "a，b", "a، b", "a‚ b", " \u200b"]),
]  # fmt: skip


def follows(id: str, kwargs: dict[str, Any], reply: str) -> bool:
    (is_followed,) = check_strict(parse_instructions({"instruction_id_list": [id], "kwargs": [kwargs]}), reply)
    return is_followed


def test_the_table_has_every_instruction() -> None:
    assert {id for id, *_ in TABLE} == set(CHECKS)
    assert len(CHECKS) == 25


@pytest.mark.parametrize(("id", "kwargs", "right", "wrong"), TABLE)
def test_instructions(id: str, kwargs: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert {reply: follows(id, kwargs, reply) for reply in right} == dict.fromkeys(right, True)
    assert {reply: follows(id, kwargs, reply) for reply in wrong} == dict.fromkeys(wrong, False)


@pytest.mark.parametrize("reply", ["Sure:\n\na b", "a b\nBye, then", "Sure, yes:\na b\nBye", "*a b*", "Sure:\n*a* b"])
def test_loose_variants(reply: str) -> None:
    repeat = Instruction("combination:repeat_prompt", {"prompt_to_repeat": "a"})
    commas = Instruction("length_constraints:number_words", {"num_words": 3, "relation": "less than"})
    instructions = [repeat, commas]
    strict = check_strict(instructions, reply)
    assert not all(strict)
    assert check_loose(instructions, reply, strict) == [True, True]


def test_a_loose_variant_is_not_empty() -> None:
    instruction = Instruction("punctuation:no_comma", {})
    assert check_loose([instruction], "a, b", [False]) == [False]


@pytest.mark.parametrize(
    "unit", [" ", "\n", ".", "a. ", "[", "[a", "<<a", "*", "*a", "```py\n", "\u0315\u0300", "a'", "हिं", "p.s. ", "！)"]
)
def test_checks_are_linear(unit: str) -> None:
    instructions = parse_instructions(
        {"instruction_id_list": [id for id, *_ in TABLE], "kwargs": [kwargs for _, kwargs, *_ in TABLE]}
    )
    with linear_time():
        check_strict(instructions, f"x {long_text(unit)} y")
