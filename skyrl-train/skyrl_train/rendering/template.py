"""Chat templates: conversations as text, and the token ids of text that follows other text.

Published templates differ in how they write thoughts, tool calls and past turns, so `ChatTemplate` does not parse them.
It renders a conversation a second time with placeholders (`MARK`) for some of its text, and looks where they end up.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from secrets import token_hex
from typing import Any

from jinja2 import Environment
from transformers import PreTrainedTokenizerBase

from skyrl_gym.images import find_images
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.tools.calls import THOUGHT_TAGS, ToolCall, ToolCallError, split_calls
from skyrl_train.errors import DataError
from skyrl_train.media.processing import ImageProcessor, find_text_model, load_image_processor
from skyrl_train.media.spans import ImageSpan
from skyrl_train.rendering.messages import (
    CALL_FORMS,
    ROLES,
    THOUGHT_FIELDS,
    CallForm,
    find_thought,
    get_function,
    prepare_messages,
    replace_function,
)

# Placeholders for a message's text, to find where the template writes it. Random, so that no message contains them.
MARK, LAST_MARK, THOUGHT_MARK, CALL_MARK = (
    name + token_hex(8) for name in ("ASSISTANTTURN", "LASTMESSAGE", "ASSISTANTTHOUGHT", "ASSISTANTCALL")
)
ANCHORS = ("\n", ".", "a")  # stand-ins for a context whose end would merge with the fragment after it
MAX_TAIL_CHARS = 1000  # length of a context's end that is searched for the last special token

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SplitContent:
    """An assistant message, split into thought and answer."""

    thought: str | None
    answer: str
    marked_thought: str  # the content before the answer, with a placeholder for the thought

    @property
    def texts(self) -> dict[str, str]:
        """The nonempty parts without surrounding white space, because templates may drop it."""
        parts = {"thought": (self.thought or "").strip(), "content": self.answer.strip()}
        return {part: text for part, text in parts.items() if text}


class ChatTemplate:
    """A tokenizer with a chat template and its variables."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Use `template` (default: the tokenizer's), and pass it `variables`."""
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = {"chat_template": template, **(variables or {})}
        source = self.options["chat_template"] or tokenizer.chat_template
        self._source = "\n".join(source.values()) if isinstance(source, Mapping) else str(source)
        # All other tags are visible text to this model, such as a <reasoning> that the task asks for.
        self.thought_tags = {
            opening: closing
            for opening, closing in THOUGHT_TAGS.items()
            if opening in self._source or closing in self._source
        }
        self._call_form: CallForm | None = None  # known once the template has rendered a call
        self._written: set[frozenset[tuple[str, bool]]] = set()  # roles that `check_written` has found to be written
        self._added_tokens = list(tokenizer.get_added_vocab())

    # -- text

    def check_roles(self, messages: Messages) -> None:
        """Raise DataError for a role that neither this template nor any published template uses, such as "human"."""
        for index, message in enumerate(messages):
            if (role := message["role"]) in ROLES:
                continue
            tokens = Environment(autoescape=True).lex(self._source)
            if role not in {str(value)[1:-1] for _, kind, value in tokens if kind == "string"}:
                raise DataError(
                    f"message {index} has the role {role!r}, which the chat template does not name; use system, user, "
                    "assistant or tool"
                )

    def check_written(self, messages: Messages, tools: Sequence[Any] | None = None) -> None:
        """Raise DataError if the template drops a message that is neither from the user nor from the assistant.

        Qwen3's template writes nothing for the role "developer", and Granite's nothing for a second system message. So
        each such message is rendered with a placeholder, once for each combination of roles. The first message counts
        as a role of its own. The text ends with the next user message, because Mistral's template writes the system
        message only before a user message that is the last one.
        """
        roles = [str(message["role"]) for message in messages]
        others = [index for index, role in enumerate(roles) if role not in ("user", "assistant")]
        combination = frozenset((roles[index], index == 0) for index in others)
        if combination in self._written:
            return
        for index in others:
            after = roles[index:]
            n_after = after.index("user") + 1 if "user" in after else [*after, "assistant"].index("assistant")
            marked = [dict(message) for message in messages[: index + n_after]]
            marked[index]["content"] = LAST_MARK
            if LAST_MARK not in self.render(marked, tools, adds_header=True):
                raise DataError(
                    f"the chat template does not write message {index}, which has the role {roles[index]!r}; add its "
                    "text to the first system message or to a user message, or use a template that writes it"
                )
        self._written.add(combination)

    def check_tools(self, messages: Messages, tools: Sequence[Any]) -> None:
        """Raise DataError if the template ignores tools."""
        with_tools, without = (self.render(messages, given, adds_header=True) for given in (tools, None))
        if with_tools == without:
            raise DataError(
                "the chat template does not write tools; use one that does (data.chat_template, or "
                "generator.chat_template), or describe them in a message"
            )

    def render(self, messages: Messages, tools: Sequence[Any] | None = None, *, adds_header: bool) -> str:
        """Return the text of a conversation, with the header of the next assistant's turn if `adds_header`.

        Raises as `prepare` does, or DataError if the template rejects the messages.
        """
        return self._apply(self.prepare(messages, tools), tools, adds_header=adds_header)

    def prepare(self, messages: Messages, tools: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Return messages in the form that this template reads: `prepare_messages`, with calls in its `CallForm`.

        Raise DataError for a video or audio, or if the template does not write tool calls.
        """
        prepared = prepare_messages(messages)
        index = next((i for i, message in enumerate(prepared) if message.get("tool_calls")), None)
        if index is None:
            return prepared
        self._call_form = self._call_form or self._find_call_form(prepared, index, tools)
        return self._call_form.write(prepared)

    def _find_call_form(self, prepared: list[dict[str, Any]], index: int, tools: Sequence[Any] | None) -> CallForm:
        """Return the first `CallForm` that the template can write the tool calls of message `index` with.

        A form fits if the text has the call's name and arguments, and the arguments are not Python (`{'a': True}`).
        """
        name, argument = CALL_MARK + "NAME", CALL_MARK + "ARGUMENT"
        call = replace_function(prepared[index]["tool_calls"][0], name=name, arguments={argument: True})
        calling = {**prepared[index], "content": "", "tool_calls": [call]}
        errors = []
        for form in CALL_FORMS:
            try:
                marked = form.write([*prepared[:index], calling, *prepared[index + 1 :]])
                text = self._apply(marked, tools, adds_header=False)
            except DataError as error:
                errors.append(error)
                continue
            if name in text and argument in text and repr(argument) not in text:
                return form
        if len(errors) == len(CALL_FORMS):
            raise errors[0]
        raise DataError(
            f"the chat template does not write the tool calls of message {index} with their arguments; use a template "
            "that does, or write the calls as content"
        )

    def _apply(self, prepared: list[dict[str, Any]], tools: Sequence[Any] | None, *, adds_header: bool) -> str:
        options = {**self.options, "tools": list(tools)} if tools else self.options
        if find_images(prepared):
            prepared = [self._images.escape(message) for message in prepared]
        if self._needs_parts:
            prepared = [_with_parts(message) for message in prepared]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    prepared, tokenize=False, add_generation_prompt=adds_header, **options
                )
            )
        except Exception as error:  # templates raise anything
            roles = ", ".join(str(message.get("role")) for message in prepared)
            raise DataError(
                f"the chat template refuses messages with the roles {roles or 'none'} ({describe_error(error)}); "
                "change them, or the template"
            ) from error

    @cached_property
    def _needs_parts(self) -> bool:
        """True if the template reads parts but no strings, like Idefics3's and SmolVLM's."""
        message = {"role": "user", "content": MARK}
        try:
            rendered = [
                str(self.tokenizer.apply_chat_template([form], tokenize=False, **self.options))
                for form in (message, _with_parts(message))
            ]
        except Exception:  # noqa: BLE001, a template may reject a user message alone, or parts, with any error
            return False
        return MARK not in rendered[0] and MARK in rendered[1]

    def prompt(self, messages: Messages, tools: Sequence[Any] | None = None) -> str:
        """Return the text that the model continues.

        If the last message is from the assistant, it is the start of the reply, and the model continues its content. A
        thought in a field or between tags is complete, but if the content opens a thought without closing it, the model
        continues the thought. Raise DataError if the last message has tool calls, so it cannot be continued.
        """
        if messages[-1]["role"] != "assistant":
            return self.render(messages, tools, adds_header=True)
        *past, last = messages
        if last.get("tool_calls"):
            raise DataError(
                f"message {len(past)}, the last one of the prompt, has tool calls without their results; add the "
                'results as messages with the role "tool", or remove the calls'
            )
        start = prepare_messages([last])[0]
        content = start["content"] or ""
        if not content and not find_thought(start):
            return self.render(past, tools, adds_header=True)
        rest = MARK
        for opening, closing in self.thought_tags.items():
            if content.lstrip().startswith(opening) and closing not in content:
                rest += f"\n{closing}\n\n."
        header, reply = self._render_reply(past, {**start, "content": content + rest}, tools)
        return (header + reply).partition(MARK)[0]

    def turn(
        self, messages: Messages, index: int, tools: Sequence[Any] | None = None, start: Mapping[str, Any] | None = None
    ) -> tuple[str, str]:
        """Return the prompt that the model reads, and the assistant message at `index` as the answer that it writes.

        `start` is an assistant message with the start of that answer, which then belongs to the prompt. Raise DataError
        if the template does not write a part of the message, or does not write it after the header.
        """
        past = list(messages[:index])
        header, reply = self._render_reply(past, prepare_messages([messages[index]])[0], tools)
        prompt = header if start is None else self.prompt([*past, start], tools)
        text = header + reply
        if not text.startswith(prompt):
            raise DataError(
                f"the chat template renders the begun reply ({prompt[-40:]!r}) differently from the whole message "
                f"{index}; write the whole answer as the response"
            )
        return prompt, text[len(prompt) :]

    def _render_reply(self, past: Messages, message: Mapping[str, Any], tools: Sequence[Any] | None) -> tuple[str, str]:
        """Return the generation prompt, and a prepared message as the reply that continues it.

        A template may write a finished turn differently from a generation prompt plus reply (␣ is a space):

            template       end of the prompt             finished turn               reply
            ChatML         2+2?<end>assistant\\n          2+2?<end>assistant\\n4<end>  4<end>
            R1, QwQ        2+2?<bot><think>\\n            2+2?<bot>4<end>             \\n</think>\\n\\n4<end>
            Qwen3, closed  2+2?<bot><think>\\n</think>\\n  2+2?<bot>4<end>             4<end>
            Mistral v0.3   Be brief. 2+2?[/INST]         2+2?[/INST]␣4</s>           ␣4</s>

        The reply is the text after the header (the generation prompt) in the finished turn. If the two texts already
        differ within the header, they are compared from the end of the last message on, without a thought tag that the
        header opens or closes. If the header opens a thought, the reply must close it, even if the template drops the
        thought of a finished turn, as R1's does.
        """
        index = len(past)
        split = self._split_thought(message, index)
        thought = split.thought
        header = self.render(past, tools, adds_header=True) if past else ""
        turn = self.render([*past, message], tools, adds_header=False)
        lost = self._find_lost_parts(past, message, split, tools)
        if turn.startswith(header):
            reply = turn[len(header) :]
        else:
            reply = self._split_rewritten_reply(past, message, tools, header)
        for opening, closing in self.thought_tags.items():
            if thought and header.rstrip().endswith(closing):
                raise DataError(
                    f"message {index} has a thought, but the header of the turn has already closed it "
                    f"({header[-40:]!r}); remove the thought, or change data.chat_template_kwargs, e.g. enable_thinking"
                )
            if header.rstrip().endswith(opening):
                stripped = reply.lstrip()
                if stripped.startswith(opening):
                    reply = stripped.removeprefix(opening).removeprefix("\n")
                if (not thought or "thought" in lost) and not reply.lstrip().startswith(closing):
                    reply = f"\n{closing}\n\n" + reply.lstrip("\n")
                if "thought" in lost:
                    reply = f"{thought}\n" + reply.lstrip("\n")
                    lost.remove("thought")
        # Hunyuan's template turns the content "It is <answer>4</answer>" into "4".
        lost |= {f"whole {part}" for part, text in split.texts.items() if part not in lost and text not in reply}
        if lost:
            raise DataError(
                f"the chat template does not write the {' and the '.join(sorted(lost))} in message {index}; use a "
                "template that does (data.chat_template), or remove it from the message"
            )
        return header, reply

    def _find_lost_parts(
        self, past: Messages, message: Mapping[str, Any], split: SplitContent, tools: Sequence[Any] | None
    ) -> set[str]:
        """Return the parts of a message that the template drops: its thought, its content, or a call.

        Searching the text for the parts is not enough, because a thought "4" is also in the content "2 + 2 = 4". So the
        message is rendered with a placeholder for each part.
        """
        marks = {"thought": THOUGHT_MARK, "content": MARK + "CONTENT"}
        parts = [(part, marks[part]) for part in split.texts]
        marked: dict[str, Any] = {**message, "content": split.marked_thought}
        if find_thought(message):
            marked |= dict.fromkeys(THOUGHT_FIELDS, THOUGHT_MARK)
        if "content" in split.texts:
            marked["content"] += MARK + "CONTENT"
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = []
            for number, call in enumerate(calls):
                name, argument = f"{CALL_MARK}{number}NAME", f"{CALL_MARK}{number}ARGUMENT"
                called = get_function(call).get("name")
                parts += [(f"call of {called}", name), (f"arguments of the call of {called}", argument)]
                marked["tool_calls"].append(replace_function(call, name=name, arguments={argument: True}))
        text = self.render([*past, marked], tools, adds_header=False)
        return {part for part, mark in parts if mark not in text}

    def _split_rewritten_reply(
        self, past: Messages, message: Mapping[str, Any], tools: Sequence[Any] | None, header: str
    ) -> str:
        """Return the reply of a finished turn that does not start with `header`, the generation prompt.

        Both texts are rendered with a mark at the end of the last past message, and compared from there: the turn
        starts with the header, or with the header without its thought tag. Raise DataError if it starts with neither.
        """
        *earlier, last = prepare_messages(past)
        content = last["content"] or ""
        is_text = isinstance(content, str)
        marked_content = content + LAST_MARK if is_text else [*content, {"type": "text", "text": LAST_MARK}]
        marked = [*earlier, {**last, "content": marked_content}]
        _, header_mark, header_end = self.render(marked, tools, adds_header=True).rpartition(LAST_MARK)
        _, turn_mark, turn = self.render([*marked, message], tools, adds_header=False).rpartition(LAST_MARK)
        bare_end = header_end
        for opening, closing in self.thought_tags.items():
            open_or_closed = rf"(?:{re.escape(opening)}\s*)?{re.escape(closing)}\s*\Z|{re.escape(opening)}\s*\Z"
            bare_end = re.sub(open_or_closed, "", bare_end)
        if header_mark and turn_mark:
            for start in (header_end, bare_end):
                if turn.startswith(start):
                    return turn[len(start) :]
        raise DataError(
            f"the chat template does not write message {len(past)} directly after the header of the assistant's turn, "
            f"{header[-40:]!r}, so the answer cannot be separated from the prompt; use a template whose generation "
            "prompt is the beginning of a turn, remove the message's thought, or change data.chat_template_kwargs"
        )

    def _split_thought(self, message: Mapping[str, Any], index: int) -> SplitContent:
        """Return the thought and the answer of a prepared message.

        If the content has only a closing tag, it starts with a thought. R1-style models write such replies, because
        their header has the opening tag. Raise DataError if the content has text before its thought, or an unclosed or
        second tag, or if a field has another thought.
        """
        content = str(message["content"] or "")
        for opening, closing in self.thought_tags.items():
            inside, found, answer = content.partition(closing)
            if found:
                thought = inside.strip().removeprefix(opening).strip()
                if opening in thought or closing in answer:
                    raise DataError(
                        f"message {index} has text before a thought, or a second {opening} or {closing}; begin the "
                        "content with its only thought"
                    )
                if find_thought(message):
                    raise DataError(
                        f"message {index} has one thought in a field and another in its content, before {closing}; "
                        "remove one of them"
                    )
                before = inside.rstrip().removesuffix(thought)
                between = inside[len(before + thought) :] + closing
                return SplitContent(thought, answer, before + THOUGHT_MARK * bool(thought) + between)
            if content.lstrip().startswith(opening):
                raise DataError(f"message {index} opens a thought with {opening} and does not close it; add {closing}")
        return SplitContent(find_thought(message), content, "")

    # -- tokens

    @property
    def has_channels(self) -> bool:
        """True for gpt-oss, whose replies are divided into channels."""
        return "<|channel|>" in self._source

    def find_end(self, text: str) -> int:
        """Return the position of the last special token of a text, or -1."""
        return max((text.rfind(token) for token in self._added_tokens), default=-1)

    def find_call_style(self, tools: Sequence[Any]) -> bool | None:
        """Return True if the template writes calls as bare JSON, False if they have tags, and None if `split_calls`
        cannot parse them.
        """
        call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        with suppress(DataError, ToolCallError):
            _, reply = self.turn([{"role": "user", "content": "?"}, calling], 1, tools)
            for is_bare in (False, True):
                if split_calls(reply, is_bare=is_bare)[1] == [ToolCall("look", {"at": "it"})]:
                    return is_bare
        return None

    def find_text_model(self) -> str | None:
        """Return the path of the tokenizer's model if it reads only text, or None if it reads images."""
        return find_text_model(self.tokenizer.name_or_path)

    @cached_property
    def _images(self) -> ImageProcessor:
        processor = load_image_processor(self.tokenizer.name_or_path)
        if processor is None:
            raise DataError(
                f"a message has an image, but {self.find_text_model()} reads only text; use a vision-language model"
            )
        return processor

    def expand(self, text: str, messages: Messages) -> str:
        """Replace the placeholders of images in the text of `messages` by all tokens that the images fill."""
        images = find_images(messages)
        return self._images.expand(text, images) if images else text

    def find_spans(self, token_ids: Sequence[int], messages: Messages) -> list[ImageSpan]:
        """Return where the images of `messages` are in the tokens of their expanded text."""
        images = find_images(messages)
        return self._images.find_spans(token_ids, images) if images else []

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text at the start of a sequence."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def encode_after(self, context: str, fragment: str) -> list[int]:
        """Return the token ids of `fragment` after `context`.

        Alone, a fragment may have other tokens, because SentencePiece marks the start of text with a space: Llama's
        tokenizer writes "It is" as `▁It ▁is`, but as `It ▁is` after "<|assistant|>\\n". So the fragment is tokenized
        together with the end of the context, from the last special token on, because tokenizers restart there. Then the
        tokens of the context are cut off.

        This fails if the fragment merges with the end of the context, e.g. two line ends to one token. The model has
        read the context's tokens, so the fragment is then tokenized after a character that it does not merge with.
        """
        if not fragment:
            return []
        tail = context[-MAX_TAIL_CHARS:]
        start = self.find_end(tail)
        for before in (tail[start:] if start >= 0 else context, *ANCHORS):
            context_ids, token_ids = self.encode(before), self.encode(before + fragment)
            if token_ids[: len(context_ids)] == context_ids:
                return token_ids[len(context_ids) :]
        return self.encode(fragment)


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}
