"""Comparison of evaluated trajectories between two steps: behavior by data source and failures by category.

Reads `evals/global_step_N/<data_source>.jsonl` in a run folder or remote storage, as written by this project or SkyRL.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from skyrl_report.episodes import CATEGORIES, EXCERPT_CHARACTERS, EvaluatedEpisode, classify, read_episodes
from skyrl_report.errors import DataError
from skyrl_report.metrics_file import read_metrics
from skyrl_report.remote import STORAGE_ERRORS, RemoteFolder
from skyrl_report.run_folder import RunFolder, parse_steps


def compare_evaluations(source: str, first: int | None = None, last: int | None = None, n_samples: int = 2) -> str:
    """Return a Markdown page that compares the evaluations at two steps, by default the first and the last.

    `source` is a run folder, a folder with `global_step_N/`, or its URL. `n_samples` are shown per failure category.
    Raise DataError if there is no evaluation, or none at a requested step, or if a file cannot be read.
    """
    folder = RemoteFolder(source)
    try:
        if "evals" in folder.names():
            folder = folder / "evals"
        steps = parse_steps(folder.names())
        if rows := read_metrics(RunFolder(Path(source)).metrics):
            steps = [step for step in steps if step <= rows[-1]["step"]]  # a rewind discarded later evaluations
        if not steps:
            raise DataError(
                f"{source} has no evaluations (global_step_N/); train with trainer.eval_interval set, or pass another "
                "run folder or URL"
            )
        compared = [steps[0] if first is None else first, steps[-1] if last is None else last]
        if missing := [step for step in compared if step not in steps]:
            raise DataError(f"{folder.url} has no evaluation at step {missing[0]}; choose from {steps}")
        evaluations = {step: read_episodes(folder, step) for step in sorted(set(compared))}
    except STORAGE_ERRORS as error:
        raise DataError(f"cannot read {source}: {error!r}; check the path and the credentials") from error
    names = " and ".join(map(str, evaluations))
    lines = [f"# Trajectories of {source}", "", f"Evaluations at steps {names}.", "", "## Data sources", ""]
    lines += _format_data_sources(evaluations)
    return "\n".join([*lines, "", "## Failures", "", *_format_failures(evaluations, n_samples), ""])


def _format_data_sources(evaluations: dict[int, list[EvaluatedEpisode]]) -> list[str]:
    """Format a table of the behavior on each data source at each step. Means and rates are over valid episodes."""
    names = sorted({e.trajectory.data_source for episodes in evaluations.values() for e in episodes})
    rows, n_samples = [], 0
    for name in ["all", *names] if len(names) > 1 else names:
        for step, episodes in evaluations.items():
            found = [e for e in episodes if name in ("all", e.trajectory.data_source)]
            valid = [e for e in found if e.is_valid]
            successes: dict[str, list[bool]] = {}  # task → success of each sample
            for episode in valid:
                successes.setdefault(episode.prompt_key, []).append(episode.is_success)
            n_samples = max([n_samples, *map(len, successes.values())])
            cells = ["–"] * 5
            if valid:
                turns, calls = [e.n_turns for e in valid], [e.n_tool_calls for e in valid]
                means = map(statistics.fmean, (turns, calls, [len(e.errors) for e in valid]))
                passed = [any(samples) for samples in successes.values()]
                rates = map(statistics.fmean, ([e.is_success for e in valid], passed))
                cells = [*(f"{mean:.1f}" for mean in means), *(f"{rate:.1%}" for rate in rates)]
            rows.append([name, step, len(found), len(found) - len(valid), *cells])
    head = ("data source", "step", "episodes", "invalid", "turns", "tool calls", "tool errors", "success")
    return _format_table([*head, f"pass@{n_samples}"], rows)


def _format_failures(evaluations: dict[int, list[EvaluatedEpisode]], n_samples: int) -> list[str]:
    """Format a table of the failure categories at each step, and samples of each category."""
    found = {
        step: [(episode, name, evidence) for episode in episodes for name, evidence in classify(episode).items()]
        for step, episodes in evaluations.items()
    }
    counts = {step: [name for _, name, _ in failures] for step, failures in found.items()}
    rules = CATEGORIES | {"other": "no rule matches"}
    others = sorted({name for names in counts.values() for name in names} - set(rules))
    rules |= {
        name: "no reward: excluded from all rates" if name.startswith("invalid") else "reported by the environment"
        for name in others
    }
    lines = ["An episode may be in several categories.", ""]
    lines += _format_table(
        ["category", *(f"step {step}" for step in found), "rule"],
        [[name, *(counts[step].count(name) for step in found), rule] for name, rule in rules.items()],
    )
    samples = []
    for name in rules:
        for step, failures in found.items():
            for episode, _, evidence in [failure for failure in failures if failure[1] == name][:n_samples]:
                source, task = episode.trajectory.data_source, episode.prompt_key[:80]
                words = " ".join(evidence.split())
                excerpt = words[:EXCERPT_CHARACTERS] + ("…" if len(words) > EXCERPT_CHARACTERS else "")
                text = json.dumps(excerpt, ensure_ascii=False)
                samples.append(f"- **{name}**, step {step}, {source}, task `{task}`: {text}")
    return [*lines, *(["", "## Samples", "", *samples] if samples else [])]


def _format_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
