"""A taskset with two agents: a solver answers, and a checker says whether the answer is right."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["PairEnv", "PairTaskset"]


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()
    n_attempts: int = 1


class PairTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.0)
    async def replied(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.n_attempts):
            solved = await agents.solver.run(task)
        question = vf.TaskData(prompt=f"Is it right? {solved.last_reply}")
        await agents.checker.run(type(task)(question, task.config))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        *solved, checked = episode.traces
        for trace in solved:
            trace.record_reward("approved", float(checked.last_reply == "yes"))


class PairTaskset(vf.Taskset[PairTask]):
    def load(self) -> Iterator[PairTask]:
        yield PairTask(vf.TaskData(prompt="Say something right."), self.config.task)
