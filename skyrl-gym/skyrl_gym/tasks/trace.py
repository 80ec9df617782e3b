"""The task family `trace`: predict exactly what a Python program prints."""

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from skyrl_gym.envs.lcb.grading import extract_code
from skyrl_gym.envs.options import reject_unknown, set_options
from skyrl_gym.isolation.program import ProgramLimits, run_once
from skyrl_gym.tasks.base import Task, TaskFamily
from skyrl_gym.tasks.replies import visible_answer

LIMITS = ProgramLimits(seconds=20, cpu_seconds=5, memory_bytes=256 << 20)
N_PRINTS = (3, 6)


class TraceTasks(TaskFamily):
    """Programs that print some of their variables, generated from the task id. No options."""

    env: ClassVar[str] = "trace"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        reject_unknown(set_options(options), [], "adapter_config of trace, whose programs depend on the task id alone,")

    @property
    def options(self) -> dict[str, Any]:
        """No options."""
        return {}

    def identity(self, task_id: int) -> str:
        """Return the program, because it need not run to identify the task."""
        return generate_program(task_id)

    def _generate(self, task_id: int) -> Task:
        program = generate_program(task_id)
        result = run_once(program, limits=LIMITS)
        if not result.is_success:
            raise RuntimeError(f"the program of trace task {task_id} failed ({result.end}): {result.stderr[-500:]}")
        prompt = (
            f"Write exactly what this Python program prints.\n\n```python\n{program}```\n\n"
            "End your reply with the complete output in a code block."
        )
        return Task(task_id, "trace", prompt, result.stdout)

    def solve(self, task: Task) -> str:
        """Return the output in a code block."""
        return f"```\n{task.ground_truth}```"

    def score(self, reply: str, task: Task) -> float:
        """Return 1 if the last code block, or else the whole answer, equals the output line by line, else 0."""
        answer = visible_answer(reply)
        block = extract_code(answer)
        return float(_lines(answer if block is None else block) == _lines(task.ground_truth))


@lru_cache(maxsize=1000)
def generate_program(task_id: int) -> str:
    """Return a program that ends after a bounded number of steps and prints values that fit on a line."""
    return _Writer(Random(f"trace/{task_id}")).write()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


class _Writer:
    """Writer of a program: integers a to c, a list and a text, changed by random statements."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._lines: list[str] = []

    def write(self) -> str:
        """Return the source of the program."""
        rng = self._rng
        name = rng.choice(("mix", "fold", "step", "blend"))
        self._lines = [
            f"def {name}(x, y):",
            f"    if x {rng.choice(('<', '>', '<='))} y:",
            f"        return (x * {rng.randint(2, 9)} + y) % {rng.randint(11, 97)}",
            f"    return {rng.choice(('x - y', 'x + y', 'x // (abs(y) + 1)', 'x ^ y'))}",
            "",
        ]
        for variable in "abc":
            self._lines.append(f"{variable} = {rng.randint(0, 30)}")
        self._lines.append(f"items = {[rng.randint(0, 20) for _ in range(rng.randint(3, 6))]}")
        self._lines.append(f"text = {''.join(rng.choice('abcdexyz') for _ in range(rng.randint(4, 8)))!r}")
        for number in range(rng.randint(*N_PRINTS)):
            for _ in range(rng.randint(1, 3)):
                self._statement(name)
            shown = rng.sample(("a", "b", "c", "items", "text", "sum(items)", "len(text)"), rng.randint(1, 3))
            self._print(f'"__DBG_{number}__", {", ".join(shown)}')
        self._print("a + b + c, sorted(items), text[::-1]")
        return "\n".join(self._lines) + "\n"

    def _print(self, arguments: str) -> None:
        self._lines.append(f"print({arguments})")

    def _statement(self, function: str) -> None:
        rng = self._rng
        target, other = rng.sample("abc", 2)
        kind = rng.randrange(8)
        n = rng.randint(2, 5)
        if kind == 0:
            self._lines.append(f"{target} = {function}({target}, {other})")
        elif kind == 1:
            self._lines += [f"for i in range({n}):", f"    {target} = ({target} + i * {other}) % 101"]
            if rng.random() < 0.5:
                self._lines += [
                    f"    if {target} % {rng.randint(2, 4)} == 0:",
                    f"        {rng.choice(('break', 'continue'))}",
                ]
                self._lines.append(f"    {other} = ({other} + 1) % 53")
        elif kind == 2:
            is_rest, joins = f"{target} % {n} == {rng.randrange(n)}", rng.choice(("and", "or"))
            self._lines += [
                f"if {is_rest} {joins} len(items) > {rng.randint(2, 6)}:",
                f"    items.append({target} % 17)",
                "else:",
                f"    text += {rng.choice('pqrs')!r}",
            ]
        elif kind == 3:
            self._lines.append(
                f"items = [x {rng.choice('+-')} {n} for x in items if x % {rng.randint(2, 3)} != 1] or [{other}]"
            )
        elif kind == 4:
            self._lines += [
                "counter = 0",
                f"while {target} > {rng.randint(1, 9)} and counter < {n}:",
                f"    {target} //= 2",
                "    counter += 1",
            ]
        elif kind == 5:
            self._lines.append(
                rng.choice(
                    (f"text = text[{n - 1}:] + text[:{n - 1}]", "text = text.upper()", "text = text[::2] + text[1::2]")
                )
            )
        elif kind == 6:
            self._lines += ["for i, x in enumerate(items):", f"    items[i] = {function}(x, i + {other} % 7)"]
        else:
            self._lines += [
                "counts = {}",
                "for letter in text:",
                "    counts[letter] = counts.get(letter, 0) + 1",
                f"{target} = max(counts.values()) * {n} + len(counts)",
            ]
