"""Episodes: trajectories as messages, and why they failed."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from skyrl_gym.stop_reasons import StopReason
from skyrl_gym.tools.calls import THOUGHT_TAGS, ToolCallError, parse_tool_calls, split_calls, strip_thoughts
from skyrl_report.evaluations import EvaluatedTrajectory, parse_trajectory, read_rows
from skyrl_report.remote import RemoteFolder
from skyrl_report.run_folder import RunFolder

EXCERPT_CHARACTERS = 200
MAX_ACTION_TOKENS = 8
"""A reply of at most so many tokens, or characters if tokens are unknown, is an action of a game and never cut."""

ROLE = re.compile(r"<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n")
SPECIAL = re.compile(r"<\|(?!image:)[^|<>\s]{1,40}\|>|<end_of_turn>")
TOOL_RESULT = re.compile(r"</?tool_response>")
ERROR_RESULT = re.compile(
    r"^\s*(error\b|traceback|\w*(error|exception)\s*:)|[\"'](error|is_error)[\"']\s*:\s*(?!null|false|none)", re.I
)
MARKUP = re.compile(r"[<\[]|to=")  # of thoughts and tool calls. Looking for these first is much faster
THOUGHT_TAG = re.compile("|".join(re.escape(tag) for pair in THOUGHT_TAGS.items() for tag in pair))
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
    turns: tuple[dict[str, Any], ...]
    """Empty if the file does not describe turns, as in SkyRL's files."""
    n_tokens: int
    """Number of tokens after the first prompt."""
    env_metrics: dict[str, Any]
    is_success: bool

    @property
    def is_valid(self) -> bool:
        """True if it has a reward."""
        return self.trajectory.score is not None

    @property
    def n_turns(self) -> int:
        return len(self.turns) or sum(message.role == "assistant" for message in self.messages)

    @property
    def failure(self) -> str:
        """The reason of a failure in the environment's metrics: the text `failure`, or what its numbers say, or ""."""
        if reason := self.env_metrics.get("failure"):
            return str(reason)
        values = {name: value for name, value in self.env_metrics.items() if isinstance(value, int | float)}
        return next(
            (text for name, (fails, text) in METRIC_FAILURES.items() if name in values and fails(values[name])), ""
        )

    @property
    def has_cut_reply(self) -> bool:
        """True if the last reply reached its token limit, unless it is an action of a game."""
        if self.trajectory.stop_reason != StopReason.LENGTH or not self.replies:
            return False
        last = self.turns[-1] if self.turns else {}
        is_action = last.get("end", len(self.replies[-1])) - last.get("start", 0) <= MAX_ACTION_TOKENS
        ends_reply = last.get("stop_reason") == StopReason.LENGTH if self.turns else self.n_turns == 1
        return ends_reply and not is_action

    @property
    def has_full_context(self) -> bool:
        """True if the whole conversation reached its token limit."""
        if self.trajectory.stop_reason != StopReason.LENGTH:
            return False
        return self.turns[-1].get("stop_reason") != StopReason.LENGTH if self.turns else self.n_turns > 1

    @property
    def ending(self) -> str:
        """How the episode ended, as a sentence."""
        reason = self.trajectory.stop_reason
        if reason == StopReason.LENGTH and not self.has_cut_reply and not self.has_full_context:
            return "The environment was done, or the model ended its last turn."
        return next((known.sentence for known in StopReason if known == reason), reason)

    @cached_property
    def replies(self) -> list[str]:
        """The model's replies, without its thoughts."""
        replies = [text for role, text in self.messages if role == "assistant"]
        return [strip_thoughts(text) if MARKUP.search(text) else text for text in replies]

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


METRIC_FAILURES: dict[str, tuple[Callable[[float], bool], str]] = {
    "legal": (lambda share: share < 1, "illegal move"),
    "opponent_illegal": (lambda count: count > 0, "opponent's illegal move"),
    "invalid_actions": (lambda count: count > 0, "invalid action"),
    "lost": (lambda flag: flag == 1, "game lost"),
    "drawn": (lambda flag: flag == 1, "game drawn"),
    "finished": (lambda flag: flag == 0, "game not finished"),
    "won": (lambda flag: flag == 0, "game not won"),
    "solved": (lambda flag: flag == 0, "task not solved"),
    "patch_is_empty": (lambda flag: flag == 1, "empty patch"),
    "patch_applies": (lambda flag: flag == 0, "patch does not apply"),
}
"""Numbers that the included environments report and that explain a failure. The first match counts."""


def classify(episode: EvaluatedEpisode) -> dict[str, str]:
    """Return {category: evidence} of a failed episode: "other" if no category fits, and {} for a success."""
    trajectory, n_turns = episode.trajectory, episode.n_turns
    if not episode.is_valid:
        return {f"invalid: {trajectory.stop_reason}": trajectory.error or trajectory.stop_reason}
    if episode.is_success:
        return {}
    if episode.failure:
        return {episode.failure: "reported by the environment"}
    errors, reply = episode.errors, episode.replies[-1] if episode.replies else ""
    authorization = next((text for text in errors if AUTHORIZATION.search(text)), None)
    not_found = next((text for text in errors if NOT_FOUND.search(text)), None)
    others = (text for text in errors if not AUTHORIZATION.search(text) and not NOT_FOUND.search(text))
    arguments = next((text for text in others if ARGUMENTS.search(text)), None)
    # The model claims to be done if it says so or stops calling tools.
    has_stopped = trajectory.stop_reason == StopReason.STOP and episode.n_tool_calls > 0 and not _count_calls(reply)
    turns = f"after {n_turns} turn{'' if n_turns == 1 else 's'}"
    evidence = {
        "tool arguments": next(filter(None, map(_find_call_error, episode.replies)), arguments),
        "authorization": authorization,
        "resource not found": not_found,
        "false completion": reply if DONE.search(reply) or has_stopped else None,
        "cut reply": f"… {reply[-EXCERPT_CHARACTERS:]}" if episode.has_cut_reply else None,
        "context overflow": turns if episode.has_full_context else None,
        "turn limit": turns if trajectory.stop_reason == StopReason.MAX_TURNS else None,
    }
    return {name: text for name, text in evidence.items() if text is not None} or {"other": reply}


def read_evaluation(run_folder: RunFolder, step: int | None) -> list[EvaluatedTrajectory]:
    """Read an evaluation's trajectories. `step` is None for a run that only evaluates. DataError for a bad line."""
    episodes = map(parse_episode, read_rows(RemoteFolder(str(run_folder.evals(step)))))
    return [replace(e.trajectory, reason=next(iter(classify(e)), "")) for e in episodes]


def read_episodes(folder: RemoteFolder, step: int) -> list[EvaluatedEpisode]:
    """Read the episodes of one evaluation. Raise DataError for a line that is not a JSON object."""
    return [parse_episode(row) for row in read_rows(folder / f"global_step_{step}")]


def parse_episode(row: dict[str, Any]) -> EvaluatedEpisode:
    """Parse a trajectory row as written by this project or by SkyRL."""
    trajectory = parse_trajectory(row)
    segments = [*(row.get("earlier") or ()), row]
    messages: list[EpisodeMessage] = []
    for segment in segments:  # each response starts with a reply of the model
        messages += split_messages(str(segment.get("output_response") or ""), "assistant")
    extras = row.get("env_extras") or {}
    uid = str(row.get("uid") or "")
    turns = tuple(row.get("turns") or ())
    scores = [segment["score"] for segment in segments if isinstance(segment.get("score"), list)]
    return EvaluatedEpisode(
        trajectory,
        prompt_key=str(extras.get("task_key") or uid.rpartition("_")[0] or trajectory.prompt),
        messages=tuple(messages),
        turns=turns,
        n_tokens=sum(map(len, scores)) or sum(turn.get("end", 0) - turn.get("start", 0) for turn in turns),
        env_metrics=row.get("env_metrics") or {},
        is_success=bool(row.get("is_success", (trajectory.score or 0.0) > 0)),  # not in SkyRL's files
    )


def split_messages(text: str, first_role: str) -> list[EpisodeMessage]:
    """Split the text of a template into its messages. `first_role` applies up to the first header."""
    found = list(ROLE.finditer(text))
    roles = [first_role, *(next(filter(None, match.groups())) for match in found)]
    starts, ends = [0, *(match.end() for match in found)], [*(match.start() for match in found), len(text)]
    messages = []
    for role, start, end in zip(roles, starts, ends, strict=True):
        role, content = "assistant" if role == "model" else role, SPECIAL.sub("", text[start:end]).strip()
        if content or (role == "assistant" and start < len(text)):
            messages.append(EpisodeMessage(role, content))
    return messages


class ReplyParts(NamedTuple):
    """A reply of the model, taken apart. A call is `{"name": …, "arguments": …}`."""

    thought: str
    text: str
    calls: list[dict[str, Any]]
    fault: str | None
    """Why the calls cannot be parsed, or None."""


def split_reply(reply: str) -> ReplyParts:
    """Take a reply apart into thoughts, text and tool calls.

    >>> split_reply('<think>Look.</think>I look.<tool_call>{"name": "look"}</tool_call>')
    ReplyParts(thought='Look.', text='I look.', calls=[{'name': 'look', 'arguments': {}}], fault=None)
    """
    if not MARKUP.search(reply):
        return ReplyParts("", reply, [], None)
    visible = strip_thoughts(reply)
    hidden = reply.removesuffix(visible) if reply.endswith(visible) else reply.replace(visible, "", 1)
    thought = THOUGHT_TAG.sub("", hidden).strip()
    try:
        text, calls = split_calls(visible)
    except ToolCallError as error:
        return ReplyParts(thought, visible.strip(), [], str(error))
    return ReplyParts(thought, text.strip(), [{"name": c.name, "arguments": c.arguments} for c in calls], None)
