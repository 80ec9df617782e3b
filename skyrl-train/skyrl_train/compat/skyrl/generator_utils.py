"""Functions for generators written for SkyRL.

The functions that take messages tokenize them, so the result can differ from the sampled tokens. If your generator
knows the sampled tokens, return those instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_train.compat.skyrl.generator import GeneratorOutput, place_reward
from skyrl_train.generators.chat_template import Messages
from skyrl_train.generators.metrics import rollout_metrics
from skyrl_train.rendering.template import ChatTemplate
from skyrl_train.types import Segment, Trajectory, TrajectoryID

BASE: Messages = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
]
"""Messages are rendered after this conversation, because a template may render the first messages differently."""


def get_generation_prompt_ids(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> list[int]:
    """Return the tokens of an assistant header."""
    user = [{"role": "user", "content": ""}]
    without = _render(user, tokenizer, chat_template)
    return _render(user, tokenizer, chat_template, add_generation_prompt=True)[len(without) :]


def encode_messages_subset(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
) -> list[int]:
    """Return the tokens of messages in the middle of a conversation."""
    n_before = len(_render(BASE, tokenizer, chat_template))
    return _render([*BASE, *messages], tokenizer, chat_template)[n_before:]


def get_response_ids_and_loss_mask_from_messages(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    assistant_logprobs: Sequence[Sequence[float] | None] | None = None,
    chat_template: str | None = None,
) -> tuple[list[int], list[int], list[float] | None]:
    """Return the tokens of the messages after a prompt, their loss mask, and their log-probs if given.

    The mask is 1 on the text of assistant messages and the EOS token after it. `assistant_logprobs` lists the log-probs
    of exactly these tokens, one list per assistant message. Other tokens get log-prob 0.

    Raises:
        ValueError: a message is neither from the user nor the assistant, or log-probs do not match its tokens.
    """
    n_replies = sum(message["role"] == "assistant" for message in messages)
    if assistant_logprobs is not None and len(assistant_logprobs) != n_replies:
        raise ValueError(f"assistant_logprobs has {len(assistant_logprobs)} entries for {n_replies} assistant messages")
    of_replies = iter([list(row or ()) for row in assistant_logprobs or ()])
    header = get_generation_prompt_ids(tokenizer, chat_template)
    response_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    for number, message in enumerate(messages):
        token_ids = encode_messages_subset([message], tokenizer, chat_template)
        start = end = len(token_ids)
        if message["role"] == "assistant":
            if token_ids[: len(header)] != header:
                raise ValueError("the chat template does not start assistant messages with its generation prompt")
            start, eos_id = len(header), tokenizer.eos_token_id
            if eos_id in token_ids:
                end -= token_ids[::-1].index(eos_id)
        elif message["role"] != "user":
            raise ValueError(f"message {number} has the role {message['role']!r}, but it must be user or assistant")
        sampled = [0.0] * (end - start)
        if assistant_logprobs is not None and message["role"] == "assistant":
            sampled = next(of_replies)
            if len(sampled) != end - start:
                raise ValueError(f"message {number} has {end - start} sampled tokens but {len(sampled)} log-probs")
        n_after = len(token_ids) - end
        response_ids += token_ids
        loss_mask += [0] * start + [1] * (end - start) + [0] * n_after
        logprobs += [0.0] * start + sampled + [0.0] * n_after
    return response_ids, loss_mask, None if assistant_logprobs is None else logprobs


def apply_overlong_filtering(
    loss_masks: Sequence[list[int]], response_ids: Sequence[Sequence[int]], eos_token_id: int
) -> list[list[int]]:
    """Zero the loss masks of responses that do not end with the EOS token."""
    return [
        list(mask) if ids and ids[-1] == eos_token_id else [0] * len(mask)
        for mask, ids in zip(loss_masks, response_ids, strict=True)
    ]


def concatenate_generator_outputs(outputs: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """Join the lists that all outputs have and average their `rollout_metrics`.

    An output without `is_last_step` has one row per trajectory.
    """
    dicts = cast(Sequence[Mapping[str, Any]], outputs)
    if any("is_last_step" in output for output in dicts):
        dicts = [{"is_last_step": [True] * len(output["response_ids"]), **output} for output in dicts]
    first, *others = dicts
    joined = {
        name: [entry for output in dicts for entry in output[name]]
        for name, entries in first.items()
        if isinstance(entries, list) and all(isinstance(output.get(name), list) for output in others)
    }
    joined.setdefault("rollout_logprobs", cast(Any, None))
    reported = [output.get("rollout_metrics") or {} for output in outputs]
    return cast(GeneratorOutput, {**joined, "rollout_metrics": default_aggregate_metrics(reported)})


def get_rollout_metrics(
    responses: Sequence[Sequence[int]],
    rewards: Sequence[float | list[float]],
    env_metrics: Sequence[dict[str, Any]] | None = None,
    env_classes: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return the metrics `generate/*` of lengths, and `environment/*`. The trainer also computes them itself."""
    trajectories = []
    for number, (response, reward) in enumerate(zip(responses, rewards, strict=True)):
        mask = [1] * len(response)
        per_token = place_reward(reward, mask)
        trajectory = Trajectory(
            id=TrajectoryID(str(number), 0),
            env_class=env_classes[number] if env_classes else "unknown",
            data_source="unknown",
            segments=(Segment(list(response), 0, mask, per_token),),
            stop_reason="stop",
            env_metrics=env_metrics[number] if env_metrics else {},
        )
        trajectories.append(trajectory)
    counts = ("generate/n_invalid", "generate/n_retries")
    return {name: value for name, value in rollout_metrics(trajectories).items() if name not in counts}


def _render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    template = ChatTemplate(tokenizer, chat_template)
    return template.encode(template.render(messages, adds_header=add_generation_prompt))
