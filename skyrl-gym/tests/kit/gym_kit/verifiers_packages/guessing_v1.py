"""A taskset with a custom environment, which answers every guess as the user."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]

log: list[str] = []
"""Events of all environments in this process, by task."""


class GuessingData(vf.TaskData):
    secret: int


class GuessingTask(vf.Task[GuessingData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("board.txt", b"empty")

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        assert await runtime.read("board.txt") == b"empty"

    @vf.stop
    async def gave_up(self, response: vf.Response) -> bool:
        return response.message.content == "I give up"

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return trace.num_turns


class GuessingConfig(vf.TasksetConfig):
    opens: bool = True
    """True if the task has a prompt; otherwise the environment sends the first message."""


class GuessingTaskset(vf.Taskset[GuessingTask, GuessingConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessingTask]:
        for secret in itertools.count(1):
            prompt = "Guess my number." if self.config.opens else None
            yield GuessingTask(GuessingData(prompt=prompt, description="A game.", secret=secret), self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=5)
    fault: str = ""


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def start(self) -> None:
        log.append("start")

    async def stop(self) -> None:
        log.append("stop")

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        if self.config.fault == "run":
            raise ConnectionError("no dice")
        found = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn(None if task.data.prompt else "I think of a number.")
            while not segment.terminated:
                guess = segment.last_reply
                if found := guess == str(task.data.secret):
                    break
                segment = await interaction.turn(hint(guess, task.data.secret))
        if self.config.fault == "twice":
            await agents.player.run(task)
        interaction.trace.record_reward("found", float(found))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        for trace in episode.traces:
            trace.record_metric("tokens", len(trace.transcript))


def hint(guess: str, secret: int) -> str:
    if not guess.isascii() or not guess.isdecimal():
        return "That is no number."
    return "Too low." if len(guess) < 9 and int(guess) < secret else "Too high."
