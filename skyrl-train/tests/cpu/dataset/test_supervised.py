import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_kit import golden
from train_kit.datasets import read_demonstrations, write_rows
from train_kit.messages import assistant, user
from train_kit.vision_models import draw
from transformers import AutoProcessor, PreTrainedTokenizerBase

from skyrl_gym.images import EncodedImage, read_image
from skyrl_train.config.supervised import PreferenceDataConfig, SFTDataConfig
from skyrl_train.dataset.demonstrations import Demonstration
from skyrl_train.dataset.files import JoinedRows
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.supervised import ConversationEncoder, SupervisedDataset, TokenRow, build_supervised_batch
from skyrl_train.errors import DataError, InvalidRow, SkippedRow
from skyrl_train.media.spans import ImageSpan
from skyrl_train.types import DrawnPrompt

WITHOUT_EOS = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)
WITHOUT_ROLES = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
OTHER_HEADER = (
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}Bot:{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], template: str | None = None, **others: Any
) -> list[tuple[str, list[str]]]:
    """Return the text of each row of a conversation, and its trained stretches."""
    kwargs = {} if template is None else {"chat_template": template}
    rows = ConversationEncoder(tokenizer, kwargs).encode(
        Demonstration("row 0", messages, others.get("n_context", 0), others.get("tools"))
    )
    shown = []
    for row in rows:
        stretches, is_open = [], False
        for token, trained in zip(row.token_ids, row.loss_mask, strict=True):
            if trained and not is_open:
                stretches.append([])
            if trained:
                stretches[-1].append(token)
            is_open = bool(trained)
        shown.append((tokenizer.decode(row.token_ids), [tokenizer.decode(part) for part in stretches]))
    return shown


@pytest.mark.catch_tokenizer
def test_a_prompt_and_a_response_train_the_response_and_its_eos_token(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_rows(tmp_path, [{"prompt": "2 + 2?", "response": "It is 4.", "extra": 7}])
    dataset = SupervisedDataset([path], ConversationEncoder(tiny_tokenizer), SFTDataConfig())
    ((segment,),) = dataset[0]
    assert tiny_tokenizer.decode(segment.prompt_ids) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(segment.response_ids) == "It is 4.<|im_end|>"
    assert segment.loss_mask == [1] * len(segment.response_ids)
    batch = build_supervised_batch([DrawnPrompt(0, dataset[0], 0)], tiny_tokenizer.pad_token_id)
    labels = batch.sequences[:, -batch.response_length :][batch.loss_mask.bool()]
    assert labels[-1] == tiny_tokenizer.eos_token_id
    assert batch.sequences[0].tolist() == segment.token_ids


@pytest.mark.parametrize(
    ("row", "n_context"),
    [
        ({"prompt": [user("a"), assistant("b"), user("c")], "response": "d"}, 3),
        ({"messages": [assistant("Hi"), user("a"), assistant("d")]}, 1),
    ],
    ids=["a prompt", "a greeting"],
)
def test_assistant_messages_of_a_prompt_and_greetings_are_context(
    row: dict[str, Any], n_context: int, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ((demonstration,),) = read_demonstrations(write_rows(tmp_path, [row]), SFTDataConfig())
    assert demonstration.n_context == n_context
    ((_, trained),) = encode(tiny_tokenizer, demonstration.messages, n_context=n_context)
    assert trained == ["d<|im_end|>"]


def test_a_template_without_eos_gets_one_after_the_content(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    rows = encode(tiny_tokenizer, messages, WITHOUT_EOS)
    assert [trained for _, trained in rows] == [["b<|im_end|>"], ["d<|im_end|>"]]
    assert rows[1][0] == "### user: a\n\n### assistant: b\n\n### user: c\n\n### assistant: d<|im_end|>"


def test_tool_calls_are_trained_and_results_are_not(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [user("1 + 1?"), calling(call), {"role": "tool", "content": "2"}, assistant("Two.")]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    ((text, trained),) = encode(tiny_tokenizer, messages, WITH_TOOLS, tools=tools)
    assert text.startswith("tools: [")
    assert [part[:11] for part in trained] == ["<tool_call>", "Two.<|im_en"]
    with pytest.raises(DataError, match=r"row 0: the chat template does not write the tool calls of message 1"):
        encode(tiny_tokenizer, messages)


def test_without_eos_calls_after_the_content_and_its_blanks_are_kept(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    messages = [user("1 + 1?"), {"role": "assistant", "content": "So: ", "tool_calls": [call]}]
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.name }}{{ c.arguments | tojson }}{% endfor %}\n\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ((_, trained),) = encode(tiny_tokenizer, messages, template)
    assert trained == ['So: add{"a": 1}<|im_end|>']
    ((_, trained),) = encode(tiny_tokenizer, [messages[0], assistant("b\n")], template)
    assert trained == ["b\n<|im_end|>"]


@pytest.mark.parametrize(
    ("answer", "template", "tools", "message"),
    [
        ("b", OTHER_HEADER, None, "cannot be separated from the prompt"),
        ("b<|im_end|>", None, None, r"message 1 contains <\|im_end\|>, the end of a turn, as text; remove it"),
        ("b", None, [{"type": "function", "function": {"name": "f"}}], "row 0: the chat template does not write tools"),
    ],
)
def test_an_answer_that_the_template_would_change_is_refused(
    answer: str, template: str | None, tools: Any, message: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=message):
        encode(tiny_tokenizer, [user("a"), assistant(answer)], template, tools=tools)


def test_a_row_never_trains_its_first_token(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
    (row,) = ConversationEncoder(tiny_tokenizer, {"chat_template": template}).encode(
        Demonstration("row 0", [user("a"), assistant("b")], 0)
    )
    assert row.loss_mask == [0, 1]


@pytest.mark.catch_tokenizer
@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("right", "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n1234"), ("left", "67890<|im_end|>")],
)
def test_long_rows_are_truncated(
    truncation: str,
    kept: str,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_rows(tmp_path, [{"prompt": "what", "response": "1234567890"}])
    length = len(tiny_tokenizer(kept, add_special_tokens=False)["input_ids"])
    data = SFTDataConfig.model_validate({"truncation": truncation, "max_length": length})
    with caplog.at_level(logging.WARNING):
        ((segment,),) = SupervisedDataset([path], ConversationEncoder(tiny_tokenizer), data)[0]
    assert tiny_tokenizer.decode(segment.token_ids) == kept
    assert "truncated 1 rows" in caplog.text
    trained = [t for t, m in zip(segment.response_ids, segment.loss_mask, strict=True) if m]
    assert tiny_tokenizer.decode(trained) == {"right": "1234", "left": "7890<|im_end|>"}[truncation]


def test_long_rows_are_errors_by_default(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "1" * 99}])
    data = SFTDataConfig.model_validate({"max_length": 100})
    with pytest.raises(DataError, match=r"row 1 of .*rows\.jsonl has \d+ tokens, more than data\.max_length=100"):
        SupervisedDataset([path], ConversationEncoder(tiny_tokenizer), data)


def test_rows_that_lose_their_answer_are_dropped(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * 99, "response": "b"}, {"prompt": "a", "response": "b"}]
    data = SFTDataConfig.model_validate({"max_length": 50, "truncation": "right"})
    encoder = ConversationEncoder(tiny_tokenizer)
    assert len(SupervisedDataset([write_rows(tmp_path, rows)], encoder, data)) == 1
    with pytest.raises(DataError, match=r"all 1 rows of .* lost their answer"):
        SupervisedDataset([write_rows(tmp_path, rows[:1])], encoder, data)


TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Z", "S")), min_size=1, max_size=12)
CONVERSATIONS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXT.filter(str.strip)), min_size=1, max_size=6
).filter(lambda turns: turns[0][0] != "assistant" and any(role == "assistant" for role, _ in turns))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=CONVERSATIONS)
def test_of_any_conversation_exactly_the_answers_are_trained(
    turns: list[tuple[str, str]], tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    ((text, _),) = encode(tiny_tokenizer, messages)
    (row,) = ConversationEncoder(tiny_tokenizer).encode(Demonstration("row 0", messages, 0))
    answers: list[list[int]] = [[]]
    for token, trained in zip(row.token_ids, row.loss_mask, strict=True):
        if trained:
            answers[-1].append(token)
            if token == tiny_tokenizer.eos_token_id:
                answers.append([])
    assert answers.pop() == []
    assert [tiny_tokenizer.decode(ids) for ids in answers] == [
        f"{content}<|im_end|>" for role, content in turns if role == "assistant"
    ]
    assert tiny_tokenizer.apply_chat_template(messages, tokenize=False).startswith(text)


def calling(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_a_bad_row_is_refused_with_its_number(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    def find_error(row: dict[str, Any]) -> str:
        path = write_rows(tmp_path, [row])
        return golden.catch(DataError, lambda: read_demonstrations(path, SFTDataConfig(), "a-text-model"), tmp_path)

    rows = {row: [find_error(json.loads(row))] for row in golden.read("dataset/demonstrations")}
    golden.compare("dataset/demonstrations", rows, pytestconfig)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": null, "n": 1}', '{"city": null, "n": 1}'),
        ({"city": None, "n": 1}, '{"n": 1}'),
        ("", "{}"),
        ("null", "{}"),
        (None, "{}"),
    ],
)
def test_nulls_in_the_text_of_arguments_were_meant(
    arguments: Any, shown: str, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    path = write_rows(tmp_path, [{"messages": [user("a"), calling(call)]}])
    ((row,),) = read_demonstrations(path, SFTDataConfig())
    ((_, (trained,)),) = encode(tiny_tokenizer, row.messages, WITH_TOOLS)
    assert f'"arguments": {shown}}}' in trained


@pytest.mark.parametrize("field", ["weight", "train", "training", "loss", "loss_mask", "step_loss_mask"])
def test_only_answers_with_a_weight_are_trained(
    field: str, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    messages = [
        user("a"),
        {**assistant("b"), field: 0},
        user("c"),
        {**assistant("d"), field: 1},
        user("e"),
        assistant("f"),
    ]
    path = write_rows(tmp_path, [{"messages": messages}])
    ((segment,),) = SupervisedDataset([path], ConversationEncoder(tiny_tokenizer), SFTDataConfig())[0]
    trained = [t for t, m in zip(segment.response_ids, segment.loss_mask, strict=True) if m]
    assert tiny_tokenizer.decode(trained) == "d<|im_end|>f<|im_end|>"
    assert "assistant\nb<|im_end|>" in str(tiny_tokenizer.decode(segment.token_ids))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("a"), assistant("Let me ")], "response": "see"},
        {
            "prompt": [assistant("Let me ")],
            "response": "see",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        {"prompt": [user("a"), assistant("Let me ")], "chosen": "see", "rejected": [assistant("see")]},
    ],
)
def test_an_answer_continues_a_prompt_that_begins_it(
    row: dict[str, Any], tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    data = PreferenceDataConfig() if "chosen" in row else SFTDataConfig()
    encoder = ConversationEncoder(tiny_tokenizer, {"chat_template": WITH_TOOLS})
    dataset = SupervisedDataset([write_rows(tmp_path, [row])], encoder, data)
    for (segment,) in dataset[0]:
        assert str(tiny_tokenizer.decode(segment.prompt_ids)).endswith("<|im_start|>assistant\nLet me ")
        assert tiny_tokenizer.decode(segment.response_ids) == "see<|im_end|>"


@pytest.mark.parametrize("tools", [None, "", [], "[]", "null"])
def test_a_row_may_have_no_tools(tools: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "a", "response": "b", "tools": tools}])
    ((row,),) = read_demonstrations(path, SFTDataConfig())
    assert row.tools is None


def test_tools_of_a_table_lose_its_nulls(tmp_path: Path) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}}
        for name in ("city", "expr")
    ]
    path = write_rows(tmp_path, [{"prompt": "a", "response": "b", "tools": tools}], "rows.parquet")
    ((row,),) = read_demonstrations(path, SFTDataConfig())
    assert row.tools == tools


def test_a_column_that_belongs_to_the_prompt_is_refused_unless_a_key_reads_it(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "2 + 2", "output": "4", "system": ""}
    keys = {"prompt_key": "instruction", "response_key": "output"}
    with pytest.raises(DataError, match=r"row 0 of .* has input='2 [+] 2', which is not read; append it to the prompt"):
        read_demonstrations(write_rows(tmp_path, [row]), SFTDataConfig.model_validate(keys))
    for others in ({"input": ""}, {"instruction": None, "prompt": "Add 2 + 2."}):
        used = {**keys, "prompt_key": "prompt"} if "prompt" in others else keys
        ((read,),) = read_demonstrations(write_rows(tmp_path, [row | others]), SFTDataConfig.model_validate(used))
        assert read.messages[-1] == assistant("4")


def test_keys_may_be_nested(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"extra_info": {"question": "a", "answer": "b"}}])
    keys = {"prompt_key": "extra_info", "response_key": "extra_info"}
    inner = {"prompt_dict_keys": ["question"], "response_dict_keys": ["answer"]}
    ((row,),) = read_demonstrations(path, SFTDataConfig.model_validate(keys | inner))
    assert [m["content"] for m in row.messages] == ["a", "b"]
    with pytest.raises(DataError, match="has no 'reply': its extra_info has the keys question, answer"):
        read_demonstrations(path, SFTDataConfig.model_validate(keys | inner | {"response_dict_keys": ["reply"]}))


@pytest.mark.parametrize("is_nested", [True, False])
def test_arguments_in_json_text_are_trained_as_objects(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, is_nested: bool
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ (c.function or c) | tojson }}{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    trained = []
    for arguments in ({"a": 1}, '{"a": 1}'):
        call: dict[str, Any] = {"name": "f", "arguments": arguments}
        calls = [{"type": "function", "function": call} if is_nested else call]
        row = {"messages": [user("a"), calling(*calls)]}
        ((read,),) = read_demonstrations(write_rows(tmp_path, [row]), SFTDataConfig())
        trained.append(encode(tiny_tokenizer, read.messages, template)[0][1])
    assert trained[0] == trained[1] == ['{"name": "f", "arguments": {"a": 1}}<|im_end|>']


def test_rows_that_are_checked_when_they_are_drawn_have_the_same_tokens(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{i} + 1?", "response": f"It is {i + 1}."} for i in range(40)]
    encoder = ConversationEncoder(tiny_tokenizer)
    path = write_rows(tmp_path, rows)
    checked = SupervisedDataset([path], encoder, SFTDataConfig())
    drawn = SupervisedDataset([path], encoder, SFTDataConfig(), max_checked_rows=5)
    assert len(drawn) == len(checked) == 40
    assert [drawn[i] for i in range(40)] == [checked[i] for i in range(40)]
    bad, long = [i for i in range(40) if i not in JoinedRows([path]).sample(5)][:2]
    rows[bad]["response"], rows[long]["response"] = 7, "a" * 500
    path = write_rows(tmp_path, rows)
    data = SFTDataConfig(max_length=100, truncation="error")
    drawn = SupervisedDataset([path], encoder, data, max_checked_rows=5)
    with pytest.raises(InvalidRow, match=f"row {bad} of {path}: response=7 is not text"):
        drawn[bad]
    with pytest.raises(InvalidRow, match=f"row {long} of {path} has .* more than data.max_length=100"):
        drawn[long]
    rows[long] = {"prompt": "a" * 500, "response": "b"}
    data = SFTDataConfig(max_length=100, truncation="right")
    drawn = SupervisedDataset([write_rows(tmp_path, rows)], encoder, data, max_checked_rows=5)
    with pytest.raises(SkippedRow, match="has no trained token"):
        drawn[long]
    order = ShuffledPrompts(drawn, 38, 0)
    assert len(order.next_batch()) == 38
    assert order.metrics == {"data/n_skipped": 2.0}


def test_the_fingerprint_covers_tokens_masks_and_order(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The template shows no roles, so that the same tokens with another mask are other data."""

    def fingerprint(*rows: list[dict[str, str]], day: str = "") -> str:
        encoder = ConversationEncoder(tiny_tokenizer, {"chat_template": day + WITHOUT_ROLES})
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        path = write_rows(folder, [{"messages": messages} for messages in rows])
        return SupervisedDataset([path], encoder, SFTDataConfig()).fingerprint

    answered = [user("a"), assistant("b"), user("c"), assistant("d")]
    all_trained = [user("a"), assistant("b"), assistant("c"), assistant("d")]
    other = [user("a"), assistant("b"), user("c"), assistant("e")]
    data = [(answered,), (all_trained,), (other,), (answered, other), (other, answered)]
    assert len({fingerprint(*rows) for rows in data}) == len(data)
    assert fingerprint(answered) == fingerprint(answered, day="Tuesday"), "the date is no change"


PLACE, WHERE = {"type": "image"}, {"type": "text", "text": "Where?"}
PICTURED = {
    "messages": {"messages": [user([PLACE, WHERE]), assistant("Left"), user([WHERE, PLACE]), assistant("Up")]},
    "markers": {"messages": [user("<image>Where?"), assistant("Left"), user("Where?<image>"), assistant("Up")]},
    "prompt": {"prompt": [user([PLACE, WHERE]), assistant("Left"), user("Where?<image>")], "response": "Up"},
}


@pytest.mark.parametrize("row", PICTURED.values(), ids=PICTURED)
def test_images_have_their_tokens_in_the_row_of_the_processor_and_answers_alone_are_trained(
    row: dict[str, Any], tmp_path: Path, vision_model_path: Path, vision_tokenizer: PreTrainedTokenizerBase
) -> None:
    images = [read_image(draw(color)) for color in ("red", "blue")]
    for name, image in zip("ab", images, strict=True):
        (tmp_path / f"{name}.png").write_bytes(image.content)
    path = write_rows(tmp_path, [{**row, "images": ["a.png", "b.png"]}])
    dataset = SupervisedDataset([path], ConversationEncoder(vision_tokenizer), SFTDataConfig())
    ((segment,),) = dataset[0]
    processor = AutoProcessor.from_pretrained(vision_model_path)
    text = vision_tokenizer.apply_chat_template(PICTURED["messages"]["messages"], tokenize=False).removesuffix("\n")
    expected = processor(text=text, images=[image.open() for image in images], add_special_tokens=False)
    assert segment.token_ids == expected["input_ids"][0]
    image_id = vision_tokenizer.convert_tokens_to_ids(processor.image_token)
    if "gemma" in vision_model_path.name:
        image_id = vision_tokenizer.convert_tokens_to_ids("<image_soft_token>")
    filled = [i for i, token in enumerate(segment.token_ids) if token == image_id]
    assert [i for span in segment.images for i in range(span.start, span.end)] == filled
    assert [span.image for span in segment.images] == images
    mask = [0] * segment.n_prompt + segment.loss_mask
    trained = vision_tokenizer.decode([token for token, m in zip(segment.token_ids, mask, strict=True) if m])
    assert trained == ("Up<|im_end|>" if "response" in row else "Left<|im_end|>Up<|im_end|>")
    batch = build_supervised_batch([DrawnPrompt(0, dataset[0], 0)], vision_tokenizer.pad_token_id)
    assert batch.images == [segment.images]


PICTURED_PAIRS = {
    "messages": {"prompt": [user([PLACE, WHERE])], "chosen": [assistant("Left")], "rejected": [assistant("Up")]},
    "texts": {"prompt": "Where?", "chosen": "Left", "rejected": "Up"},
    "conversations": {
        "chosen": [user([PLACE, WHERE]), assistant([{"type": "text", "text": "Left"}])],
        "rejected": [user([PLACE, WHERE]), assistant([{"type": "text", "text": "Up"}])],
    },
    "a prompt and conversations": {
        "prompt": [user("<image>Where?")],
        "chosen": [user("<image>Where?"), assistant("Left")],
        "rejected": [user("<image>Where?"), assistant("Up")],
    },
}


@pytest.mark.parametrize("row", PICTURED_PAIRS.values(), ids=PICTURED_PAIRS)
def test_both_answers_of_a_pair_have_the_images_of_the_prompt(row: dict[str, Any], tmp_path: Path) -> None:
    content = draw("red")
    path = write_rows(tmp_path, [{**row, "images": [{"bytes": content, "path": None}]}], "rows.parquet")
    ((chosen, rejected),) = read_demonstrations(path, PreferenceDataConfig())
    prompt = user([{"type": "image", "image": read_image(content)}, WHERE])
    assert chosen.read_images().messages == [prompt, assistant("Left")]
    assert rejected.read_images().messages == [prompt, assistant("Up")]
    assert chosen.n_context == rejected.n_context == 1


def test_rows_with_images_are_read_again_when_they_are_drawn(
    tmp_path: Path, vision_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.png").write_bytes(draw("red"))
    rows = [{"prompt": "Where?", "response": "Left", "images": ["a.png"]}, {"prompt": "Who?", "response": "I"}]
    path = write_rows(tmp_path, rows)
    with caplog.at_level(logging.INFO):
        dataset = SupervisedDataset([path], ConversationEncoder(vision_tokenizer), SFTDataConfig())
    (((first,), (second,)),) = zip(*(dataset[i] for i in range(2)), strict=True)
    assert (len(first.images), len(second.images)) == (1, 0)
    assert f"2 rows, {len(first.token_ids) + len(second.token_ids)} tokens" in caplog.text
    (tmp_path / "a.png").write_bytes(draw("blue"))
    other = SupervisedDataset([path], ConversationEncoder(vision_tokenizer), SFTDataConfig())
    assert dataset.fingerprint != other.fingerprint
    (tmp_path / "a.png").unlink()
    assert dataset[1] == ((second,),)
    with pytest.raises(InvalidRow, match=f"row 0 of {path}: message 0: the image '{tmp_path}/a.png' cannot be read"):
        dataset[0]


@pytest.mark.parametrize(
    ("max_length", "side", "token_ids", "spans"),
    [
        (8, "right", range(8), [(1, 4), (5, 8)]),
        (7, "right", range(5), [(1, 4)]),
        (4, "right", range(4), [(1, 4)]),
        (3, "right", range(1), []),
        (9, "left", range(1, 10), [(0, 3), (4, 7)]),
        (8, "left", range(4, 10), [(1, 4)]),
        (5, "left", range(5, 10), [(0, 3)]),
        (4, "left", range(8, 10), []),
    ],
)
def test_truncation_keeps_or_drops_all_tokens_of_an_image(
    max_length: int, side: str, token_ids: range, spans: list[tuple[int, int]]
) -> None:
    image = EncodedImage(b"", "", 1, 1)
    row = TokenRow(list(range(10)), [0] * 8 + [1] * 2, [ImageSpan(1, 4, image), ImageSpan(5, 8, image)])
    row.truncate(max_length, side)
    assert row.token_ids == list(token_ids)
    assert len(row.loss_mask) == len(row.token_ids)
    assert [(span.start, span.end) for span in row.images] == spans
