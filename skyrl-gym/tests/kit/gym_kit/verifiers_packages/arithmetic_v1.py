"""A taskset of sums: one reply each, rewards with weights."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ArithmeticTaskset"]


class ArithmeticData(vf.TaskData):
    answer: int


class ArithmeticTaskConfig(vf.TaskConfig):
    fault: str = ""


class ArithmeticTask(vf.Task[ArithmeticData, vf.State, ArithmeticTaskConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        if self.config.fault == "raise":
            raise ConnectionError("the judge is asleep")
        if self.config.fault == "nan":
            return float("nan")
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def style(self, trace: vf.Trace) -> dict[str, float]:
        return {"short": float(len(trace.last_reply) < 10), "polite": float("please" in trace.last_reply)}

    @vf.reward(weight=0.0)
    async def watched(self, trace: vf.Trace) -> float:
        return 7.0

    @vf.metric
    async def thoughts(self, trace: vf.Trace) -> float:
        return len(trace.assistant_messages[-1].reasoning_content or "")


class ArithmeticConfig(vf.TasksetConfig):
    task: ArithmeticTaskConfig = ArithmeticTaskConfig()
    n_tasks: int = 3


class ArithmeticTaskset(vf.Taskset[ArithmeticTask, ArithmeticConfig]):
    def load(self) -> Iterator[ArithmeticTask]:
        for i in range(self.config.n_tasks):
            data = ArithmeticData(prompt=f"What is {i} + {i}?", system_prompt="Answer with a number.", answer=2 * i)
            yield ArithmeticTask(data, self.config.task)
