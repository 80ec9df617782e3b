import json
from functools import lru_cache, partial
from typing import Any

import pytest
from train_kit import golden
from train_kit.messages import assistant, system, user
from train_kit.templates import FAMILIES, THINKS
from train_kit.turns import check_replies, check_turns, trained_texts
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.demonstrations import Demonstration
from skyrl_train.dataset.supervised import ConversationEncoder, TokenRow
from skyrl_train.errors import DataError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.rendering.template import ChatTemplate, Messages

HM = {"reasoning_content": "Hm"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@lru_cache
def load(family: str) -> PreTrainedTokenizerBase:
    return FAMILIES[family].tokenizer()


def encode(family: str, messages: Messages, n_context: int = 0, start: Any = None) -> list[TokenRow]:
    tokenizer = load(family)
    end_tokens = {"phi-3.5": ["<|end|>"], "gpt-oss, with tools": ["<|call|>"]}.get(family, [])
    eos_ids = tokenizer.convert_tokens_to_ids(end_tokens)
    encoder = ConversationEncoder(tokenizer, FAMILIES[family].variables, eos_ids)
    copies = [dict(message) for message in messages]
    return encoder.encode(Demonstration("row 0", copies, n_context, reply_start=start))


@pytest.mark.parametrize("before", [[], [system("Be brief.")]], ids=["", "system"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_reply_is_trained_after_the_prompt_of_generation(family: str, before: list[Any]) -> None:
    check_replies(load(family), partial(encode, family), FAMILIES[family].reply, FAMILIES[family].variables, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_rl_and_of_sft_have_the_same_tokens(family: str) -> None:
    check_turns(load(family), partial(encode, family), FAMILIES[family].reply, FAMILIES[family].variables)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt-oss"])
def test_environments_do_not_read_the_end_of_a_turn(family: str) -> None:
    tokenizer, reply = load(family), FAMILIES[family].reply.format("It is 4.")
    token_ids = tokenizer("a" + reply, add_special_tokens=False)["input_ids"]
    encoder = ChatEncoder(tokenizer, template_kwargs=FAMILIES[family].variables)
    assert encoder.decode(token_ids).rstrip().endswith("It is 4.")


@pytest.mark.parametrize("family", ["qwq", "r1-distill", "minimax m2", "qwen3", "smollm3", "deepseek-v3.1, thinking"])
@pytest.mark.parametrize("opening", ["<think>\n", "<think>"])
def test_a_thought_is_trained_even_if_the_template_drops_it_from_past_turns(family: str, opening: str) -> None:
    tokenizer = load(family)
    (row,) = encode(family, [user("2 + 2?"), assistant(f"{opening}2 and 2.\n</think>\n\nIt is 4.")])
    text = str(tokenizer.decode(row.token_ids))
    assert text.count("<think>") == text.count("</think>") == 1
    (trained,) = trained_texts(tokenizer, row)
    assert "2 and 2.\n</think>It is 4." in trained.replace("\n\n", "")


def test_what_the_template_does_not_write_is_refused(pytestconfig: pytest.Config) -> None:
    """A case is a family and the reply to a question."""
    printed = {}
    for case in golden.read("rendering/refusals"):
        family, _, message = case.partition(": ")
        messages = [user("2 + 2?"), json.loads(message)]
        printed[case] = [golden.catch(DataError, partial(encode, family, messages))]
    golden.compare("rendering/refusals", printed, pytestconfig)


STARTS = {
    "chatml": ("Let me see", "2 + 2? ASSISTANTTURN<|im_end|>\n<|im_start|>assistant\nLet me see"),
    "zephyr": ("<think>\nHm", "<|assistant|>\n<think>\nHm"),  # the template knows no thoughts
    "llama 2": ("Let me see", "[/INST] Let me see"),
    "mistral v7": ("The answer is ", "[/INST]The answer is "),
    "r1-distill": ("<think>\nHm", "<｜Assistant｜><think>\nHm"),
    "deepseek-r1": ("It is", "<｜Assistant｜><think>\n\n</think>\n\nIt is"),
    "qwen3.5": ("", "assistant\n<think>\n"),
    "mistral v0.3, with tools": ("It", "[/INST] It"),
    "qwq": ("<think>", "assistant\n<think>\n"),
    "qwen3": ("<think>\nHm", "assistant\n<think>\nHm"),
    "qwen3 without thinking": ("It is", "<think>\n\n</think>\n\nIt is"),
    "gemma": ("A.\n", "model\nA.\n"),
    "gpt-oss": ("It is", "<|start|>assistant<|channel|>final<|message|>It is"),
}


@pytest.mark.parametrize("family", STARTS)
def test_a_reply_that_the_prompt_begins_is_continued(family: str) -> None:
    start, end = STARTS[family]
    template = ChatTemplate(load(family), variables=FAMILIES[family].variables)
    prompt = template.prompt([user("2 + 2? ASSISTANTTURN"), assistant(start)])
    assert prompt.endswith(end)
    assert not start or prompt.count(start.strip()) == 1


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        ({"content": "It "}, "is 4."),
        ({"content": "<think>\nHm"}, ", 4.\n</think>\n\nIt is 4."),
        ({"content": "<think>"}, "Hm.</think>It is 4."),
        ({"content": "<think>\nHm\n</think>\n\nIt"}, " is 4."),
        ({"content": "It is", **HM}, " 4."),
        ({"content": "", **HM}, "It is 4."),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwq", "r1-distill", "deepseek-v3.1, thinking", "qwen3.5", "minimax m2"])
def test_the_rest_of_a_begun_reply_is_trained(family: str, start: dict[str, Any], rest: str) -> None:
    tokenizer, template = load(family), ChatTemplate(load(family), variables=FAMILIES[family].variables)
    question, begun = user("2 + 2?"), {"role": "assistant", **start}
    whole = {**begun, "content": begun["content"] + rest}
    prompt = template.prompt([question, begun])
    (row,) = encode(family, [question, whole], 1, begun)
    assert row.token_ids[: row.loss_mask.index(1)] == template.encode(prompt)
    text = str(tokenizer.decode(row.token_ids))
    assert text == str(tokenizer.decode(encode(family, [question, whole])[0].token_ids))
    assert text.count("<think>") <= text.count("</think>") == 1
    assert "".join(text.split()).count("Hm") == ("Hm" in str(whole))


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].call])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("content", [None, ""])
def test_a_call_is_trained_in_the_form_that_the_template_reads(family: str, arguments: Any, content: Any) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    calling = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "content": "4", "tool_call_id": "call_0"}
    rows = encode(family, [user("2 + 2?"), calling, result, assistant("It is 4.")])
    trained = [text for row in rows for text in trained_texts(load(family), row)]
    assert trained[0] == FAMILIES[family].call
    assert "It is 4." in trained[1]
    encoder = ChatEncoder(load(family), template_kwargs=FAMILIES[family].variables)
    history = encoder.history_ids([user("2 + 2?"), calling, result])
    assert rows[-1].token_ids[: len(history)] == history
    read = encoder.decode(load(family)(trained[0], add_special_tokens=False)["input_ids"])
    assert trained[0] in (read, read + FAMILIES[family].eos), "environments read the special tokens of a call"


@pytest.mark.parametrize("family", ["gpt-oss, with tools", "qwen3.5", "glm-4.5, with tools"])
def test_a_history_has_content_and_a_thought_beside_calls(family: str) -> None:
    messages = [user("2 + 2?"), {**assistant("I add."), **HM, "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]
    assert "I add." in ChatTemplate(load(family)).prompt(messages)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].thought])
def test_a_thought_in_any_field_is_trained(family: str) -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        (row,) = encode(family, [user("2 + 2?"), {**assistant("It is 4."), name: "Hm"}])
        assert trained_texts(load(family), row) == [FAMILIES[family].thought]


@pytest.mark.parametrize(
    ("family", "content", "reply"),
    [
        ("r1-distill", "<think>\n4\n</think>\n\n2+2=4", "4" + THINKS.format("2+2=4")),
        ("qwen3", "<think>\n4\n</think>\n\n2+2=4", "<think>\n4" + THINKS.format("2+2=4")),
        ("qwen3", "<think>\nthink\n</think>\n\n4", "<think>\nthink" + THINKS.format("4")),
        ("r1-distill", "I write </thought> and 4", THINKS.format("I write </thought> and 4")),
        ("qwen3 without thinking", "<reasoning>2+2</reasoning>4", "<reasoning>2+2</reasoning>4"),
        ("chatml", "<think>2+2</think>4", "<think>2+2</think>4"),
        ("qwen3 without thinking", "<think>\n\n</think>\n\n4", "4"),
    ],
)
def test_a_thought_is_what_the_tags_of_the_template_enclose(family: str, content: str, reply: str) -> None:
    (row,) = encode(family, [user("2 + 2?"), assistant(content)])
    (trained,) = trained_texts(load(family), row)
    assert trained.startswith(reply + FAMILIES[family].reply.partition("{}")[2])


@pytest.mark.parametrize("family", ["chatml", "llama 3.1"])
def test_tools_that_the_template_does_not_write_are_refused(family: str) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with pytest.raises(DataError, match="does not write tools"):
        ChatTemplate(load(family)).check_tools([user("2 + 2?")], tools)


def other(role: str) -> dict[str, str]:
    return {"role": role, "content": "Be brief."}


@pytest.mark.parametrize(
    ("family", "messages", "index"),
    [
        ("nemotron nano 2", [other("developer"), user("2 + 2?")], 0),
        ("nemotron nano 2", [other("system"), other("developer"), user("2 + 2?")], 1),
        ("nemotron nano 2", [user("2 + 2?"), assistant("4."), other("ipython")], 2),
        ("nemotron nano 2", [user("2 + 2?"), assistant("4."), other("system"), user("3 + 3?")], 2),
        ("granite 3.3", [other("system"), other("system"), user("2 + 2?")], 1),
    ],
)
def test_a_message_that_the_template_drops_is_refused(family: str, messages: list[Any], index: int) -> None:
    encoder, reason = ChatEncoder(load(family)), f"does not write message {index}, which has the role"
    with pytest.raises(DataError, match=reason):
        encode(family, [*messages, assistant("6.")])
    for render in (encoder.prompt_ids, encoder.history_ids):
        with pytest.raises(DataError, match=reason):
            render(messages)


def test_an_observation_that_the_template_drops_is_refused() -> None:
    encoder = ChatEncoder(load("nemotron nano 2"))
    assert encoder.observation_ids([user("3 + 3?")], 0)
    with pytest.raises(DataError, match="does not write message 2, which has the role 'tool'"):
        encoder.observation_ids([other("tool")], 0)


def test_a_system_message_counts_as_written_even_if_a_later_turn_omits_it() -> None:
    """Mistral's template writes it only before a user message that is the last one."""
    messages = [system("In French."), user("2 + 2?"), {**assistant(""), "tool_calls": [CALL]}, other("tool")]
    template = ChatTemplate(load("mistral v0.3, with tools"))
    assert "In French." not in template.render(messages, adds_header=True)
    template.check_written(messages)


def test_a_prompt_that_ends_with_calls_is_refused() -> None:
    with pytest.raises(DataError, match="message 1, the last one of the prompt, has tool calls without their results"):
        ChatTemplate(load("kimi k2, with tools")).prompt([user("2 + 2?"), {**assistant(""), "tool_calls": [CALL]}])


UNKNOWN_CALLS = {"deepseek-v3", "deepseek-r1", "kimi k2, with tools"}  # here with shorter tags than the published ones


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].call])
def test_the_style_of_calls(family: str) -> None:
    style = ChatTemplate(load(family), variables=FAMILIES[family].variables).find_call_style([])
    assert style is (None if family in UNKNOWN_CALLS else family == "llama 3.1")
