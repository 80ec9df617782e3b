"""Parsing and checks of supervised rows, before any tokenizer or model is loaded.

A row is a conversation, a prompt with a response, or a prompt with a chosen and a rejected answer. Imports neither
torch nor transformers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from skyrl_gym.data.files import Row, drop_nulls, quote
from skyrl_gym.data.images import FindTextModel, place_images, read_images
from skyrl_gym.images import parse_parts
from skyrl_gym.runtime.validation import is_conversation
from skyrl_gym.tools.calls import parse_arguments
from skyrl_train.config.supervised import PreferenceDataConfig, SFTDataConfig, SupervisedDataConfig
from skyrl_train.dataset.files import JoinedRows, reading_rows
from skyrl_train.errors import DataError
from skyrl_train.rendering.messages import THOUGHT_FIELDS, check_media, find_thought, get_function, prepare_messages

WEIGHT_FIELDS = (
    *("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_mask", "loss_weight"),
    "step_loss_mask",
)
"""Fields that exclude a message from training if 0 or false: `weight` (OpenAI, Mistral), `train` (Axolotl), …"""

UNREAD_FIELDS = {
    "function_call": 'write tool_calls: [{"type": "function", "function": {"name": "…", "arguments": {}}}]',
    "refusal": "write its text as content",
    "prefix": "write the beginning of a reply as the last message of the prompt, and the rest as the response",
}
"""Fields of other formats that change the meaning of a message, with the equivalent to write here."""

UNREAD_COLUMNS = {
    "system": 'write {"role": "system", "content": "…"} as the first message of the prompt',
    "system_prompt": 'write {"role": "system", "content": "…"} as the first message of the prompt',
    "functions": "write them as tools",
    "input": "append it to the prompt",
}
"""Columns of other formats that belong to the prompt. `input` does so beside Alpaca's `instruction`."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation to imitate."""

    location: str  # "row 17 of train.jsonl", for messages
    messages: list[dict[str, Any]]  # at least one assistant message
    n_context: int  # number of leading messages that are never trained on, even assistant messages
    tools: list[Any] | None = None
    reply_start: dict[str, Any] | None = None  # the prompt's last message, if the answer continues it
    folder: Path | None = None  # where relative paths of unread images start

    @property
    def trained(self) -> list[int]:
        """Indices of the messages to imitate."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.n_context
            and message["role"] == "assistant"
            and all(message.get(name, True) for name in WEIGHT_FIELDS)
        ]

    def read_images(self) -> "Demonstration":
        """Return the conversation with its images read. DataError if one cannot be read."""
        with reading_rows():
            return replace(self, messages=read_images(self.messages, self.location, self.folder))


def read_answers(
    rows: JoinedRows, indices: Sequence[int], data: SupervisedDataConfig, find_text_model: FindTextModel
) -> Iterator[tuple[Demonstration, ...]]:
    """Yield (demonstration,) or (chosen, rejected) per row. `indices` must ascend. Images are not read.

    Raise DataError if a row is invalid, or has images although the model reads only text.
    """
    for index, (location, row) in zip(indices, rows.read(indices), strict=True):
        check_media(row, location)
        _check_columns(row, location, data)
        if isinstance(data, PreferenceDataConfig):
            answers = _read_pair(row, location, data)
            key = data.prompt_key if row.get(data.prompt_key) is not None else data.chosen_key
        else:
            assert isinstance(data, SFTDataConfig)
            answers = (_read_demonstration(row, location, data),)
            key = data.messages_key if row.get(data.messages_key) is not None else data.prompt_key
        with reading_rows():
            placed = [place_images(answer.messages, row, location, key, find_text_model) for answer in answers]
        folder = rows.folder(index)
        yield tuple(replace(answer, messages=m, folder=folder) for answer, m in zip(answers, placed, strict=True))


def _check_columns(row: Row, location: str, data: SupervisedDataConfig) -> None:
    """Raise DataError for a column that belongs to the prompt, but that no key reads."""
    read = {value for name, value in data if name.endswith("_key")}
    if data.prompt_key != "instruction":
        read.add("input")
    for name, fix in UNREAD_COLUMNS.items():
        if row.get(name) and name not in read:
            raise DataError(
                f"{location} has {name}={quote(row[name])}, which is not read; {fix}, and remove the column"
            )


def _read_demonstration(row: Row, location: str, data: SFTDataConfig) -> Demonstration:
    """Parse a conversation, or a prompt with a response."""
    tools = _parse_tools(row.get(data.tools_key), location, data.tools_key)
    if row.get(data.messages_key) is not None:
        key = data.messages_key
        messages = _check_messages(row[key], location, key)
        roles = [message["role"] for message in messages]
        # assistant messages at the start are greetings, not answers
        n_greetings = next((i for i, role in enumerate(roles) if role != "assistant"), len(roles))
        if "assistant" not in roles[n_greetings:]:
            raise DataError(
                f"{location}: {key} has no assistant answer to train on, only the roles {', '.join(roles)}; "
                "add one, or remove the row"
            )
        demonstration = Demonstration(location, messages, n_greetings, tools)
        if not demonstration.trained:
            raise DataError(f"{location}: every answer in {key} has weight 0; give one weight 1, or remove the row")
        _refuse_empty(demonstration, key)
        return demonstration
    prompt = _read_prompt(row, location, data)
    name, response = _descend(row, data.response_key, data.response_dict_keys, location)
    if not isinstance(response, str) or not response.strip():
        fix = "correct or remove the row"
        if isinstance(response, list):
            fix = f"write the prompt and the answer as one list of messages in {data.messages_key!r}"
        raise DataError(f"{location}: {name}={quote(response)} is not text to train on; {fix}")
    return _answer_prompt(location, prompt, [{"role": "assistant", "content": response}], tools)


def _answer_prompt(
    location: str, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tools: list[Any] | None
) -> Demonstration:
    """Join a prompt and its answer, which continues a final assistant message. DataError if that has tool calls."""
    last, first = prompt[-1], answer[0]
    if last["role"] != "assistant" or first["role"] != "assistant":
        return Demonstration(location, [*prompt, *answer], len(prompt), tools)
    if last.get("tool_calls"):
        raise DataError(
            f"{location}: the prompt ends with assistant tool calls that lack their results; add the results "
            'as messages with the role "tool", or move the calls to the answer'
        )
    thought = {name: last[name] for name in THOUGHT_FIELDS if name in last}
    reply = {**thought, **first, "content": str(last["content"]) + str(first["content"])}
    return Demonstration(location, [*prompt[:-1], reply, *answer[1:]], len(prompt) - 1, tools, last)


def _read_pair(row: Row, location: str, data: PreferenceDataConfig) -> tuple[Demonstration, ...]:
    """Parse the chosen and the rejected answer, each with its prompt.

    An answer is a string or a list of messages, and may repeat the prompt. Without a prompt column, the prompt is
    the common prefix of both answers.
    """
    tools = _parse_tools(row.get(data.tools_key), location, data.tools_key)
    keys = (data.chosen_key, data.rejected_key)
    answers = [_read_answer(row, key, location) for key in keys]
    if row.get(data.prompt_key) is not None:
        prompt = _read_prompt(row, location, data)
    else:
        prompt, answers = _split_off_prompt(answers[0], answers[1], location, data)
    pair = []
    for key, answer in zip(keys, answers, strict=True):
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        elif answer[: len(prompt)] == prompt:
            answer = answer[len(prompt) :]
        if all(message["role"] != "assistant" for message in answer):
            raise DataError(
                f"{location}: {key} has no assistant message after the prompt; write "
                '[{"role": "assistant", "content": "…"}], or a string'
            )
        if prompt[-1]["role"] == "user" and answer[0]["role"] in ("system", "user"):
            raise DataError(
                f"{location}: {key} starts with a {answer[0]['role']} message that is not the prompt; repeat the "
                "prompt exactly, or write the answer only"
            )
        demonstration = _answer_prompt(location, prompt, answer, tools)
        if not demonstration.trained:
            raise DataError(
                f"{location}: every assistant message in {key} has weight 0, so the pair has nothing to "
                "compare; give one weight 1, or remove the row"
            )
        _refuse_empty(demonstration, key)
        pair.append(demonstration)
    return tuple(pair)


def _refuse_empty(demonstration: Demonstration, key: str) -> None:
    """Raise DataError for an answer without any text or call, because it would train only the end of the turn."""
    trained = demonstration.trained
    for number, index in enumerate(trained, start=1):
        message = demonstration.messages[index]
        if not (str(message["content"] or "").strip() or message.get("tool_calls") or find_thought(message)):
            raise DataError(
                f"{demonstration.location}: answer {number} of {len(trained)} in {key} is empty, so only the end of "
                "the turn would be trained; write the answer, give it weight 0, or remove the row"
            )


def _read_answer(row: Row, key: str, location: str) -> str | list[dict[str, Any]]:
    if key not in row:
        raise DataError(
            f"{location} has no {key!r}: it has the keys {', '.join(row)}; set data.chosen_key and data.rejected_key "
            "to the columns with the better and the worse answer"
        )
    answer = row[key]
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise DataError(f"{location}: {key} is empty; write an answer, or remove the row")
    return answer if isinstance(answer, str) else _check_messages(answer, location, key, "neither a string nor")


def _split_off_prompt(
    chosen: str | list[dict[str, Any]], rejected: str | list[dict[str, Any]], location: str, data: PreferenceDataConfig
) -> tuple[list[dict[str, Any]], list[str | list[dict[str, Any]]]]:
    """Split two answers into their common prefix, which is the prompt, and the rest of each.

    For strings, the prompt ends before white space, so that no word is split: "The sky is blue" and "The sky is black"
    share the prompt "The sky is", not "The sky is bl".
    """
    n_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str):
        words = re.match(r"(.*\S)\s", chosen[:n_common], re.DOTALL)
        n_common = words.end(1) if words else 0
        prompt = [{"role": "user", "content": chosen[:n_common]}]
    else:
        n_common = min(n_common, len(chosen) - 1, len(rejected) - 1)  # keep an answer even if both are equal
        prompt = chosen[:n_common]
    if n_common == 0:
        raise DataError(
            f"{location} has no {data.prompt_key!r}, and {data.chosen_key} and {data.rejected_key} do not start with "
            "the same prompt; add one, or set data.prompt_key"
        )
    return prompt, [chosen[n_common:], rejected[n_common:]]


def _read_prompt(row: Row, location: str, data: SupervisedDataConfig) -> list[dict[str, Any]]:
    name, prompt = _descend(row, data.prompt_key, data.prompt_dict_keys, location)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return _check_messages(prompt, location, name, "neither a string nor")


def _descend(row: Row, key: str, inner_keys: Sequence[str], location: str) -> tuple[str, Any]:
    """Return (dotted name, value) of a possibly nested key."""
    name, value = "", row
    for part in (key, *inner_keys):
        if not isinstance(value, Mapping) or part not in value:
            within = f"its {name}" if name else "it"
            found = f"the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else quote(value)
            raise DataError(
                f"{location} has no {part!r}: {within} has {found}; set data.messages_key, or data.prompt_key and "
                "data.response_key, with data.prompt_dict_keys and data.response_dict_keys under them"
            )
        name, value = f"{name}.{part}".lstrip("."), value[part]
    return name, value


def _check_messages(value: Any, location: str, key: str, negation: str = "not") -> list[dict[str, Any]]:
    """Check messages and return them in the form that chat templates expect."""
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{location}: {key}={quote(value)} is {negation} a list of messages; write "
            '[{"role": "user", "content": "…"}]'
        )
    messages = []
    for index, message in enumerate(value):
        if isinstance(message, Mapping):
            message = drop_nulls(message)
            if message.get("tool_calls"):
                message.setdefault("content", "")
        if is_conversation([message]) and not _has_valid_calls(message):
            raise DataError(
                f"{location}: message {index} of {key} has invalid tool_calls: {quote(message['tool_calls'])}; "
                'write [{"type": "function", "function": {"name": "…", "arguments": {}}}]'
            )
        if not is_conversation([message]) or (message["content"] is None and not message.get("tool_calls")):
            raise DataError(
                f"{location}: message {index} of {key} lacks a role or a content: {quote(message)}; write "
                '{"role": "user", "content": "…"}'
            )
        _check_fields(message, f"{location}: message {index} of {key}")
        messages.append(message)
    try:
        return prepare_messages(messages, parse_parts)
    except DataError as error:
        raise DataError(f"{location}: {key}: {error}") from error


def _check_fields(message: Mapping[str, Any], name: str) -> None:
    """Raise DataError for fields that change a message's meaning, and for invalid weights."""
    for field, fix in UNREAD_FIELDS.items():
        if message.get(field):
            raise DataError(f"{name} has {field}={quote(message[field])}, which is not supported; {fix}, and remove it")
    for field in WEIGHT_FIELDS:
        if (weight := message.get(field, 1)) not in (0, 1):
            raise DataError(f"{name} has {field}={quote(weight)}; write 1 to train on the message, or 0 to skip it")
        if field in message and weight == 1 and message["role"] != "assistant":
            raise DataError(f"{name} has {field}={quote(weight)}, but only assistant messages are trained on")


def _has_valid_calls(message: Mapping[str, Any]) -> bool:
    calls = parse_arguments(message).get("tool_calls", [])
    functions = [get_function(call) if isinstance(call, Mapping) else None for call in calls or ()]
    return isinstance(calls, list) and all(
        isinstance(function, Mapping) and isinstance(function.get("arguments", {}), Mapping) for function in functions
    )


def _parse_tools(value: Any, location: str, key: str) -> list[Any] | None:
    is_text = isinstance(value, str)
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(
                f"{location}: {key}={quote(value)} is not JSON: {error}; write a list of schemas"
            ) from error
    if value in (None, "", []):
        return None
    if not isinstance(value, list):
        raise DataError(f"{location}: {key}={quote(value)} is not a list of tools; write a list of JSON schemas")
    return list(value if is_text else drop_nulls(value))  # in JSON text, nulls are intentional
