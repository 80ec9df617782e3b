import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.embedded import StepLimits
from skyrl_train.inference_engines.hf.kv_memory import UNIT
from skyrl_train.inference_engines.hf.region_table import RegionTable
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row, Scheduler
from skyrl_train.inference_engines.sampling import SampledToken

NewSequence = Callable[..., CachedSequence]


class Engine:
    """A scheduler with fake forward passes that store token ids and sample a function of all tokens so far."""

    def __init__(self, n_units: int, max_sequences: int = 8, max_tokens: int = 1024) -> None:
        self.scheduler = Scheduler(RegionTable(n_units * UNIT), StepLimits(max_sequences, max_tokens))
        self._memory = np.full(n_units * UNIT, -1)

    @property
    def running(self) -> list[CachedSequence]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[CachedSequence]:
        return list(self.scheduler.waiting)

    def submit(self, *sequences: CachedSequence) -> None:
        self.scheduler.waiting.extend(sequences)

    def step(self) -> list[Row]:
        """Run one forward pass and return its rows. A sequence stops when it has `max_tokens`."""
        copies, rows = self.scheduler.next_step()
        copied = [self._memory[copy.source :][: copy.n_tokens].copy() for copy in copies]
        for copy, tokens in zip(copies, copied, strict=True):
            self._memory[copy.target :][: copy.n_tokens] = tokens
        for row in rows:
            sequence, region, is_complete = row.sequence, row.sequence.region, row.is_complete
            new = sequence.token_ids[sequence.n_cached :][: row.n_new]
            self._memory[row.start + sequence.n_cached :][: row.n_new] = new
            region.n_cached += row.n_new
            stored = self._memory[row.start :][: region.n_cached].tolist()
            assert stored == sequence.token_ids[: region.n_cached]
            if is_complete:
                sequence.append(SampledToken(sum(stored) % 61, -0.5), weight_version=0)
            if len(sequence.token_ids) == sequence.max_tokens:
                sequence.stop_reason = "length"
        return rows

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Run steps until a condition holds. Fail after 1000 steps."""
        for _ in range(1000):
            if condition():
                return
            self.scheduler.take_finished()
            self.step()
        pytest.fail("the condition never held")

    def n_new(self, sequences: Sequence[CachedSequence]) -> list[int]:
        """Run one step and return the number of tokens it reads for each sequence."""
        rows = {row.sequence: row.n_new for row in self.step()}
        return [rows.get(sequence, 0) for sequence in sequences]


@pytest.fixture
def new_sequence() -> Iterator[NewSequence]:
    """Create sequences with waiting calls. Without `prompt`, no two prompts share a token."""
    loop = asyncio.new_event_loop()
    n_created = 0

    def make(
        n_prompt: int = 1, max_tokens: int = UNIT, *, prompt: list[int] | None = None, session: str | None = None
    ) -> CachedSequence:
        nonlocal n_created
        n_created += 1
        token_ids = prompt or [1000 + n_created] * n_prompt
        request = EngineRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0, session_id=session)
        return CachedSequence(request, max_tokens, loop.create_future())

    yield make
    loop.close()


# -- admission


def test_sequences_are_admitted_in_the_order_of_their_arrival(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=8, max_sequences=2)
    first, second, third = new_sequence(), new_sequence(), new_sequence()
    engine.submit(first, second, third)
    engine.step()
    assert (engine.running, engine.waiting) == ([first, second], [third])
    first.stop_reason = "stop"
    assert engine.scheduler.take_finished() == [first]
    engine.step()
    assert (engine.running, engine.waiting) == ([second, third], [])


def test_no_sequence_overtakes_one_that_waits_for_memory(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=4)
    running, large, small = new_sequence(130, 3 * UNIT), new_sequence(65, 2 * UNIT), new_sequence(1, UNIT)
    engine.submit(running, large, small)
    engine.step()
    assert (engine.running, engine.waiting) == ([running], [large, small])


def test_sequences_waiting_for_a_shared_prompt_can_be_overtaken_and_keep_their_order(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=16)
    leader, first, second = (new_sequence(prompt=[7] * 100, max_tokens=2 * UNIT) for _ in range(3))
    other = new_sequence()
    engine.submit(leader, first, second, other)
    engine.step()
    assert (engine.running, engine.waiting) == ([leader, other], [first, second])
    assert engine.n_new([leader, other, first, second]) == [1, 1, 1, 1]
    assert (engine.running, engine.waiting) == ([leader, other, first, second], [])


def test_idle_regions_are_evicted_for_a_sequence_that_runs_alone(new_sequence: NewSequence) -> None:
    """Even the region of its own session is evicted if it can neither grow nor be copied."""
    engine = Engine(n_units=4)
    other, first = new_sequence(), new_sequence(150, 3 * UNIT, session="game")
    engine.submit(other, first)
    engine.step_until(lambda: other.is_over and first.is_over)
    engine.scheduler.take_finished()
    longer = new_sequence(prompt=[*first.token_ids, 5], max_tokens=4 * UNIT, session="game")
    engine.submit(longer)
    assert engine.n_new([longer]) == [3 * UNIT + 1]
    assert longer.n_reused == 0


# -- preemption


def test_the_last_to_arrive_is_preempted_when_memory_runs_out(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=8, max_sequences=3)
    first, second, third = new_sequence(60, 4 * UNIT), new_sequence(20, 4 * UNIT), new_sequence(20, 4 * UNIT)
    never_ran = new_sequence()
    engine.submit(first, second, third, never_ran)
    engine.step_until(lambda: len(first.token_ids) > 2 * UNIT)
    assert engine.running == [first, second, third]
    n_before = [len(sequence.token_ids) for sequence in (first, second, third)]
    engine.step()
    assert (engine.running, engine.waiting) == ([first, second], [third, never_ran])
    assert third.region is None
    n_sampled = [len(s.token_ids) - n for s, n in zip((first, second, third), n_before, strict=True)]
    assert n_sampled == [1, 1, 0]


def test_several_preempted_sequences_wait_in_the_order_of_their_arrival(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=6)
    first, second, third = new_sequence(60, 4 * UNIT), new_sequence(20, 4 * UNIT), new_sequence(20, 4 * UNIT)
    engine.submit(first, second, third)
    engine.step_until(lambda: len(first.token_ids) > 2 * UNIT)
    engine.step()
    assert (engine.running, engine.waiting) == ([first], [second, third])


def test_the_last_to_arrive_never_preempts_an_earlier_one(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=4)
    first, last = new_sequence(1, 2 * UNIT), new_sequence(60, 4 * UNIT)
    engine.submit(first, last)
    engine.step_until(lambda: len(last.token_ids) > 2 * UNIT)
    engine.step()
    assert (engine.running, engine.waiting) == ([first], [last])


def test_a_preempted_sequence_resumes_with_the_same_tokens(new_sequence: NewSequence) -> None:
    responses = []
    for n_units in (6, 64):
        engine = Engine(n_units)
        prompts = ([1] * 60, [2] * 20, [3] * 20)
        sequences = [new_sequence(prompt=prompt, max_tokens=4 * UNIT) for prompt in prompts]
        engine.submit(*sequences)
        engine.step_until(lambda sequences=sequences: all(sequence.is_over for sequence in sequences))
        responses.append([sequence.token_ids for sequence in sequences])
    assert responses[0] == responses[1]


def test_reused_tokens_are_counted_at_the_first_admission(new_sequence: NewSequence) -> None:
    """After a restart nothing is cached, but the sequence reused its prompt when it was first admitted."""
    engine = Engine(n_units=16)
    leader, follower = (new_sequence(prompt=[7] * 80 + [tail], max_tokens=2 * UNIT) for tail in (8, 9))
    engine.submit(leader, follower)
    engine.step_until(lambda: engine.running == [leader, follower])
    assert (leader.n_reused, follower.n_reused) == (0, 80)
    leader.stop_reason = "stop"
    engine.scheduler.take_finished()
    engine.scheduler.restart_all()
    assert engine.n_new([follower]) == [len(follower.token_ids) - 1]
    assert follower.n_reused == 80


def test_a_restart_reads_all_sequences_again_in_order_of_arrival(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=16, max_sequences=2)
    first, second, third = new_sequence(10), new_sequence(20), new_sequence(30)
    engine.submit(first, second, third)
    engine.step()
    engine.scheduler.restart_all()
    assert (engine.running, engine.waiting) == ([], [first, second, third])
    assert engine.n_new([first, second, third]) == [11, 21, 0]


# -- the token budget


def test_prompts_share_the_token_budget_that_decoding_leaves(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=32, max_tokens=100)
    decoding, long, short = new_sequence(), new_sequence(150, 4 * UNIT), new_sequence(70, 4 * UNIT)
    engine.submit(decoding, long)
    assert engine.n_new([decoding, long]) == [1, 99]
    engine.submit(short)
    assert engine.n_new([decoding, long, short]) == [1, 51, 48]
    assert engine.n_new([decoding, long, short]) == [1, 1, 22]
    assert engine.n_new([decoding, long, short]) == [1, 1, 1]


def test_prompts_get_one_unit_even_when_decoding_takes_the_whole_budget(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=32, max_sequences=11, max_tokens=10)
    decoding, prompt = [new_sequence() for _ in range(10)], new_sequence(100, 4 * UNIT)
    engine.submit(*decoding, prompt)
    assert engine.n_new([*decoding, prompt]) == [1] * 10 + [UNIT]


def test_rows_are_in_the_order_of_their_regions(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=8)
    finished, stays, late = new_sequence(10), new_sequence(1), new_sequence(10)
    engine.submit(finished, stays)
    engine.step()
    finished.stop_reason = "stop"
    engine.scheduler.take_finished()
    engine.scheduler.restart_all()
    engine.submit(late)
    starts = [row.start for row in engine.step()]
    assert len(starts) == 2
    assert starts == sorted(starts)


# -- the end of a sequence


def test_a_session_reuses_the_tokens_of_its_finished_sequence(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=8)
    first = new_sequence(20, 30, session="game")
    engine.submit(first)
    engine.step_until(lambda: first.is_over)
    assert engine.scheduler.take_finished() == [first]
    following = new_sequence(prompt=[*first.token_ids, 5], session="game")
    engine.submit(following)
    assert engine.n_new([following]) == [2]  # the last sampled token has not been read yet
    assert following.n_reused == 29


def test_cancelled_sequences_are_removed_from_running_and_waiting(new_sequence: NewSequence) -> None:
    engine = Engine(n_units=8, max_sequences=1)
    running, cancelled, waiting = new_sequence(), new_sequence(), new_sequence()
    engine.submit(running, cancelled, waiting)
    engine.step()
    for sequence in (running, cancelled):
        sequence.done.cancel()
    assert engine.scheduler.take_finished() == [running, cancelled]
    engine.step()
    assert (engine.running, engine.waiting) == ([waiting], [])
