"""Functions for generators that are written for SkyRL."""

from typing import Any

import pytest
from train_kit.messages import assistant, render, render_prompt, user
from transformers import PreTrainedTokenizerBase

from skyrl_train.compat.skyrl.generator_utils import (
    apply_overlong_filtering,
    concatenate_generator_outputs,
    encode_messages_subset,
    get_generation_prompt_ids,
    get_response_ids_and_loss_mask_from_messages,
    get_rollout_metrics,
)

PROMPT = [user("What is 2 + 2?")]
REPLIES: list[Any] = [assistant("5"), user("No."), assistant("4")]


def test_parts_of_a_conversation_are_the_tokens_of_the_whole(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    whole = render(tiny_tokenizer, [*PROMPT, *REPLIES])
    n_prompt = len(render(tiny_tokenizer, PROMPT))
    assert encode_messages_subset(REPLIES, tiny_tokenizer) == whole[n_prompt:]
    header = get_generation_prompt_ids(tiny_tokenizer)
    assert [*whole[:n_prompt], *header] == render_prompt(tiny_tokenizer, PROMPT)


def test_what_assistants_wrote_is_trained_with_its_end(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids, mask, logprobs = get_response_ids_and_loss_mask_from_messages(REPLIES, tiny_tokenizer)
    assert token_ids == encode_messages_subset(REPLIES, tiny_tokenizer)
    trained = [token_id for token_id, is_trained in zip(token_ids, mask, strict=True) if is_trained]
    assert tiny_tokenizer.decode(trained) == "5<|im_end|>4<|im_end|>"
    assert logprobs is None


def test_logprobs_are_on_the_trained_tokens(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    given = [[-0.1, -0.2], [-0.3, -0.4]]
    _, mask, logprobs = get_response_ids_and_loss_mask_from_messages(REPLIES, tiny_tokenizer, given)
    assert logprobs is not None
    assert [value for value, is_trained in zip(logprobs, mask, strict=True) if is_trained] == [-0.1, -0.2, -0.3, -0.4]
    assert [value for value, is_trained in zip(logprobs, mask, strict=True) if not is_trained] == [0.0] * mask.count(0)


@pytest.mark.parametrize(
    ("messages", "logprobs", "message"),
    [
        (REPLIES, [[-0.1, -0.2]], "1 entries for 2 assistant messages"),
        (REPLIES, [[-0.1, -0.2], None], "message 2 has 2 sampled tokens but 0 log-probs"),
        (REPLIES, [[-0.1], [-0.3, -0.4]], "message 0 has 2 sampled tokens but 1 log-probs"),
        ([{"role": "tool", "content": "4"}], None, "message 0 has the role 'tool'"),
    ],
)
def test_other_messages_and_logprobs_are_refused(
    messages: Any, logprobs: Any, message: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=message):
        get_response_ids_and_loss_mask_from_messages(messages, tiny_tokenizer, logprobs)


def test_a_template_without_the_header_of_assistants_is_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}> {% endif %}"
    )
    with pytest.raises(ValueError, match="does not start assistant messages"):
        get_response_ids_and_loss_mask_from_messages(REPLIES, tiny_tokenizer, chat_template=template)


def test_responses_without_their_end_are_filtered() -> None:
    assert apply_overlong_filtering([[1, 1], [1, 0, 1], []], [[5, 2], [5, 6, 7], []], 2) == [[1, 1], [0, 0, 0], []]


def test_outputs_are_joined_by_their_common_lists() -> None:
    first: Any = {"response_ids": [[1]], "rewards": [1.0], "rollout_logprobs": [[-1.0]], "rollout_metrics": {"x": 1.0}}
    second: Any = {"response_ids": [[2], [3]], "rewards": [2.0, 3.0], "rollout_logprobs": None, "rollout_metrics": None}
    assert concatenate_generator_outputs([first, second]) == {
        "response_ids": [[1], [2], [3]],
        "rewards": [1.0, 2.0, 3.0],
        "rollout_logprobs": None,
        "rollout_metrics": {"x": 1.0},
    }
    assert concatenate_generator_outputs([first, first])["rollout_logprobs"] == [[-1.0]] * 2
    steps = {**first, "response_ids": [[1], [2]], "is_last_step": [False, True]}
    for outputs, expected in (([steps, first], [False, True, True]), ([first, steps], [True, False, True])):
        assert concatenate_generator_outputs(outputs)["is_last_step"] == expected


def test_metrics_of_lengths_and_environments() -> None:
    metrics = get_rollout_metrics([[1, 2], [3]], [1.0, [0.0]], [{"won": True}, {"won": False}], ["guess", "guess"])
    assert metrics["generate/avg_num_tokens"] == 1.5
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 2
    assert metrics["environment/won"] == metrics["environment/guess/won"] == 0.5
    assert not any(name.startswith("generate/n_") for name in metrics)
    assert get_rollout_metrics([[1]], [1.0])["generate/max_num_tokens"] == 1
