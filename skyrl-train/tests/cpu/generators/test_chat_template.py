"""Conversations joined turn by turn equal the chat template applied to the whole, token for token."""

import copy
import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.messages import assistant, render_prompt, system, user
from train_kit.templates import FAMILIES
from transformers import PreTrainedTokenizerBase

from skyrl_train.entrypoints.tiny import CHAT_TEMPLATE as CHATML
from skyrl_train.errors import ConfigError
from skyrl_train.generators import chat_template
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.rendering.template import ChatTemplate, Messages
from skyrl_train.types import Message

load = functools.cache(lambda name: FAMILIES[name].tokenizer())

contents = st.text("ab1 \n", max_size=12)
WITH_SYSTEM = ("chatml", "qwen2.5", "llama 3")
replies = contents.map(str.strip).filter(bool)  # templates that trim would change other replies


@pytest.mark.parametrize("ends_with_eos", [True, False], ids=["ended with EOS", "truncated"])
@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "qwen3", "llama 3", "gemma 3", "mistral v7"])
@settings(max_examples=20)
@given(question=contents, turns=st.lists(st.tuples(replies, contents), min_size=1, max_size=3))
def test_joined_turns_equal_the_rendered_conversation(
    name: str, ends_with_eos: bool, question: str, turns: list[tuple[str, str]]
) -> None:
    tokenizer = load(name)
    chat = ChatEncoder(tokenizer)
    messages = [system("You play.")] if name in WITH_SYSTEM else []
    messages += [user(question)]
    token_ids = chat.prompt_ids(messages)
    assert token_ids == render_prompt(tokenizer, messages)
    for reply, observation in turns:
        token_ids += tokenizer(reply, add_special_tokens=False)["input_ids"]
        token_ids += [tokenizer.eos_token_id] if ends_with_eos else []
        token_ids += chat.observation_ids([user(observation)], token_ids[-1])
        messages += [assistant(reply), user(observation)]
        assert token_ids == render_prompt(tokenizer, messages)


@pytest.mark.parametrize("observations", [[], [user("a"), user("b")], [Message(role="tool", content="4")]])
def test_any_number_of_observations(tiny_tokenizer: PreTrainedTokenizerBase, observations: list[Message]) -> None:
    chat = ChatEncoder(tiny_tokenizer)
    reply = tiny_tokenizer("L", add_special_tokens=False)["input_ids"]
    token_ids = [*chat.prompt_ids([user("?")]), *reply, *chat.observation_ids(observations, reply[-1])]
    assert token_ids == render_prompt(tiny_tokenizer, [user("?"), assistant("L"), *observations])


def test_an_eos_token_after_a_space_is_not_doubled() -> None:
    tokenizer = FAMILIES["mistral v7"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("}}</s>", "}} </s>")
    chat = ChatEncoder(tokenizer)
    assert chat.decode_all(chat.observation_ids([user("b")], tokenizer.eos_token_id)) == "[INST]b[/INST]"
    assert chat.decode_all(chat.observation_ids([user("b")], -1)) == " </s>[INST]b[/INST]"


@pytest.mark.parametrize("content", ["<|im_end|>", "L", "\n"])
def test_the_text_of_an_observation_does_not_end_the_turn(
    tiny_tokenizer: PreTrainedTokenizerBase, content: str
) -> None:
    """The last sampled token may also occur in the observation."""
    chat = ChatEncoder(tiny_tokenizer)
    for token_id in tiny_tokenizer(content + "L\n", add_special_tokens=False)["input_ids"]:
        joined = chat.decode_all([token_id, *chat.observation_ids([user(content)], token_id)])
        turn_end = "" if token_id == tiny_tokenizer.eos_token_id else "<|im_end|>"
        sampled = tiny_tokenizer.decode([token_id])
        assert joined == f"{sampled}{turn_end}\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_other_keys_of_an_observation_are_passed_to_the_template(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = CHATML.replace("message['content']", "message.get('name', '') + message['content']")
    chat = ChatEncoder(tokenizer)
    named, plain = ({"role": "tool", "content": "4", **extra} for extra in ({"name": "add"}, {}))
    assert "tool\nadd4<" in chat.decode_all(chat.observation_ids([named], -1))
    assert "tool\n4<" in chat.decode_all(chat.observation_ids([plain], -1))


def test_returned_token_ids_are_copies(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    chat = ChatEncoder(tiny_tokenizer)
    first = chat.observation_ids([user("a")], -1)
    expected = list(first)
    first.clear()
    assert chat.observation_ids([user("a")], -1) == expected


def test_the_cache_limits_its_tokens(tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []

    def render(template: ChatTemplate, messages: Messages) -> str:
        rendered.append(messages[-1]["content"])
        return prompt(template, messages)

    prompt = ChatTemplate.prompt
    monkeypatch.setattr(ChatTemplate, "prompt", render)
    chat = ChatEncoder(tiny_tokenizer)
    n_tokens = len(chat.prompt_ids([user("a")]))
    monkeypatch.setattr(chat_template, "CACHED_TOKENS", 2 * n_tokens)
    rendered.clear()
    for content in "aabacba":  # c evicts b, because a was used more recently
        assert chat.prompt_ids([user(content)]) == render_prompt(tiny_tokenizer, [user(content)])
    assert rendered == ["b", "c", "b", "a"]


def test_a_template_that_hides_assistant_turns_is_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="does not show the text of assistant messages"):
        ChatEncoder(tokenizer).observation_ids([user("a")], -1)


def test_arguments_of_earlier_tool_calls_are_rendered_as_objects(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    encoder = ChatEncoder(tokenizer)
    texts = []
    for arguments in ({"at": "ball"}, '{"at": "ball"}'):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        texts.append(encoder.decode_all(encoder.history_ids([message])))
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert texts[0] == texts[1]
    assert '"arguments": {"at": "ball"}' in texts[0]
