"""Limits of dispatchers, and runtimes that cancellations and failures must not leave open."""

import asyncio
import threading
from collections import Counter
from typing import Any, ClassVar

import pytest
from agent_kit.engines import ScriptedEngine
from agent_kit.trajectories import FINISH, HELD, ROW, Held, SimpleTask, new_runner

from skyrl_train.errors import EngineError
from skyrl_train.types import Message

KINDS = ("async_pipeline", "async_batch", "async_fix_pool")


def of_kind(kind: str, *envs: str, **limits: int) -> dict[str, Any]:
    """Return a section `dispatcher`; only a fixed pool has environments."""
    return {"type": kind, **limits, **({"envs": envs} if kind == "async_fix_pool" else {})}


class Phases(SimpleTask):
    """A task that counts how many trajectories are in each phase at once."""

    n_now: ClassVar[dict[str, int]] = {}
    n_max: ClassVar[dict[str, int]] = {}
    envs: ClassVar[set[Any]] = set()

    @classmethod
    async def enter(cls, phase: str) -> None:
        cls.n_now[phase] = cls.n_now.get(phase, 0) + 1
        cls.n_max[phase] = max(cls.n_max.get(phase, 0), cls.n_now[phase])
        await asyncio.sleep(0.01)
        cls.n_now[phase] -= 1

    @classmethod
    async def initialize_runtime(cls, env: Any) -> Any:
        await cls.enter("initialize")
        cls.envs.add(env)
        return env or "runtime"

    @classmethod
    async def complete_runtime(cls) -> None:
        await cls.enter("generate")

    @classmethod
    async def evaluate_result(cls) -> float:
        await cls.enter("evaluate")
        return 1.0


class Runtimes(SimpleTask):
    """A task that counts its open runtimes, and takes a while in the phase `slow`."""

    n_open: ClassVar[int] = 0
    n_max: ClassVar[int] = 0
    slow: ClassVar[str] = ""
    reached: ClassVar[threading.Event] = threading.Event()
    lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def wait(cls, phase: str) -> None:
        if cls.slow == phase:
            cls.reached.set()
            threading.Event().wait(0.1)

    @classmethod
    def count(cls, n: int) -> None:
        with cls.lock:
            cls.n_open += n
            cls.n_max = max(cls.n_max, cls.n_open)

    @classmethod
    def initialize_runtime(cls) -> str:
        cls.wait("initialize")
        cls.count(1)
        return "runtime"

    @classmethod
    def get_instruction(cls, instance: Any) -> list[Message]:
        if instance.get("fails"):
            raise ValueError("no instruction")
        return super().get_instruction()

    @classmethod
    def evaluate_result(cls) -> float:
        cls.wait("evaluate")
        return super().evaluate_result()

    @classmethod
    def close_runtime(cls, runtime: Any) -> None:
        cls.wait("close")
        cls.count(-1)


RUNTIMES = f"{__name__}.Runtimes"


@pytest.fixture(autouse=True)
def _reset_counts() -> None:
    Phases.n_now, Phases.n_max, Phases.envs = {}, {}, set()
    Runtimes.n_open, Runtimes.n_max, Runtimes.slow = 0, 0, ""
    Runtimes.reached.clear()


@pytest.mark.parametrize("kind", KINDS)
async def test_limits_hold_across_concurrent_calls(kind: str) -> None:
    limit, envs = (3, {"a", "b", "c"}) if kind == "async_fix_pool" else (4, {None})
    dispatcher = of_kind(kind, *"abc", max_parallel_agents=4, max_eval_parallel_agents=2)
    agents = new_runner([FINISH], f"{__name__}.Phases", num_trajectories=8, dispatcher=dispatcher)
    outputs = await asyncio.gather(agents.run([{}]), agents.run([{}]))
    assert [output["traj_rewards"] for output in outputs] == [[1.0] * 8] * 2
    assert max(Phases.n_max["initialize"], Phases.n_max["generate"]) <= limit
    assert Phases.n_max["evaluate"] <= 2
    assert Phases.envs == envs
    await agents.close()


@pytest.mark.parametrize("phase", ["initialize", "close", "evaluate"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_run_leaves_no_runtime(phase: str, kind: str) -> None:
    Runtimes.slow = phase
    agents = new_runner([FINISH], RUNTIMES, num_trajectories=2, dispatcher=of_kind(kind, "a", "b"))
    running = asyncio.create_task(agents.run([{}]))
    await asyncio.to_thread(Runtimes.reached.wait, 100)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.2)  # for a runtime that starts after all
    assert Runtimes.n_open == 0
    await agents.close()


async def test_runtimes_count_until_they_are_closed() -> None:
    Runtimes.slow = "close"
    agents = new_runner([FINISH], RUNTIMES, num_trajectories=5, dispatcher={"max_parallel_agents": 1})
    assert (await agents.run([{}]))["traj_rewards"] == [1.0] * 5
    assert Runtimes.n_max == 2  # one that generates or closes, and one that waits
    await agents.close()


async def test_failed_trajectories_do_not_keep_their_runtimes_while_others_are_evaluated() -> None:
    Runtimes.slow = "evaluate"
    dispatcher = {"max_parallel_agents": 2, "max_eval_parallel_agents": 1}
    agents = new_runner([FINISH], RUNTIMES, num_trajectories=1, n_retries=0, dispatcher=dispatcher)
    output = await agents.run([{"fails": i % 2 == 1} for i in range(8)])
    assert output["traj_rewards"] == [1.0, None] * 4
    assert Runtimes.n_max <= 4
    await agents.close()


async def test_an_engine_that_cannot_end_a_session_occupies_no_environment() -> None:
    class Stubborn(ScriptedEngine):
        async def end_session(self, session_id: str) -> None:
            raise EngineError("lost")

    agents = new_runner(Stubborn([FINISH]), RUNTIMES, dispatcher=of_kind("async_fix_pool", "a"))
    for _ in range(2):
        assert (await agents.run([{}]))["traj_rewards"] == [1.0] * 8
    assert Runtimes.n_open == 0
    await agents.close()


def test_a_runner_plays_in_several_event_loops_and_ends_its_threads() -> None:
    before = set(threading.enumerate())
    agents = new_runner([FINISH], num_trajectories=4, dispatcher={"max_parallel_agents": 1})
    for _ in range(2):
        assert asyncio.run(agents.run([ROW]))["traj_rewards"] == [1.0] * 4
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"task-0", "tool-0"}
    asyncio.run(agents.close())
    assert set(threading.enumerate()) <= before


class Exclusive(SimpleTask):
    """A task that counts the trajectories that hold each environment until their runtime is closed."""

    n_users: ClassVar[Counter[str]] = Counter()
    n_max: ClassVar[int] = 0
    is_closing: ClassVar[asyncio.Event]
    may_close: ClassVar[asyncio.Event]

    @classmethod
    async def initialize_runtime(cls, env: str | None) -> str:
        name = env or "no environment"
        cls.n_users[name] += 1
        cls.n_max = max(cls.n_max, cls.n_users[name])
        return name

    @classmethod
    async def close_runtime(cls, runtime: str) -> None:
        cls.is_closing.set()
        await cls.may_close.wait()
        await asyncio.sleep(0)
        cls.n_users[runtime] -= 1


@pytest.fixture
def exclusive() -> type[Exclusive]:
    Exclusive.n_users, Exclusive.n_max = Counter(), 0
    Exclusive.is_closing, Exclusive.may_close = asyncio.Event(), asyncio.Event()
    Held.n_open = 0
    return Exclusive


async def test_an_environment_is_borrowed_again_once_its_runtime_is_closed(exclusive: type[Exclusive]) -> None:
    dispatcher = of_kind("async_fix_pool", "a", "b")
    agents = new_runner([FINISH], f"{__name__}.Exclusive", num_trajectories=6, dispatcher=dispatcher)
    running = asyncio.create_task(agents.run([{}]))
    await exclusive.is_closing.wait()
    for _ in range(100):  # nothing else can begin meanwhile
        await asyncio.sleep(0)
    assert exclusive.n_users.total() <= 2
    exclusive.may_close.set()
    assert (await running)["traj_rewards"] == [1.0] * 6
    assert exclusive.n_max == 1
    await agents.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancellation_while_a_runtime_is_closed_skips_no_other_release(
    kind: str, exclusive: type[Exclusive]
) -> None:
    """Tools, the engine's session and the environment are released, too."""
    engine = ScriptedEngine([FINISH])
    settings = {"num_trajectories": 1, "dispatcher": of_kind(kind, "a")}
    agents = new_runner(engine, f"{__name__}.Exclusive", (HELD, "finish"), **settings)
    running = asyncio.create_task(agents.run([{}]))
    await exclusive.is_closing.wait()
    running.cancel()
    await asyncio.sleep(0)
    exclusive.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (Held.n_open, engine.n_ended, exclusive.n_users.total()) == (0, 1, 0)
    assert (await agents.run([{}]))["traj_rewards"] == [1.0]
    await agents.close()
