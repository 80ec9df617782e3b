"""Analysis of evaluated trajectories: compare behavior by data source and failures by category between two steps.

Reads `evals/global_step_N/<data_source>.jsonl` in a run folder or remote storage, as written by this project or SkyRL.
"""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from skyrl_gym.stop_reasons import StopReason
from skyrl_gym.tools.calls import ToolCallError, parse_tool_calls, strip_thoughts
from skyrl_report.errors import DataError
from skyrl_report.evaluations import EvaluatedTrajectory, parse_trajectory, read_rows
from skyrl_report.metrics_file import read_metrics
from skyrl_report.remote import STORAGE_ERRORS, RemoteFolder
from skyrl_report.run_folder import RunFolder, parse_steps

EXCERPT_CHARACTERS = 200
ROLE = re.compile(r"<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*")
SPECIAL = re.compile(r"<\|[^|<>\s]{1,40}\|>")
TOOL_RESULT = re.compile(r"</?tool_response>")
ERROR_RESULT = re.compile(
    r"^\s*(error\b|traceback|\w*(error|exception)\s*:)|[\"'](error|is_error)[\"']\s*:\s*(?!null|false|none)", re.I
)
DONE = re.compile(r"<done>|\[done\]", re.I)

ARGUMENTS = re.compile(
    r"not valid json|invalid (argument|parameter|input|value|type|request)|(missing|required|unexpected|unknown) "
    r"(\w+ ){0,3}(argument|parameter|field|property|keyword)|required property|validation error|must be an? |"
    r"type ?error|\b(400|422)\b|there is no tool|no tool call found",
    re.I,
)
AUTHORIZATION = re.compile(
    r"\b(401|403)\b|unauthori[sz]ed|forbidden|not (authori[sz]ed|authenticated|permitted|allowed)|"
    r"(permission|access) denied|authentication|insufficient (permission|privilege|scope)|(invalid|expired) "
    r"(\w+ )?(token|credential|api key)|log ?in required",
    re.I,
)
NOT_FOUND = re.compile(
    r"\b404\b|not found|does ?n[o']t exist|no such|could ?n[o']t (be found|find)|unknown (id|user|item|resource)", re.I
)


class EpisodeMessage(NamedTuple):
    """One message of an episode, without special tokens."""

    role: str
    text: str


@dataclass(frozen=True)
class EvaluatedEpisode:
    """A trajectory, split into messages."""

    trajectory: EvaluatedTrajectory
    prompt_key: str
    """Identifies the task. Several samples may share it."""
    messages: tuple[EpisodeMessage, ...]
    n_turns: int
    last_turn: dict[str, Any]
    """Empty if the file does not describe turns, as in SkyRL's files."""
    env_metrics: dict[str, Any]
    is_success: bool

    @property
    def is_valid(self) -> bool:
        """True if it has a reward."""
        return self.trajectory.score is not None

    @property
    def replies(self) -> list[str]:
        """The model's replies, without its thoughts."""
        return [strip_thoughts(text) for role, text in self.messages if role == "assistant"]

    @cached_property
    def n_tool_calls(self) -> int:
        """Number of tool calls, as counted by the environment or else in the replies."""
        counted = self.env_metrics.get("tool_calls")
        return int(counted) if isinstance(counted, int | float) else sum(map(_count_calls, self.replies))

    @cached_property
    def errors(self) -> list[str]:
        """Tool results that are errors, in order."""
        results = [TOOL_RESULT.sub("", text).strip() for role, text in self.messages if role != "assistant"]
        return [text for text in results if ERROR_RESULT.search(text)]


def _count_calls(reply: str) -> int:
    return 1 if _find_call_error(reply) is not None else len(parse_tool_calls(reply))


def _find_call_error(reply: str) -> str | None:
    try:
        parse_tool_calls(reply)
    except ToolCallError as error:
        return str(error)
    return None


CATEGORIES = {
    "tool arguments": "a call is not valid JSON, or a tool rejected its arguments",
    "authorization": "a tool answered 401, 403 or denied access",
    "resource not found": "a tool answered 404 or that something does not exist",
    "false completion": "the last reply says `<done>` or `[done]`, or calls no tool although earlier ones did",
    "cut reply": "the last reply reached its token limit",
    "context overflow": "the conversation ended with stop reason `length`",
    "turn limit": "the episode ended with stop reason `max_turns`",
}
"""Kinds of failures, and the rule for each."""


def classify(episode: EvaluatedEpisode) -> dict[str, str]:
    """Return {category: evidence} of a failed episode: "other" if no category fits, and {} for a success."""
    trajectory, n_turns = episode.trajectory, episode.n_turns
    if not episode.is_valid:
        return {f"invalid: {trajectory.stop_reason}": trajectory.error or trajectory.stop_reason}
    if episode.is_success:
        return {}
    errors, reply = episode.errors, episode.replies[-1] if episode.replies else ""
    authorization = next((text for text in errors if AUTHORIZATION.search(text)), None)
    not_found = next((text for text in errors if NOT_FOUND.search(text)), None)
    others = (text for text in errors if not AUTHORIZATION.search(text) and not NOT_FOUND.search(text))
    arguments = next((text for text in others if ARGUMENTS.search(text)), None)
    # The model claims to be done if it says so or stops calling tools.
    has_stopped = trajectory.stop_reason == StopReason.STOP and episode.n_tool_calls > 0 and not _count_calls(reply)
    # With stop reason `length`, either the reply or the whole conversation has reached its token limit.
    is_length = trajectory.stop_reason == StopReason.LENGTH
    ends_turn = episode.last_turn.get("stop_reason") == StopReason.LENGTH if episode.last_turn else n_turns == 1
    turns = f"after {n_turns} turn{'' if n_turns == 1 else 's'}"
    evidence = {
        "tool arguments": next(filter(None, map(_find_call_error, episode.replies)), arguments),
        "authorization": authorization,
        "resource not found": not_found,
        "false completion": reply if DONE.search(reply) or has_stopped else None,
        "cut reply": f"… {reply[-EXCERPT_CHARACTERS:]}" if is_length and ends_turn and episode.replies else None,
        "context overflow": turns if is_length and not ends_turn else None,
        "turn limit": turns if trajectory.stop_reason == StopReason.MAX_TURNS else None,
    }
    return {name: text for name, text in evidence.items() if text is not None} or {"other": reply}


def read_episodes(folder: RemoteFolder, step: int) -> list[EvaluatedEpisode]:
    """Read the episodes of one evaluation. Raise DataError for a line that is not a JSON object."""
    return [_parse_episode(row) for row in read_rows(folder / f"global_step_{step}")]


def _parse_episode(row: dict[str, Any]) -> EvaluatedEpisode:
    trajectory = parse_trajectory(row)
    earlier = [str(segment.get("output_response", "")) for segment in row.get("earlier") or ()]
    messages = []
    for response in (*earlier, trajectory.response):  # each starts with a reply of the model
        parts = ROLE.split(response if ROLE.match(response) else f"<|im_start|>assistant\n{response}")
        for chat_ml, llama, content in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            role, text = chat_ml or llama, SPECIAL.sub("", content).strip()
            if text or role == "assistant":
                messages.append(EpisodeMessage(role, text))
    extras = row.get("env_extras") or {}
    uid = str(row.get("uid") or "")
    key = extras.get("task_key") or uid.rpartition("_")[0] or trajectory.prompt
    turns = row.get("turns") or []
    n_turns = len(turns) or sum(message.role == "assistant" for message in messages)
    is_success = row.get("is_success", (trajectory.score or 0.0) > 0)  # not in SkyRL's files
    last_turn = turns[-1] if turns else {}
    return EvaluatedEpisode(
        trajectory, str(key), tuple(messages), n_turns, last_turn, row.get("env_metrics") or {}, bool(is_success)
    )


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
    rules |= dict.fromkeys(others, "no reward: left out of all rates")
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
