"""Conversation modes, in the real agent loop with the real engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from generators.conftest import MakeStage, Stage, story
from generators.environments import Journal
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import ConfigError
from skyrl_train.generators.chat_template import TEMPLATES, ChatEncoder
from skyrl_train.generators.conversation import (
    RetokenizedConversation,
    SingleMessageConversation,
    StepwiseConversation,
    TokenConversation,
    _n_common_tokens,
)
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.types import SegmentBuilder, Trajectory, WeightSpan

ON = {"observations": [{"role": "user", "content": "on"}], "reward": 1.0, "done": False, "metadata": {}}
PROMPT = [{"role": "system", "content": "Go on."}, {"role": "user", "content": "Story a"}]


def result(token_ids: list[int], **fields: Any) -> EngineResult:
    return EngineResult(token_ids, [-0.5] * len(token_ids), "stop", (WeightSpan(0, len(token_ids)),), **fields)


async def play(stage: Stage, **extras: Any) -> Trajectory:
    (t,) = await stage.play([story("a", **extras)])
    assert t.is_valid, t.error
    return t


def sampled(stage: Stage) -> list[list[int]]:
    return [result.token_ids for _, result in stage.engine.exchanges]


def prompts(stage: Stage) -> list[list[int]]:
    return [request.prompt_ids for request, _ in stage.engine.exchanges]


# -- one assistant message


async def test_turns_of_a_single_message_are_joined_without_a_template(make_stage: MakeStage) -> None:
    stage = make_stage(use_conversation_multi_turn=False)
    stage.sampling = replace(stage.sampling, max_new_tokens=25)
    n_turns = 9
    t = await play(stage, n_turns=n_turns)
    eos = stage.chat.eos_token_id
    turns, expected, mask = sampled(stage), [], []
    for k, turn in enumerate(turns, start=1):
        kept = turn[:-1] if turn[-1] == eos and k < n_turns else turn
        expected += kept
        mask += [1] * len(kept)
        if k < n_turns:
            observation = stage.chat.encode(f"And then? ({k} of {n_turns})")
            expected += observation
            mask += [0] * len(observation)
    assert any(turn[-1] == eos for turn in turns[:-1]), "no turn sampled the EOS token that is removed between turns"
    assert (t.response_ids, t.loss_mask) == (expected, mask)
    assert [turn.reward for turn in t.turns] == [k / 4 for k in range(1, n_turns + 1)]
    assert t.total_reward == sum(range(1, n_turns + 1)) / 4


# -- step-wise rows


async def test_step_wise_turns_are_rows_with_their_history_as_prompt(make_stage: MakeStage) -> None:
    stage = make_stage(step_wise_trajectories=True)
    t = await play(stage, n_turns=3)
    assert len(t.segments) == 3
    history = list(PROMPT)
    for k, (row, turn) in enumerate(zip(t.segments, sampled(stage), strict=True), start=1):
        assert row.prompt_ids == stage.chat.prompt_ids(history) == prompts(stage)[k - 1]
        assert (row.response_ids, row.loss_mask) == (turn, [1] * len(turn))
        assert row.rewards == [0.0] * (len(turn) - 1) + [k / 4]
        assert row.logprobs is not None
        history += [
            {"role": "assistant", "content": stage.chat.decode(turn)},
            {"role": "user", "content": f"And then? ({k} of 3)"},
        ]
    assert [len(segment.turns) for segment in t.segments] == [1, 1, 1]
    assert t.total_reward == 1.5


async def test_step_wise_rows_that_continue_each_other_are_merged(make_stage: MakeStage) -> None:
    """The template of the tiny tokenizer does not rewrite replies, so only retokenized replies start a new row."""
    separate, merged = (
        make_stage(step_wise_trajectories=True),
        make_stage(step_wise_trajectories=True, merge_stepwise_output=True),
    )
    whole = await play(merged, n_turns=4)
    parts = await play(separate, n_turns=4)
    assert len(parts.segments) == 4
    assert len(whole.segments) < 4
    for row in whole.segments:
        for earlier, later in pairwise(row.turns):
            assert later.prompt_length == len(row.prompt_ids) + later.start
            assert earlier.end < later.start
        assert sum(row.loss_mask) == sum(turn.end - turn.start for turn in row.turns)
    assert whole.total_reward == parts.total_reward
    assert sum(sum(row.loss_mask) for row in whole.segments) == sum(sum(row.loss_mask) for row in parts.segments)


# -- a custom template


async def test_a_custom_template_masks_by_its_generation_blocks(make_stage: MakeStage) -> None:
    stage = make_stage(chat_template={"name_or_path": "qwen3_with_thinking"})
    t = await play(stage, n_turns=3)
    chat = ChatEncoder(stage.generator._chat.tokenizer, (TEMPLATES / "qwen3_with_thinking.jinja").read_text())
    assert t.logprobs is None
    assert len(t.segments) == 1
    replies = [chat.decode(turn) for turn in sampled(stage)]
    text = chat.decode_all([token for token, is_one in zip(t.response_ids, t.loss_mask, strict=True) if is_one])
    assert text == "".join(f"{turn}<|im_end|>" for turn in replies)
    assert [t.rewards[turn.end - 1] for turn in t.turns] == [0.25, 0.5, 0.75]
    assert t.total_reward == 1.5


async def test_only_sampled_turns_are_trained(make_stage: MakeStage) -> None:
    stage = make_stage(
        chat_template={"name_or_path": "qwen3_with_thinking"}, chat_template_kwargs={"enable_thinking": False}
    )
    request = story("a", n_turns=2)
    shots = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "now you"}]
    (t,) = await stage.play([replace(request, row=replace(request.row, prompt=[*request.row.prompt, *shots]))])
    assert t.is_valid, t.error
    replies = [stage.chat.decode(turn) for turn in sampled(stage)]
    trained = [token for token, is_one in zip(t.response_ids, t.loss_mask, strict=True) if is_one]
    assert stage.chat.decode(trained).replace("<think>\n\n</think>\n\n", "") == "".join(replies)
    assert len(t.turns) == 2


async def test_a_custom_template_does_not_train_replaced_actions(make_stage: MakeStage, journal: Journal) -> None:
    stage = make_stage(chat_template={"name_or_path": "qwen3_with_thinking"})
    t = await play(stage, returns={"step": ON | {"postprocessed_action": "L or R", "done": True}})
    assert "L or R" in stage.chat.decode(t.response_ids)
    assert set(t.loss_mask) == {0}
    assert t.total_reward == 1.0


async def test_a_custom_template_trains_turns_of_a_rewritten_history_only(
    make_stage: MakeStage, journal: Journal
) -> None:
    """The histories contain replies of the prompt and of the environment."""
    shots = [{"role": "assistant", "content": "SHOT"}, {"role": "user", "content": "now you"}]
    history = [*PROMPT, {"role": "assistant", "content": "SUMMARY"}]
    for extra, metadata in (([], {"modified_chat_history": history}), (shots, {})):
        stage = make_stage(chat_template={"name_or_path": "qwen3_with_thinking"}, max_turns=2)
        request = story("a", n_turns=2, returns={"step": ON | {"metadata": metadata}})
        (t,) = await stage.play([replace(request, row=replace(request.row, prompt=[*request.row.prompt, *extra]))])
        assert t.is_valid, t.error
        trained = [token for token, is_one in zip(t.response_ids, t.loss_mask, strict=True) if is_one]
        replies = [stage.chat.decode(turn) for turn in sampled(stage)]
        assert stage.chat.decode(trained) == "".join(replies[-1:] if metadata else replies)
        assert all(0 <= turn.start < turn.end for turn in t.turns)
        assert t.total_reward == sum(turn.reward for turn in t.turns) == 2.0


async def test_a_rollout_without_turns_is_invalid_under_a_custom_template(make_stage: MakeStage) -> None:
    stage = make_stage(chat_template={"name_or_path": "qwen3_with_thinking"}, max_input_length=3)
    (t,) = await stage.play([story("a")])
    assert (t.is_valid, t.stop_reason, t.response_ids) == (False, "prompt_too_long", [])


def test_a_template_without_generation_blocks_is_refused(make_stage: MakeStage, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")
    with pytest.raises(ConfigError, match=r"mine.jinja' does not mark the tokens to train on; .* \{% generation %\}"):
        make_stage(chat_template={"source": "file", "name_or_path": str(file)})


def test_thoughts_of_earlier_turns_are_kept_or_dropped(make_stage: MakeStage) -> None:
    tokenizer = make_stage().generator._chat.tokenizer
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nB"},
    ]

    def rendered(name: str) -> tuple[str, str]:
        chat = ChatEncoder(tokenizer, (TEMPLATES / f"{name}.jinja").read_text())
        token_ids, mask = chat.conversation_ids(messages)
        return chat.decode_all(token_ids), chat.decode_all(
            [token for token, is_one in zip(token_ids, mask, strict=True) if is_one]
        )

    thinking = "<think>\nhm\n</think>\n\n"
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    whole, masked = rendered("qwen3_with_thinking")
    assert masked == f"{thinking}A<|im_end|>{thinking}B<|im_end|>"
    assert whole == f"{user.format(1)}{thinking}A<|im_end|>\n{user.format(2)}{thinking}B<|im_end|>\n"
    whole, masked = rendered("qwen3_without_thinking")
    assert masked == f"A<|im_end|>{thinking}B<|im_end|>"
    assert whole == f"{user.format(1)}A<|im_end|>\n{user.format(2)}{thinking}B<|im_end|>\n"


async def test_chat_template_kwargs_are_passed_to_the_template(make_stage: MakeStage) -> None:
    template = {"name_or_path": "qwen3_with_thinking"}
    plain = make_stage(chat_template=template)
    quiet = make_stage(chat_template=template, chat_template_kwargs={"enable_thinking": False})
    for stage in (plain, quiet):
        await play(stage, n_turns=1)
    added = quiet.chat.decode_all(prompts(quiet)[0]).removeprefix(plain.chat.decode_all(prompts(plain)[0]))
    assert added == "<think>\n\n</think>\n\n"


# -- environments that change the conversation


async def test_a_shortened_action_keeps_its_sampled_tokens(make_stage: MakeStage, journal: Journal) -> None:
    stage = make_stage()
    (free,) = await stage.play([story("a", n_turns=1)])
    tokens = free.response_ids
    short = stage.chat.decode(tokens[:2])
    t = await play(make_stage(), returns={"step": ON | {"postprocessed_action": short, "done": True}})
    assert t.response_ids == tokens[:2]
    assert t.loss_mask == [1, 1]
    assert t.rewards == [0.0, 1.0]


async def test_a_changed_action_keeps_the_sampled_tokens_of_its_unchanged_start(
    make_stage: MakeStage, journal: Journal
) -> None:
    stage = make_stage()
    (free,) = await stage.play([story("a", n_turns=1)])
    start = stage.chat.decode(free.response_ids[:2])
    t = await play(make_stage(), returns={"step": ON | {"postprocessed_action": f"{start}!?", "done": True}})
    assert t.response_ids == free.response_ids[:2] + stage.chat.encode("!?")
    assert t.loss_mask == [1, 1] + [0] * (len(t.response_ids) - 2)
    assert t.rewards == [0.0, 1.0] + [0.0] * (len(t.response_ids) - 2)  # on a trained token, which estimators read


@pytest.mark.parametrize("mode", [{}, {"use_conversation_multi_turn": False}], ids=["turns", "one message"])
async def test_text_after_the_whole_reply_replaces_its_eos(
    make_stage: MakeStage, journal: Journal, mode: dict[str, Any]
) -> None:
    stage = make_stage(**mode)
    eos = stage.generator._chat.eos_token_id
    stories = await stage.play([story(f"{i}", n_turns=1) for i in range(20)])
    free = next(t for t in stories if t.response_ids[-1] == eos and len(t.response_ids) > 1)
    *reply, _ = free.response_ids
    answer = ON | {"postprocessed_action": f"{stage.chat.decode(reply)}</answer>", "done": True}
    (t,) = await make_stage(**mode).play([story(free.id.instance_id, returns={"step": answer})])
    assert t.response_ids == reply + stage.chat.encode("</answer>")
    assert t.loss_mask[: len(reply)] == [1] * len(reply)


async def test_an_emptied_reply_is_invalid_and_has_no_reward(make_stage: MakeStage, journal: Journal) -> None:
    (t,) = await make_stage().play([story("a", returns={"step": ON | {"postprocessed_action": "", "done": True}})])
    assert (t.is_valid, t.stop_reason) == (False, "empty_response")


@pytest.mark.parametrize("mode", [{"step_wise_trajectories": True}, {}], ids=["step-wise", "rewritten history"])
async def test_a_row_without_turns_is_dropped_without_losing_rewards(
    make_stage: MakeStage, journal: Journal, mode: dict[str, Any]
) -> None:
    observations = [{"role": "user", "content": "on and on " * 60}]
    metadata = {} if mode else {"modified_chat_history": observations}
    stage = make_stage(max_input_length=400, max_turns=9, **mode)
    t = await play(stage, returns={"step": ON | {"observations": observations, "metadata": metadata}})
    assert (t.stop_reason, t.last_stop_reason in ("stop", "length")) == ("length", True)
    assert t.segments[-1].turns
    assert all(row.response_ids for row in t.segments)
    batch = build_training_batch([t], 0)
    assert batch.rewards.sum() == t.total_reward == len(t.turns)


async def test_the_budget_of_a_trajectory_counts_observations_in_every_mode(make_stage: MakeStage) -> None:
    stage = make_stage(step_wise_trajectories=True, max_response_length=40)
    t = await play(stage, n_turns=9)
    assert t.stop_reason == "length"
    assert len(t.segments[-1].prompt_ids) + len(t.response_ids) - len(t.segments[0].prompt_ids) <= 40


async def test_a_replaced_action_is_not_trained(make_stage: MakeStage, journal: Journal) -> None:
    stage = make_stage()
    t = await play(stage, returns={"step": ON | {"postprocessed_action": "L or R", "done": True}})
    assert stage.chat.decode(t.response_ids) == "L or R"
    assert set(t.loss_mask) == {0}
    assert t.total_reward == 1.0


async def test_a_rewritten_history_starts_a_new_row(make_stage: MakeStage, journal: Journal) -> None:
    short = [{"role": "user", "content": "In short."}]
    stage = make_stage(max_turns=3)
    t = await play(stage, returns={"step": ON | {"metadata": {"modified_chat_history": short}}})
    assert t.stop_reason == "max_turns"
    assert len(t.segments) == 3
    rewritten_prompt = stage.chat.prompt_ids([*short, *ON["observations"]])  # type: ignore[misc]
    assert [row.prompt_ids for row in t.segments] == [stage.chat.prompt_ids(PROMPT), rewritten_prompt, rewritten_prompt]
    assert [row.response_ids for row in t.segments] == sampled(stage)
    assert t.total_reward == 3.0


async def test_an_environment_that_is_never_done_stops_at_max_turns(make_stage: MakeStage) -> None:
    stage = make_stage(max_turns=4)
    t = await play(stage, n_turns=-1)
    assert (len(t.turns), t.stop_reason, t.total_reward) == (4, "max_turns", 0.25 * (1 + 2 + 3 + 4))


async def test_a_trajectory_stops_at_max_response_length(make_stage: MakeStage) -> None:
    free = await play(make_stage(), n_turns=3)
    for budget in (len(free.response_ids) - 1, free.turns[1].end, free.turns[1].start, 2):
        stage = make_stage(max_response_length=budget)
        t = await play(stage, n_turns=3)
        assert len(t.response_ids) <= budget
        assert t.response_ids == free.response_ids[: len(t.response_ids)]
        assert t.stop_reason == "length"


async def test_the_context_status_is_added_to_observations(make_stage: MakeStage) -> None:
    stage = make_stage(inject_context_status=True, max_turns=5, max_input_length=400)
    t = await play(stage, n_turns=2)
    text = stage.chat.decode_all(t.response_ids[t.turns[0].end : t.turns[1].start])
    n_tokens = t.turns[0].prompt_length + t.turns[0].end
    share = round(100 * n_tokens / 400)
    assert f"And then? (1 of 2)\n[Context: {n_tokens}/400 tokens ({share}%), Turn 1/5]<|im_end|>" in text


async def test_a_stopped_turn_gets_no_eos_token_if_disabled(make_stage: MakeStage) -> None:
    stage = make_stage(append_eos_token_after_stop_str_in_multi_turn=False)
    stage.sampling = replace(stage.sampling, max_new_tokens=40, stop=tuple("aeiou "))
    t = await play(stage, n_turns=2)
    assert t.turns[0].stop_reason == "stop"
    between = stage.chat.decode_all(t.response_ids[t.turns[0].end : t.turns[1].start])
    assert between.startswith("\n<|im_start|>user")


async def test_an_environment_may_reward_each_token(make_stage: MakeStage, journal: Journal) -> None:
    stage = make_stage()
    stage.sampling = replace(stage.sampling, min_new_tokens=4)
    t = await play(stage, returns={"step": ON | {"reward": [0.5, 0, -1, 2], "done": True}})
    assert t.rewards == [0.5, 0.0, -1.0, 2.0]
    assert t.turns[0].reward == 1.5


# -- rows


def test_a_row_keeps_sampling_log_probs_once_a_turn_has_them() -> None:
    row = SegmentBuilder([1, 2], 2)
    row.append_sampled([5, 6], [-0.5, -0.5], None)
    row.append_observed([7])
    assert row.sampling_logprobs is None
    row.append_sampled([8], [-0.5], [-0.1])
    row.append_observed([9])
    assert row.logprobs == [-0.5, -0.5, 0.0, -0.5, 0.0]
    assert row.sampling_logprobs == [-0.5, -0.5, 0.0, -0.1, 0.0]
    row.truncate(4)
    assert (row.token_ids, row.loss_mask) == ([1, 2, 5, 6, 7, 8], [1, 1, 0, 1])
    assert row.sampling_logprobs == [-0.5, -0.5, 0.0, -0.1]


async def test_a_trajectory_has_both_kinds_of_log_probs(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.sampling = replace(stage.sampling, top_p=0.7, repetition_penalty=1.2)
    t = await play(stage, n_turns=2)
    sampling_logprobs = t.segments[-1].sampling_logprobs
    assert t.logprobs is not None
    assert sampling_logprobs is not None
    for position, is_sampled in enumerate(t.loss_mask):
        assert (sampling_logprobs[position] == 0.0) or is_sampled
    assert sampling_logprobs != t.logprobs


async def test_min_new_tokens_changes_the_sampling_log_probs_of_early_tokens_only(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.sampling = replace(stage.sampling, max_new_tokens=12, min_new_tokens=2)
    t = await play(stage, n_turns=3)
    sampling_logprobs = t.segments[-1].sampling_logprobs
    assert t.logprobs is not None
    assert sampling_logprobs is not None
    early = {position for turn in t.turns for position in (turn.start, turn.start + 1)}
    for position, (sampled_from, model) in enumerate(zip(sampling_logprobs, t.logprobs, strict=True)):
        assert (sampled_from > model) == (position in early)


def test_a_missing_template_is_refused(make_stage: MakeStage, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"'qwen4' is not a template .* qwen3_with_thinking, qwen3_without_thinking"):
        make_stage(chat_template={"name_or_path": "qwen4"})
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        make_stage(chat_template={"source": "file", "name_or_path": "nowhere.jinja"})
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- conversations without an agent loop


USER = [{"role": "user", "content": "go"}]


@pytest.fixture
def chat(tiny_tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    return ChatEncoder(tiny_tokenizer)


def test_a_truncated_turn_gets_an_eos_token_even_if_stopped_turns_do_not(chat: ChatEncoder) -> None:
    ends = {}
    for stop_reason in ("stop", "length"):
        conversation = TokenConversation(chat, PROMPT, ends_stopped_turns=False)
        reply = chat.encode("ab")
        conversation.add_turn(replace(result(reply), stop_reason=stop_reason), "ab")
        n_tokens = len(conversation.next_prompt())
        conversation.observe(USER)
        ends[stop_reason] = conversation.next_prompt()[n_tokens] == chat.eos_token_id
    assert ends == {"stop": False, "length": True}


def test_an_empty_turn_does_not_remove_a_token_of_the_observation_before_it(chat: ChatEncoder) -> None:
    conversation = SingleMessageConversation(chat, PROMPT)
    conversation.add_turn(result(chat.encode("ab")), "ab")
    conversation.observe([{"role": "user", "content": "end<|im_end|>"}])
    before = list(conversation.next_prompt())
    assert before[-1] == chat.eos_token_id
    conversation.add_turn(result([]), "")
    conversation.observe([{"role": "user", "content": "c"}])
    assert conversation.next_prompt() == before + chat.encode("c")


def test_a_row_is_merged_only_if_the_history_repeats_it_completely(chat: ChatEncoder) -> None:
    conversation = StepwiseConversation(chat, PROMPT, merges=True)
    rendered = chat.prompt_ids([*PROMPT, {"role": "assistant", "content": "ab"}, *USER])
    n_tokens = len(chat.prompt_ids(PROMPT))
    sampled_ids = rendered[n_tokens : n_tokens + 2]
    other = next(token for token in range(3, 300) if token != sampled_ids[-1])
    conversation.add_turn(result([sampled_ids[0], other]), "ab")  # the text does not repeat the last token
    conversation.observe(USER)
    assert len(conversation.rows) == 2
    assert conversation.next_prompt() == rendered


def test_rewards_of_dropped_turns_move_to_the_first_remaining_turn(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    template = (TEMPLATES / "qwen3_with_thinking.jinja").read_text()
    conversation = RetokenizedConversation(ChatEncoder(tiny_tokenizer, template), USER)
    for text in ("first", "second", "third"):
        conversation.add_turn(result([7]), text)
        conversation.observe(USER)
    conversation.replace_history([*USER, {"role": "assistant", "content": "third"}, *USER])
    conversation.add_turn(result([7]), "fourth")
    conversation.finish()
    spans = [(turn.start, turn.end) for turn in conversation.turns]
    assert spans[0] == spans[1] == spans[2] < spans[3]


def test_a_token_that_ends_within_a_character_is_not_kept() -> None:
    """The sampled tokens spell "aéz", and the environment used "aéb". The middle token is half of the é."""
    pieces = [b"a", b"\xc3", b"\xa9z"]

    def decode(token_ids: list[int]) -> str:
        return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

    assert _n_common_tokens(decode, [0, 1, 2], "aéb") == 1
    assert _n_common_tokens(decode, [0, 1, 2], "aéz!") == 3
