import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from train_kit.messages import assistant, system, user
from train_kit.rollouts import STEP, MakeStage, Stage, story
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
from skyrl_train.types import Segment, Trajectory, WeightSpan

PROMPT = [system("Go on."), user("Story a")]
THINKING = {"name_or_path": "qwen3_with_thinking"}
SHOTS = [assistant("ok"), user("now you")]


def result(token_ids: list[int], **fields: Any) -> EngineResult:
    return EngineResult(token_ids, [-0.5] * len(token_ids), "stop", (WeightSpan(0, len(token_ids)),), **fields)


def trained_text(stage: Stage, t: Trajectory) -> str:
    """Return the text of the trained tokens of the last row."""
    return stage.chat.decode_all([token for token, is_one in zip(t.response_ids, t.loss_mask, strict=True) if is_one])


# -- one assistant message


async def test_turns_of_a_single_message_are_joined_without_a_template(make_stage: MakeStage) -> None:
    stage = make_stage(use_conversation_multi_turn=False)
    stage.sampling = replace(stage.sampling, max_new_tokens=25)
    n_turns = 9
    t = await stage.play_story(n_turns=n_turns)
    eos = stage.chat.eos_token_id
    turns, expected, mask = stage.sampled, [], []
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
    t = await stage.play_story(n_turns=3)
    assert len(t.segments) == 3
    history = list(PROMPT)
    for k, (row, turn) in enumerate(zip(t.segments, stage.sampled, strict=True), start=1):
        assert row.prompt_ids == stage.chat.prompt_ids(history) == stage.prompts[k - 1]
        assert (row.response_ids, row.loss_mask) == (turn, [1] * len(turn))
        assert row.rewards == [0.0] * (len(turn) - 1) + [k / 4]
        assert row.logprobs is not None
        history += [assistant(stage.chat.decode(turn)), user(f"And then? ({k} of 3)")]
    assert [len(segment.turns) for segment in t.segments] == [1, 1, 1]
    assert t.total_reward == 1.5


async def test_step_wise_rows_that_continue_each_other_are_merged(make_stage: MakeStage) -> None:
    """The template of the tiny tokenizer does not rewrite replies, so only retokenized replies start a new row."""
    separate, merged = (
        make_stage(step_wise_trajectories=True),
        make_stage(step_wise_trajectories=True, merge_stepwise_output=True),
    )
    whole = await merged.play_story(n_turns=4)
    parts = await separate.play_story(n_turns=4)
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
    stage = make_stage(chat_template=THINKING)
    t = await stage.play_story(n_turns=3)
    assert t.logprobs is None
    assert len(t.segments) == 1
    assert trained_text(stage, t) == "".join(f"{stage.chat.decode(turn)}<|im_end|>" for turn in stage.sampled)
    assert [t.rewards[turn.end - 1] for turn in t.turns] == [0.25, 0.5, 0.75]
    assert t.total_reward == 1.5


@pytest.mark.parametrize(
    ("options", "shots", "metadata"),
    [
        ({}, SHOTS, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, SHOTS, {}),
        ({}, [], {"modified_chat_history": [*PROMPT, assistant("SUMMARY")]}),
    ],
    ids=["replies in the prompt", "without thinking", "replies in a rewritten history"],
)
async def test_a_custom_template_trains_sampled_turns_only(
    make_stage: MakeStage, options: dict[str, Any], shots: list[Any], metadata: dict[str, Any]
) -> None:
    stage = make_stage(chat_template=THINKING, max_turns=2, **options)
    request = story("a", n_turns=2, returns={"step": STEP | {"metadata": metadata}})
    (t,) = await stage.play([replace(request, row=replace(request.row, prompt=[*request.row.prompt, *shots]))])
    assert t.is_valid, t.error
    replies = [stage.chat.decode(turn) for turn in stage.sampled]
    trained = trained_text(stage, t).replace("<think>\n\n</think>\n\n", "").replace("<|im_end|>", "")
    assert trained == "".join(replies[-1:] if metadata else replies)
    assert all(0 <= turn.start < turn.end for turn in t.turns)
    assert t.total_reward == sum(turn.reward for turn in t.turns) == 2.0


async def test_a_rollout_without_turns_is_invalid_under_a_custom_template(make_stage: MakeStage) -> None:
    stage = make_stage(chat_template=THINKING, max_input_length=3)
    t = await stage.play_story()
    assert (t.is_valid, t.stop_reason, t.response_ids) == (False, "prompt_too_long", [])


def test_a_template_without_generation_blocks_is_refused(make_stage: MakeStage, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")
    with pytest.raises(ConfigError, match=r"mine.jinja' does not mark the tokens to train on; .* \{% generation %\}"):
        make_stage(chat_template={"source": "file", "name_or_path": str(file)})


def test_thoughts_of_earlier_turns_are_kept_or_dropped(make_stage: MakeStage) -> None:
    tokenizer = make_stage().generator._chat.tokenizer
    thinking = "<think>\nhm\n</think>\n\n"
    messages = [user("1"), assistant(f"{thinking}A"), user("2"), assistant(f"{thinking}B")]

    def rendered(name: str) -> tuple[str, str]:
        chat = ChatEncoder(tokenizer, (TEMPLATES / f"{name}.jinja").read_text())
        token_ids, mask = chat.conversation_ids(messages)
        return chat.decode_all(token_ids), chat.decode_all(
            [token for token, is_one in zip(token_ids, mask, strict=True) if is_one]
        )

    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    whole, masked = rendered("qwen3_with_thinking")
    assert masked == f"{thinking}A<|im_end|>{thinking}B<|im_end|>"
    assert whole == f"{asked.format(1)}{thinking}A<|im_end|>\n{asked.format(2)}{thinking}B<|im_end|>\n"
    whole, masked = rendered("qwen3_without_thinking")
    assert masked == f"A<|im_end|>{thinking}B<|im_end|>"
    assert whole == f"{asked.format(1)}A<|im_end|>\n{asked.format(2)}{thinking}B<|im_end|>\n"


# -- environments that change the conversation


@pytest.mark.catch_tokenizer
@pytest.mark.parametrize("added", ["", "!?"])
async def test_a_changed_action_keeps_the_tokens_of_its_unchanged_start(make_stage: MakeStage, added: str) -> None:
    stage = make_stage()
    start = (await stage.play_story(n_turns=1)).response_ids[:2]
    action = f"{stage.chat.decode(start)}{added}"
    t = await make_stage().play_story(returns={"step": STEP | {"postprocessed_action": action, "done": True}})
    others = stage.chat.encode(added)
    assert t.response_ids == start + others
    assert t.loss_mask == [1, 1] + [0] * len(others)
    assert t.rewards == [0.0, 1.0] + [0.0] * len(others)  # on a trained token, which estimators read


@pytest.mark.parametrize("mode", [{}, {"use_conversation_multi_turn": False}], ids=["turns", "one message"])
async def test_text_after_the_whole_reply_replaces_its_eos(make_stage: MakeStage, mode: dict[str, Any]) -> None:
    stage = make_stage(**mode)
    eos = stage.generator._chat.eos_token_id
    stories = await stage.play([story(f"{i}", n_turns=1) for i in range(20)])
    free = next(t for t in stories if t.response_ids[-1] == eos and len(t.response_ids) > 1)
    *reply, _ = free.response_ids
    answer = STEP | {"postprocessed_action": f"{stage.chat.decode(reply)}</answer>", "done": True}
    (t,) = await make_stage(**mode).play([story(free.id.instance_id, returns={"step": answer})])
    assert t.response_ids == reply + stage.chat.encode("</answer>")
    assert t.loss_mask[: len(reply)] == [1] * len(reply)


async def test_an_emptied_reply_is_invalid_and_has_no_reward(make_stage: MakeStage) -> None:
    t = await make_stage().play_story(returns={"step": STEP | {"postprocessed_action": "", "done": True}})
    assert (t.is_valid, t.stop_reason) == (False, "empty_response")


@pytest.mark.catch_tokenizer
@pytest.mark.parametrize("mode", [{"step_wise_trajectories": True}, {}], ids=["step-wise", "rewritten history"])
async def test_a_row_without_turns_is_dropped_but_not_its_rewards(make_stage: MakeStage, mode: dict[str, Any]) -> None:
    observations = [user("on and on " * 60)]
    metadata = {} if mode else {"modified_chat_history": observations}
    stage = make_stage(max_input_length=400, max_turns=9, **mode)
    t = await stage.play_story(returns={"step": STEP | {"observations": observations, "metadata": metadata}})
    assert (t.stop_reason, t.last_stop_reason in ("stop", "length")) == ("length", True)
    assert t.segments[-1].turns
    assert all(row.response_ids for row in t.segments)
    batch = build_training_batch([t], 0)
    assert batch.rewards.sum() == t.total_reward == len(t.turns)


async def test_the_budget_of_a_trajectory_counts_observations_in_every_mode(make_stage: MakeStage) -> None:
    stage = make_stage(step_wise_trajectories=True, max_response_length=40)
    t = await stage.play_story(n_turns=9)
    assert t.stop_reason == "length"
    assert len(t.segments[-1].prompt_ids) + len(t.response_ids) - len(t.segments[0].prompt_ids) <= 40


@pytest.mark.parametrize("options", [{}, {"chat_template": THINKING}], ids=["tokens", "custom template"])
async def test_a_replaced_action_is_not_trained(make_stage: MakeStage, options: dict[str, Any]) -> None:
    stage = make_stage(**options)
    t = await stage.play_story(returns={"step": STEP | {"postprocessed_action": "L or R", "done": True}})
    assert "L or R" in stage.chat.decode(t.response_ids)
    assert set(t.loss_mask) == {0}
    assert t.total_reward == 1.0


async def test_a_rewritten_history_starts_a_new_row(make_stage: MakeStage) -> None:
    short = [user("In short.")]
    stage = make_stage(max_turns=3)
    t = await stage.play_story(returns={"step": STEP | {"metadata": {"modified_chat_history": short}}})
    assert t.stop_reason == "max_turns"
    assert len(t.segments) == 3
    rewritten_prompt = stage.chat.prompt_ids([*short, *STEP["observations"]])
    assert [row.prompt_ids for row in t.segments] == [stage.chat.prompt_ids(PROMPT), rewritten_prompt, rewritten_prompt]
    assert [row.response_ids for row in t.segments] == stage.sampled
    assert t.total_reward == 3.0


async def test_a_trajectory_stops_at_max_response_length(make_stage: MakeStage) -> None:
    free = await make_stage().play_story(n_turns=3)
    for budget in (len(free.response_ids) - 1, free.turns[1].end, free.turns[1].start, 2):
        stage = make_stage(max_response_length=budget)
        t = await stage.play_story(n_turns=3)
        assert len(t.response_ids) <= budget
        assert t.response_ids == free.response_ids[: len(t.response_ids)]
        assert t.stop_reason == "length"


async def test_the_context_status_is_added_to_observations(make_stage: MakeStage) -> None:
    stage = make_stage(inject_context_status=True, max_turns=5, max_input_length=400)
    t = await stage.play_story(n_turns=2)
    text = stage.chat.decode_all(t.response_ids[t.turns[0].end : t.turns[1].start])
    n_tokens = t.turns[0].prompt_length + t.turns[0].end
    share = round(100 * n_tokens / 400)
    assert f"And then? (1 of 2)\n[Context: {n_tokens}/400 tokens ({share}%), Turn 1/5]<|im_end|>" in text


async def test_a_stopped_turn_gets_no_eos_token_if_disabled(make_stage: MakeStage) -> None:
    stage = make_stage(append_eos_token_after_stop_str_in_multi_turn=False)
    stage.sampling = replace(stage.sampling, max_new_tokens=40, stop=tuple("aeiou "))
    t = await stage.play_story(n_turns=2)
    assert t.turns[0].stop_reason == "stop"
    between = stage.chat.decode_all(t.response_ids[t.turns[0].end : t.turns[1].start])
    assert between.startswith("\n<|im_start|>user")


async def test_an_environment_may_reward_each_token(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.sampling = replace(stage.sampling, min_new_tokens=4)
    t = await stage.play_story(returns={"step": STEP | {"reward": [0.5, 0, -1, 2], "done": True}})
    assert t.rewards == [0.5, 0.0, -1.0, 2.0]
    assert t.turns[0].reward == 1.5


# -- rows


def test_a_row_keeps_sampling_log_probs_once_a_turn_has_them() -> None:
    row = Segment.start([1, 2])
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


@pytest.mark.catch_tokenizer
async def test_the_sampling_log_probs_differ_where_sampling_was_restricted(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.sampling = replace(stage.sampling, max_new_tokens=12, min_new_tokens=2)
    t = await stage.play_story(n_turns=3)
    sampling_logprobs = t.segments[-1].sampling_logprobs
    assert t.logprobs is not None
    assert sampling_logprobs is not None
    early = {position for turn in t.turns for position in (turn.start, turn.start + 1)}  # without the EOS token
    for position, (sampled_from, model) in enumerate(zip(sampling_logprobs, t.logprobs, strict=True)):
        assert (sampled_from > model) == (position in early)


def test_a_missing_template_is_refused(make_stage: MakeStage, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ValueError, match=r"'qwen4' is not a built-in template .* qwen3_with_thinking, qwen3_without_thinking"
    ):
        make_stage(chat_template={"name_or_path": "qwen4"})
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        make_stage(chat_template={"source": "file", "name_or_path": "nowhere.jinja"})
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- conversations without an agent loop


USER = [user("go")]


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
    conversation.observe([user("end<|im_end|>")])
    before = list(conversation.next_prompt())
    assert before[-1] == chat.eos_token_id
    conversation.add_turn(result([]), "")
    conversation.observe([user("c")])
    assert conversation.next_prompt() == before + chat.encode("c")


def test_a_row_is_merged_only_if_the_history_repeats_it_completely(chat: ChatEncoder) -> None:
    conversation = StepwiseConversation(chat, PROMPT, merges=True)
    rendered = chat.prompt_ids([*PROMPT, assistant("ab"), *USER])
    n_tokens = len(chat.prompt_ids(PROMPT))
    sampled_ids = rendered[n_tokens : n_tokens + 2]
    other = next(token for token in range(3, 300) if token != sampled_ids[-1])
    conversation.add_turn(result([sampled_ids[0], other]), "ab")  # the text does not repeat the last token
    conversation.observe(USER)
    assert len(conversation.rows) == 2
    assert conversation.next_prompt() == rendered


def test_rewards_of_dropped_turns_move_to_the_first_remaining_one(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    template = (TEMPLATES / "qwen3_with_thinking.jinja").read_text()
    conversation = RetokenizedConversation(ChatEncoder(tiny_tokenizer, template), USER)
    for text in ("first", "second", "third"):
        conversation.add_turn(result([7]), text)
        conversation.observe(USER)
    conversation.replace_history([*USER, assistant("third"), *USER])
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
