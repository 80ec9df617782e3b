"""Chat templates: conversations as text, and the token ids of text that follows other text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_gym.runtime.text import describe_error
from skyrl_gym.tools.calls import THOUGHT_TAGS
from skyrl_train.errors import DataError
from skyrl_train.rendering.messages import ROLES, THOUGHT_FIELDS, prepare_messages

MARK = "ASSISTANTTURN"  # placeholder for the content of a message, to find its position in the rendered text
ANCHORS = ("\n", ".", "a")  # text that a fragment can follow if it would merge with its real context
MAX_TAIL_CHARS = 1000  # end of a context that is searched for its last special token

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn: the prompt that the model reads and the answer that it learns to write."""

    prompt: str
    answer: str


class ChatTemplate:
    """A tokenizer with a chat template and its variables."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Use `template` instead of the tokenizer's own, if given, and pass it `variables`."""
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = {"chat_template": template, **(variables or {})}
        self._source = str(self.options["chat_template"] or tokenizer.chat_template)
        self._added_tokens = list(tokenizer.get_added_vocab())

    # -- text

    def check_roles(self, messages: Messages) -> None:
        """Raise DataError for a role that neither this template nor published ones use, such as "human"."""
        for index, message in enumerate(messages):
            if message["role"] not in ROLES and message["role"] not in self._source:
                raise DataError(
                    f"message {index} has the role {message['role']!r}, which the chat template does not name; use "
                    "system, user, assistant or tool"
                )

    def render(self, messages: Messages, tools: Sequence[Any] | None = None, *, adds_header: bool) -> str:
        """Return the text of a conversation, with the header of the next assistant's turn if `adds_header`.

        Raises:
            DataError: a message has an image, a video or audio, or the template refuses the messages.
        """
        prepared = prepare_messages(messages)
        options = {**self.options, "tools": list(tools)} if tools else self.options
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    prepared, tokenize=False, add_generation_prompt=adds_header, **options
                )
            )
        except Exception as error:  # the boundary of a template, which may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"the chat template refuses messages with the roles {roles or 'none'} ({describe_error(error)}); "
                "change them, or the template"
            ) from error

    def prompt(self, messages: Messages, tools: Sequence[Any] | None = None) -> str:
        """Return the text that the model continues. A last message of the assistant is the beginning of its reply."""
        *past, last = messages
        if last["role"] != "assistant" or not (start := prepare_messages([last])[0]["content"]):
            return self.render(messages, tools, adds_header=True)
        header = self.render(past, tools, adds_header=True) if past else ""
        marked = self.render([*past, {**last, "content": start + MARK}], tools, adds_header=False).partition(MARK)[0]
        opening = next((opening for opening in THOUGHT_TAGS if start.lstrip().startswith(opening)), None)
        if marked.endswith(start) and marked.startswith(header):
            # Qwen3's template puts an empty thought before the last reply, even if the reply begins with a thought
            has_two_thoughts = opening is not None and marked[len(header) : -len(start)].strip()
            if not has_two_thoughts:
                return marked
        if opening is not None and header.rstrip().endswith(opening):  # R1's header opens the thought
            start = start.lstrip().removeprefix(opening).removeprefix("\n")
        return header + start

    def turn(self, messages: Messages, index: int, tools: Sequence[Any] | None = None, start: str = "") -> Turn:
        """Return the prompt and the answer of an assistant's message, which begins with `start` in the prompt.

        The prompt is the one of generation, so the answer is what follows the template's header, even if the template
        writes past turns differently. R1's header opens a thought that its past turns do not have:

            header        <｜Assistant｜><think>\\n
            past turn     <｜Assistant｜>It is 4.<eos>
            answer        \\n</think>\\n\\nIt is 4.<eos>

        The answer closes such a thought, after the message's own thought if it has one.

        Raises:
            DataError: the template does not write a part of the message, or not after the header.
        """
        past, message = list(messages[:index]), messages[index]
        if start:
            prompt = self.prompt([*past, {"role": "assistant", "content": start}], tools)
        else:
            prompt = self.render(past, tools, adds_header=True)
        text = self.render([*past, message], tools, adds_header=False)
        if text.startswith(prompt):
            answer = text[len(prompt) :]
        else:
            answer = self._answer_after_other_header(prompt, text, past, tools, index)
        thought, content = split_thought(prepare_messages([message])[0])
        if not start:
            answer = _continue_thought(prompt, answer, thought, index)
        self._check_complete(answer, thought, content.removeprefix(start), message, index)
        return Turn(prompt, answer)

    def _answer_after_other_header(self, prompt: str, text: str, past: Messages, tools: Any, index: int) -> str:
        """Return the answer if the prompt's header has an empty or an open thought that a past turn's header lacks."""
        turn = [*past, {"role": "assistant", "content": MARK}]
        head = self.render(turn, tools, adds_header=False).partition(MARK)[0]
        for closing in THOUGHT_TAGS.values():
            if not prompt.startswith(head):  # DeepSeek-V3.1 closes a thought in past turns that it never opens there
                head = head.removesuffix(closing)
        extra = prompt[len(head) :].strip()
        for opening, closing in THOUGHT_TAGS.items():
            extra = extra.removeprefix(opening).strip().removeprefix(closing)
        if not (prompt.startswith(head) and text.startswith(head)) or extra:
            raise DataError(
                f"the chat template writes message {index} in another place than after the header of the assistant's "
                f"turn, {prompt[-40:]!r}, so the answer cannot be separated from the prompt; use a template whose "
                "generation prompt is the beginning of a turn, remove the thought of the message, or change "
                "data.chat_template_kwargs"
            )
        return text[len(head) :]

    def _check_complete(
        self, answer: str, thought: str | None, content: str, message: Mapping[str, Any], index: int
    ) -> None:
        """Raise DataError if the answer lacks the thought, the content or a tool call of its message."""
        calls = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
        parts = {"thought": thought, "content": content, **{f"call of {name}": str(name) for name in calls}}
        for name, part in parts.items():
            if part and part.strip() not in answer:
                raise DataError(
                    f"the chat template does not write the {name} in message {index}; use a template that does "
                    "(data.chat_template), or remove it from the message"
                )

    # -- tokens

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text that begins a sequence."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def encode_after(self, context: str, fragment: str) -> list[int]:
        """Return the token ids of `fragment` where it follows `context`.

        A fragment alone may have other tokens. SentencePiece marks the beginning of a text with a space: Llama's
        tokenizer writes "It is" as `▁It ▁is`, but as `It ▁is` after "<|assistant|>\\n". The fragment is therefore
        tokenized together with the context since its last special token, where every tokenizer starts anew, and the
        tokens of the context are cut off.

        That fails if the fragment merges with the end of the context, e.g. two line ends to one token. The model was
        given the context's own tokens, so the fragment is then tokenized after a character that it does not merge with.
        """
        if not fragment:
            return []
        tail = context[-MAX_TAIL_CHARS:]
        start = max((tail.rfind(token) for token in self._added_tokens), default=-1)
        for before in (tail[start:] if start >= 0 else context, *ANCHORS):
            context_ids, token_ids = self.encode(before), self.encode(before + fragment)
            if token_ids[: len(context_ids)] == context_ids:
                return token_ids[len(context_ids) :]
        return self.encode(fragment)


def split_thought(message: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the thought of a prepared message, and its content without it."""
    content = str(message["content"] or "")
    thought = next((str(message[name]) for name in THOUGHT_FIELDS if message.get(name)), None)
    for opening, closing in THOUGHT_TAGS.items():
        before, found, after = content.partition(closing)
        if found:
            return before.strip().removeprefix(opening).strip(), after
    return thought, content


def _continue_thought(prompt: str, answer: str, thought: str | None, index: int) -> str:
    """Return an answer to a prompt that may have opened or closed a thought.

    Raises:
        DataError: the message has a thought after the header closed it.
    """
    header = prompt.rstrip()
    for opening, closing in THOUGHT_TAGS.items():
        if header.endswith(closing) and thought is not None:
            raise DataError(
                f"message {index} has a thought, but the header of the turn has already closed it ({header[-40:]!r}); "
                "remove the thought, or change data.chat_template_kwargs, e.g. enable_thinking"
            )
        if header.endswith(opening):
            if answer.lstrip().startswith(opening):
                answer = answer.lstrip().removeprefix(opening).removeprefix("\n")
            if closing not in answer:
                answer = f"\n{closing}\n\n" + answer.lstrip("\n")
            if thought and thought not in answer:
                answer = thought + "\n" + answer.lstrip("\n")
            return answer
    return answer
