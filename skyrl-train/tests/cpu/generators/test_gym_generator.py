import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from train_kit.environments import METHODS, Journal
from train_kit.messages import user
from train_kit.rollouts import MakeStage, Stage, story
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.generators.base import RolloutRequest, request_seed, rollout_requests
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.types import DrawnPrompt, Trajectory
from skyrl_train.types.tokens import Phase

REQUESTS = [story(str(uid), repetition, n_turns=uid + 1) for uid in range(4) for repetition in range(3)]
BATCHED = pytest.mark.parametrize("batched", [False, True], ids=["unbatched", "batched"])


def assert_same(actual: Sequence[Trajectory], expected: Sequence[Trajectory]) -> None:
    """Compare everything but timing; the last digits of log-probs depend on the batches of the engine."""
    for one, other in zip(actual, expected, strict=True):
        for segment, other_segment in zip(one.segments, other.segments, strict=True):
            assert segment.logprobs == pytest.approx(other_segment.logprobs, abs=1e-5)
            assert replace(segment, logprobs=other_segment.logprobs) == other_segment
        assert replace(one, timing={}, segments=other.segments) == replace(other, timing={})


def assert_matches_engine(t: Trajectory, stage: Stage) -> None:
    """Assert that each turn of `t` continues the tokens of the previous turn, and that `t` contains nothing else."""
    exchanges = stage.engine.session(t.id, t.n_attempts - 1)
    assert len(exchanges) == len(t.turns)
    conversation, loss_mask, logprobs, rewards = [], [], [], []
    for k, ((request, result), turn) in enumerate(zip(exchanges, t.turns, strict=True), start=1):
        assert request.prompt_ids[: len(conversation)] == conversation
        observation = request.prompt_ids[len(conversation) :]
        if k == 1:
            assert observation == t.prompt_ids
        else:
            text = f"And then? ({k - 1} of {len(t.turns)})"
            assert observation == stage.chat.observation_ids([user(text)], conversation[-1])
            loss_mask += [0] * len(observation)
            logprobs += [0.0] * len(observation)
            rewards += [0.0] * len(observation)
        assert (turn.prompt_length, turn.stop_reason) == (len(request.prompt_ids), result.stop_reason)
        assert (turn.start, turn.reward, turn.weight_spans) == (len(loss_mask), k / 4, result.weight_spans)
        loss_mask += [1] * len(result.token_ids)
        logprobs += result.logprobs
        rewards += [0.0] * (len(result.token_ids) - 1) + [k / 4]
        assert turn.end == len(loss_mask)
        conversation = request.prompt_ids + result.token_ids
    assert t.prompt_ids + t.response_ids == conversation
    assert (t.loss_mask, t.logprobs, t.rewards) == (loss_mask, logprobs, rewards)
    assert t.stop_reason == exchanges[-1][1].stop_reason


@BATCHED
async def test_trajectories_are_the_prompts_and_samples_of_the_engine(make_stage: MakeStage, batched: bool) -> None:
    stage = make_stage(batched=batched)
    trajectories = await stage.play(REQUESTS)
    assert [t.id for t in trajectories] == [request.id for request in REQUESTS]
    assert {turn.stop_reason for t in trajectories for turn in t.turns[:-1]} == {"stop", "length"}
    for t, request in zip(trajectories, REQUESTS, strict=True):
        assert t.is_valid
        assert len(t.turns) == request.row.env_extras["n_turns"]
        assert_matches_engine(t, stage)


@pytest.mark.catch_tokenizer
async def test_batched_and_unbatched_rollouts_give_the_same_trajectories(make_stage: MakeStage) -> None:
    unbatched, batched = make_stage(batched=False), make_stage(batched=True)
    expected = await unbatched.play(REQUESTS)
    assert_same(await batched.play(REQUESTS), expected)
    assert_same((await unbatched.play(REQUESTS[::-1]))[::-1], expected)


async def test_sixty_turns_prefill_every_token_once(make_stage: MakeStage, talker: PreTrainedModel) -> None:
    model = copy.deepcopy(talker)
    model.config.max_position_embeddings = 4096
    stage = make_stage(model=model, max_turns=60)
    t = await stage.play_story(n_turns=60)
    assert len(t.turns) == 60
    assert_matches_engine(t, stage)
    n_read = [len(request.prompt_ids) - result.n_reused for request, result in stage.engine.exchanges]
    n_sampled = sum(len(result.token_ids) for _, result in stage.engine.exchanges)
    assert sum(n_read) + n_sampled - 60 == len(t.prompt_ids) + len(t.response_ids) - 1  # all but the very last


@pytest.mark.catch_tokenizer
async def test_reported_logprobs_equal_those_of_the_trained_model(
    make_stage: MakeStage, talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    stage = make_stage()
    stage.sampling = replace(stage.sampling, temperature=0.7, top_p=0.9)
    batch = build_training_batch(await stage.play(REQUESTS), tiny_tokenizer.pad_token_id)
    with torch.no_grad():
        trained, *_ = response_logprobs(talker, batch.sequences, batch.attention_mask, batch.loss_mask, temperature=0.7)
    torch.testing.assert_close(trained, batch.rollout_logprobs, atol=1e-5, rtol=0)


async def test_sampled_tokens_depend_on_draw_and_sample_and_not_on_the_step(make_stage: MakeStage) -> None:
    stage = make_stage()
    requests = [story("a", repetition, n_turns=1) for repetition in range(4)]

    async def responses(step: int = 1, seed: int = 0, **changes: Any) -> list[list[int]]:
        changed = [replace(request, id=replace(request.id, **changes)) for request in requests]
        return [t.response_ids for t in await stage.play(changed, step, seed)]

    first = await responses()
    assert len({tuple(ids) for ids in first}) == 4
    assert await responses() == first
    assert await responses(step=2) == first
    for changes in ({"draw": 1}, {"phase": "eval"}, {"instance_id": "b"}):
        assert await responses(**changes) != first
    assert await responses(seed=1) != first


def fail_some_steps(journal: Journal) -> list[str]:
    """Return a list of error messages; each fails one step of an environment and is removed."""
    errors: list[str] = []

    def fail() -> None:
        if errors:
            raise RuntimeError(errors.pop())

    journal.do["step"] = fail
    return errors


@BATCHED
async def test_each_turn_has_its_own_seed_and_a_retry_repeats_the_seeds(
    make_stage: MakeStage, journal: Journal, batched: bool
) -> None:
    stage = make_stage(batched=batched, n_rollout_retries=1)
    fail_some_steps(journal).append("bad luck")
    trajectories = await stage.play([story("a", repetition, n_turns=3) for repetition in range(3)], seed=7)
    assert sorted(t.n_attempts for t in trajectories) == [1, 1, 2]
    seeds = []
    for t in trajectories:
        for attempt in range(t.n_attempts):
            played = [request.seed for request, _ in stage.engine.session(t.id, attempt)]
            assert played == [request_seed(7, t.id, turn) for turn in range(len(played))]
            assert played
        assert len(played) == 3
        seeds += played
    assert len(set(seeds)) == 9


@BATCHED
async def test_no_session_id_repeats_over_several_calls_with_retries(
    make_stage: MakeStage, journal: Journal, batched: bool
) -> None:
    stage = make_stage(batched=batched, n_rollout_retries=2)
    errors, rows = fail_some_steps(journal), [story(uid, n_turns=2).row for uid in "ab"]
    phases: tuple[Phase, ...] = ("train", "eval")
    trajectories: list[Trajectory] = []
    for first_draw in (0, 2):  # both rows are drawn twice, in training and in evaluations
        for phase in phases:
            prompts = [DrawnPrompt(first_draw + i, row, i) for i, row in enumerate(rows)]
            errors += ["bad luck"] * 2
            trajectories += await stage.play(rollout_requests(prompts, 2, "story", phase))
            assert not errors
    n_attempts = sum(t.n_attempts for t in trajectories)
    assert all(t.is_valid for t in trajectories)
    assert n_attempts == len(trajectories) + 4 * 2
    assert len(stage.engine.ended) == len(set(stage.engine.ended)) == n_attempts
    assert {request.session_id for request, _ in stage.engine.exchanges} == set(stage.engine.ended)
    for t in trajectories:
        assert_matches_engine(t, stage)


@BATCHED
async def test_a_conversation_that_exceeds_max_input_length_ends_before_its_last_observation(
    make_stage: MakeStage, journal: Journal, batched: bool
) -> None:
    free = await make_stage(batched=batched).play_story(n_turns=3)
    limit = free.turns[2].prompt_length
    for max_input_length, n_turns in ((limit, 3), (limit - 1, 2)):
        stage = make_stage(batched=batched, max_input_length=max_input_length)
        t = await stage.play_story(n_turns=3)
        assert t.is_valid
        assert len(t.turns) == len(stage.engine.exchanges) == n_turns
        end = free.turns[n_turns - 1].end
        assert (t.response_ids, t.rewards) == (free.response_ids[:end], free.rewards[:end])
        assert t.stop_reason == (free.stop_reason if n_turns == 3 else "length")
        assert t.env_metrics["turns"] == n_turns
    assert journal.open_environments() == []


async def test_an_environment_that_never_ends_stops_at_the_context_length(make_stage: MakeStage) -> None:
    stage = make_stage(max_input_length=10_000, max_turns=100)
    stage.sampling = replace(stage.sampling, max_new_tokens=100)
    t = await stage.play_story(n_turns=-1)
    assert (t.is_valid, t.stop_reason) == (True, "length")
    n_tokens = len(t.prompt_ids) + len(t.response_ids)
    assert stage.engine.info.context_length - 100 < n_tokens <= stage.engine.info.context_length


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_response_length": 40}])
async def test_an_environment_grades_unfinished_episodes(make_stage: MakeStage, limit: dict[str, int]) -> None:
    stage = make_stage(**limit)
    finished, graded, unknown, broken, wrong = await stage.play(
        [
            story("finished", n_turns=1, returns={"grade_unfinished": 8.0}),
            story("graded", n_turns=-1, returns={"grade_unfinished": 8.0}),
            story("unknown", n_turns=-1, returns={"grade_unfinished": None}),
            story("broken", n_turns=-1, fails="grade_unfinished"),
            story("wrong", n_turns=-1, returns={"grade_unfinished": "8"}),
        ]
    )
    assert finished.total_reward == 0.25
    n_turns = len(graded.turns)
    assert graded.total_reward == 8 + n_turns * (n_turns + 1) / 8  # and k / 4 for turn k
    assert graded.rewards[-1] == 8 + n_turns / 4
    assert [t.stop_reason for t in (graded, unknown, broken, wrong)] == [
        "max_turns" if "max_turns" in limit else "length",
        "reward_unknown",
        "env_error",
        "env_error",
    ]
    assert "story.grade_unfinished raised" in (broken.error or "")


async def test_an_initial_prompt_that_is_too_long_makes_its_rollout_invalid(make_stage: MakeStage) -> None:
    stage = make_stage(max_input_length=60)
    long = story("long", n_turns=1)
    long.row.prompt[1]["content"] = "1" * 60
    short, cut = await stage.play([story("a", n_turns=1), long])
    assert (short.is_valid, cut.is_valid) == (True, False)
    assert (cut.stop_reason, cut.response_ids, cut.turns) == ("prompt_too_long", [], ())
    assert cut.error == f"the prompt has {len(cut.prompt_ids)} tokens, but the limit is 60"
    assert len(stage.engine.exchanges) == 1


@pytest.mark.parametrize("prompt_length", [511, 512])
async def test_a_prompt_that_fills_the_context_is_invalid(make_stage: MakeStage, prompt_length: int) -> None:
    stage = make_stage(max_input_length=10_000)
    request = story("a", n_turns=1)
    n_empty = len(stage.chat.prompt_ids([*request.row.prompt[:1], {"role": "user", "content": ""}]))
    request.row.prompt[1]["content"] = "1" * (prompt_length - n_empty)
    (t,) = await stage.play([request])
    fits = prompt_length == 511
    assert (len(t.prompt_ids), t.is_valid, len(t.response_ids)) == (prompt_length, fits, int(fits))


async def test_environments_receive_copies_of_their_inputs(make_stage: MakeStage, journal: Journal) -> None:
    stage = make_stage(max_turns=3, skyrl_gym={"story": {"style": {"tone": "dry"}}})
    shared = story("a", env_class=None, n_turns=1, extra_info={"seen": []})

    def modify_inputs() -> None:
        for env in journal.made:
            env.extras["extra_info"]["seen"].append(1)
            env.env_config["style"]["tone"] = "wet"
            if env.prompt:
                env.prompt[0]["content"] = "changed"

    journal.do["get_metrics"] = modify_inputs
    requests = [RolloutRequest(replace(shared.id, repetition_id=i), shared.row) for i in range(3)]
    trajectories = await stage.play(requests)
    first = journal.made[0]
    assert (first.extras["max_turns"], first.extras["reads_images"]) == (3, False)
    assert {id(env.extras["extra_info"]) for env in journal.made} != {id(first.extras["extra_info"])}
    assert len({id(env.env_config["style"]) for env in journal.made}) == 3
    assert shared.row.env_extras == {"n_turns": 1, "extra_info": {"seen": []}}
    assert shared.row.prompt[0]["content"] == "Go on."
    journal.do.clear()
    await stage.play(requests[:1])
    assert journal.made[-1].env_config == {"style": {"tone": "dry"}}
    assert [(t.env_class, t.env_extras) for t in trajectories] == [("story", shared.row.env_extras)] * 3


@pytest.mark.catch_tokenizer
async def test_a_stop_string_ends_a_turn_and_the_template_stays_intact(make_stage: MakeStage) -> None:
    stage = make_stage(batched=True)
    stage.sampling = replace(stage.sampling, max_new_tokens=40, stop=("a", "e"))
    trajectories = await stage.play([story(uid, n_turns=2) for uid in "abcdef"])
    stopped = [t for t in trajectories if stage.chat.decode_all(t.response_ids[: t.turns[0].end]).endswith(("a", "e"))]
    assert stopped
    for t in stopped:
        assert t.turns[0].stop_reason == "stop"
        text = stage.chat.decode_all(t.response_ids[t.turns[0].end : t.turns[1].start])
        assert text == "<|im_end|>\n<|im_start|>user\nAnd then? (1 of 2)<|im_end|>\n<|im_start|>assistant\n"


@BATCHED
async def test_environments_do_not_wait_for_each_other(make_stage: MakeStage, journal: Journal, batched: bool) -> None:
    barrier = threading.Barrier(3, timeout=60)
    journal.do = dict.fromkeys(METHODS, barrier.wait)
    trajectories = await make_stage(batched=batched).play([story(uid, n_turns=2) for uid in "abc"])
    assert all(t.is_valid for t in trajectories)


async def test_without_workers_environments_run_inline(make_stage: MakeStage, journal: Journal) -> None:
    t = await make_stage(skyrl_gym={"max_env_workers": 0}).play_story(n_turns=1)
    assert (t.is_valid, journal.threads) == (True, {threading.current_thread().name})


async def test_timing_separates_generation_and_environments(make_stage: MakeStage, journal: Journal) -> None:
    journal.do["step"] = lambda: time.sleep(0.03)
    t = await make_stage().play_story(n_turns=2)
    assert set(t.timing) == {"generate", "env"}
    assert t.timing["env"] >= 0.06
    assert t.timing["generate"] > 0


async def test_attributes_for_subclasses(make_stage: MakeStage) -> None:
    stage = make_stage(max_turns=7)
    generator = stage.generator
    assert (generator.generator_cfg.max_turns, generator.inference_engine_client) == (7, stage.engine)
    assert generator.tokenizer.decode(generator.tokenizer.encode("Go on.")) == "Go on."
