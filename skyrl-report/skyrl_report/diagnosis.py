"""Rules that find problems in the metrics of a run. Each names the numbers, the likely cause and the setting to change.

A rule is a pure function of metric rows and the configuration, so it gives the same result during a run and in the
report of a finished one. This file imports nothing of the project.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

Rows = Sequence[Mapping[str, Any]]
Config = Mapping[str, Any]
Rule = Callable[[Rows, Config], str | None]

N_FIRST, N_LAST = 20, 100
"""Rules see the first and the last rows of a run, so a step costs the same however long the run is."""

N_STEPS = 3
"""Number of steps over which a rule averages, so that one bad step is not reported."""

GUIDE = "docs/guides/debugging.md"


class Finding(NamedTuple):
    """A rule that fired, e.g. `Finding(12, "invalid_rollouts", "…")`."""

    step: int
    rule: str
    text: str


class Diagnosis:
    """The rules that have not fired yet, and the rows that they read."""

    def __init__(self, config: Config, rows: Rows = (), fired: Iterable[str] = ()) -> None:
        """Continue after the rows of earlier steps, in which the rules `fired` have fired."""
        self._config, self._fired = config, set(fired)
        self._first = [*rows[:N_FIRST]]
        self._last = deque(rows[N_FIRST:], maxlen=N_LAST)

    def add(self, row: Mapping[str, Any]) -> list[Finding]:
        """Return the rules that fire at this step. Each fires once."""
        (self._first if len(self._first) < N_FIRST else self._last).append(row)
        rows, findings = [*self._first, *self._last], []
        for name, rule in RULES.items():
            if name not in self._fired and (text := rule(rows, self._config)):
                findings.append(Finding(row["step"], name, text))
        self._fired |= {finding.rule for finding in findings}
        return findings


def diagnose(rows: Iterable[Mapping[str, Any]], config: Config) -> list[Finding]:
    """Return what the rules find in the rows of a run, as if they arrived one by one."""
    diagnosis = Diagnosis(config)
    return [finding for row in rows for finding in diagnosis.add(row)]


def read_findings(file: Path) -> list[Finding]:
    """Return the findings of a run. A line that was cut off when the run was killed is left out."""
    findings = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            findings.append(Finding(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return findings


def append_findings(file: Path, findings: Sequence[Finding]) -> None:
    """Append a line for each finding."""
    if findings:
        with file.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(finding._asdict()) + "\n" for finding in findings)


# -- access to metrics and settings


def numbers(rows: Rows, name: str) -> list[float]:
    """Return a metric's numbers. Rows without it, and NaN or infinite values, are left out."""
    values = (row.get(name) for row in rows)
    return [value for value in values if value is not None and math.isfinite(value)]


def newest(rows: Rows, name: str, n: int = N_STEPS) -> float | None:
    """Return the mean of a metric's last n numbers, or None if it has fewer."""
    values = numbers(rows, name)[-n:]
    return statistics.fmean(values) if len(values) == n else None


def oldest(rows: Rows, name: str, n: int = N_STEPS) -> float | None:
    """Return the mean of a metric's first n numbers, or None if it has not twice as many."""
    values = numbers(rows, name)
    return statistics.fmean(values[:n]) if len(values) >= 2 * n else None


def setting(config: Config, key: str, default: Any = None) -> Any:
    """Return the value of a key such as `trainer.seed`, or the default if it is missing or null."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return default if value is None else value


# -- the rules


def find_missing_signal(rows: Rows, config: Config = MappingProxyType({})) -> str | None:
    """Find steps whose advantages or gradients were all 0."""
    for metric, meaning, fix in (
        (
            "loss/avg_raw_advantages_abs",
            "all advantages were 0, because the rewards within each group are equal",
            "If all prompts are solved, stop. Otherwise use prompts that the model solves sometimes, shape "
            "the rewards, raise generator.n_samples_per_prompt, or sample with a temperature above 0",
        ),
        ("policy/grad_norm", "the gradient was 0", "Check the loss settings and what the loss mask leaves out"),
    ):
        values = [row[metric] for row in rows if row.get(metric) is not None][-N_STEPS:]
        if len(values) == N_STEPS and not any(values):
            return f"In the last {N_STEPS} steps, {meaning}: the policy is not learning. {fix}. See {GUIDE}."
    return None


def find_entropy_collapse(rows: Rows, config: Config) -> str | None:
    """Find an entropy near 0 although the task is not solved, with samples too equal to learn from."""
    now, before = newest(rows, "policy/policy_entropy"), oldest(rows, "policy/policy_entropy")
    signal, reward = newest(rows, "generate/signal_ratio", 5), newest(rows, "reward/avg_raw_reward", 5)
    solved = newest(rows, f"reward/avg_pass_at_{setting(config, 'generator.n_samples_per_prompt', 1)}", 5)
    if now is None or before is None or reward is None or signal is None or solved is None:
        return None
    if now > 0.1 * before or now > 0.2 or solved > 0.9 or signal > 0.3:
        return None
    return (
        f"The policy's entropy fell from {before:.3g} to {now:.3g} nats while only {solved:.0%} of the prompts have "
        f"a successful sample (mean reward {reward:.3g}), and {1 - signal:.0%} of the groups have equal rewards: the "
        "policy has stopped exploring. Lower "
        "trainer.policy.optimizer_config.lr, raise trainer.algorithm.eps_clip_high, or use a KL loss "
        "(trainer.algorithm.use_kl_loss=true)."
    )


def find_kl_explosion(rows: Rows, config: Config) -> str | None:
    """Find a divergence from the reference that grows tenfold within ten steps."""
    for name in ("policy/policy_kl", "loss/avg_kl"):
        values = numbers(rows, name)
        if len(values) < 8:
            continue
        now, before = statistics.fmean(values[-3:]), statistics.median(values[-13:-3])
        if now > 1.0 and now > 10 * before:
            return (
                f"{name} rose from {before:.3g} to {now:.3g} within ten steps: the policy runs away from the "
                "reference, and its replies may become nonsense. Lower trainer.policy.optimizer_config.lr, take fewer "
                "updates per step (trainer.update_epochs_per_batch, trainer.policy_mini_batch_size), or raise "
                "trainer.algorithm.kl_loss_coef."
            )
    return None


def find_length_limit(rows: Rows, config: Config) -> str | None:
    """Find replies that are cut off. Very short limits belong to games whose actions are tokens."""
    limit = setting(config, "generator.sampling_params.max_generate_length", 0)
    share = newest(rows, "generate/truncated_ratio")
    if share is None or share <= 0.3 or limit <= 8:
        return None
    return (
        f"{share:.0%} of the replies reach a length limit, so they end without an answer. Raise "
        f"generator.sampling_params.max_generate_length={limit} or generator.max_input_length, ask for shorter "
        "answers, or punish long ones (trainer.algorithm.overlong_buffer_len)."
    )


def find_invalid_rollouts(rows: Rows, config: Config) -> str | None:
    """Find rollouts that fail."""
    n_invalid, n_batches = newest(rows, "generate/n_invalid"), newest(rows, "generate/n_sample_batches") or 1
    n_prompts = setting(config, "trainer.train_batch_size", 0)
    n_played = n_batches * n_prompts * setting(config, "generator.n_samples_per_prompt", 1)
    if not n_invalid or not n_played or n_invalid / n_played <= 0.05:
        return None
    prefix = "generate/n_invalid/"
    counts: dict[str, float] = {}
    for row in rows[-N_STEPS:]:
        for name in row:
            if name.startswith(prefix):
                counts[name] = counts.get(name, 0) + (row[name] or 0)
    reason = max(counts, key=counts.__getitem__, default=prefix).removeprefix(prefix)
    return (
        f"{n_invalid / n_played:.0%} of the rollouts of the last {N_STEPS} steps are invalid, most of them with stop "
        f"reason {reason}. They are not trained on. The errors are in train.log: fix the environment or reward that "
        "raises them, or raise the time limit that they exceed."
    )


def find_reward_hacking(rows: Rows, config: Config) -> str | None:
    """Find a training reward that rises while the evaluation falls."""
    evaluated = [row for row in rows if numbers([row], "eval/all/avg_score")]
    scores = numbers(evaluated, "eval/all/avg_score")
    if len(scores) < 4:
        return None
    index = max(range(len(scores) - 2), key=scores.__getitem__)
    best, worse = scores[index], max(scores[-2:])
    steps = [row["step"] for row in evaluated]
    before = newest([row for row in rows if row["step"] <= steps[index]], "reward/avg_raw_reward")
    now = newest(rows, "reward/avg_raw_reward")
    if before is None or now is None or best - worse <= 0.1 * abs(best) or now - before <= 0.05 * abs(before):
        return None
    return (
        f"The training reward rose from {before:.3g} to {now:.3g} since step {steps[index]}, but the evaluation fell "
        f"from {best:.3g} to {scores[-1]:.3g}: the policy exploits the training reward, or fits its prompts. Read "
        "trajectories (trainer.dump_trajectories=true), fix the reward, use more prompts, or raise "
        "trainer.algorithm.kl_loss_coef."
    )


def find_length_change(rows: Rows, config: Config) -> str | None:
    """Find replies whose length changes several times over while the reward rises but the evaluation does not."""
    name, scores = "generate/avg_num_tokens", numbers(rows, "eval/all/avg_score")
    now, before = newest(rows, name), oldest(rows, name)
    reward, first = newest(rows, "reward/avg_raw_reward"), oldest(rows, "reward/avg_raw_reward")
    if now is None or before is None or reward is None or first is None or reward <= first:
        return None
    is_confirmed = len(scores) >= 2 and scores[-1] > scores[0]
    ratio = now / max(before, 1.0)
    if is_confirmed or 1 / 4 < ratio < 4 or (ratio < 1 and len(scores) < 2):
        return None
    verb = "grew" if ratio > 1 else "shrank"
    evidence = "no evaluation confirms" if len(scores) < 2 else "the evaluation does not confirm"
    return (
        f"Replies {verb} from {before:.0f} to {now:.0f} tokens while the reward rose from {first:.3g} to {reward:.3g}, "
        f"which {evidence}: the reward may depend on the length. Read trajectories (trainer.dump_trajectories=true), "
        "and score the answer instead of its length."
    )


def find_mismatch(rows: Rows, config: Config) -> str | None:
    """Find log-probs of the engine that differ from the trainer's. Log-probs of stale rollouts differ by nature."""
    name = "policy/rollout_train_logprobs_abs_diff_mean"
    gap, is_stale = newest(rows, name), bool(newest(rows, "async/staleness_max"))
    limit = 0.3 if is_stale else 0.05
    if gap is None or gap <= limit:
        return None
    return (
        f"The log-probs of engine and trainer differ by {gap:.3g} nats per token on average, more than {limit:g}: the "
        "policy trains on tokens that it did not sample. Compare the dtypes (trainer.policy.model.dtype, "
        "trainer.bf16), the sampling parameters and the chat template of both. "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token reduces the damage."
    )


def find_idle_engine(rows: Rows, config: Config) -> str | None:
    """Find engines on devices of their own that wait for updates."""
    if setting(config, "trainer.fully_async.enabled", False):
        staleness = setting(config, "trainer.fully_async.max_staleness_steps", 1)
        n_ready = newest(rows, "async/gen_buffer_qsize_at_wait_start", 5)
        if n_ready is None or n_ready <= staleness + 0.5:
            return None
        return (
            f"When a step starts, all {staleness + 1} batches are already played (on average {n_ready:.1f}), so the "
            "engines wait for the trainer. Give the trainer more devices and the engines fewer, or raise "
            "trainer.fully_async.max_staleness_steps."
        )
    if setting(config, "trainer.placement.colocate_all", True):
        return None
    step, generate = newest(rows, "timing/step", 5), newest(rows, "timing/generate", 5)
    if not step or generate is None or generate > 0.5 * step:
        return None
    return (
        f"The engines work in {generate / step:.0%} of a step ({generate:.1f} of {step:.1f} s) and have devices of "
        "their own, so these idle for the rest. Play rollouts during updates with trainer.fully_async.enabled=true, or "
        "share the devices with trainer.placement.colocate_all=true."
    )


def find_stragglers(rows: Rows, config: Config) -> str | None:
    """Find steps that wait for a few slow rollouts."""
    mean, longest = newest(rows, "generate/avg_seconds", 5), newest(rows, "generate/max_seconds", 5)
    step, generate = newest(rows, "timing/step", 5), newest(rows, "timing/generate", 5)
    if mean is None or longest is None or not step or generate is None:
        return None
    if longest < 5.0 or longest < 4 * mean or generate < 0.5 * step:
        return None
    return (
        f"The slowest rollout of a step takes {longest:.1f} s and the average one {mean:.1f} s, so the rest of the "
        f"batch waits ({generate / step:.0%} of the step is rollouts). Limit slow ones with "
        "generator.trajectory_timeout_seconds, generator.max_turns or "
        "generator.sampling_params.max_generate_length, or let steps overlap with trainer.fully_async.enabled=true."
    )


def find_padding(rows: Rows, config: Config) -> str | None:
    """Find micro-batches that consist of padding for the most part."""
    for name in ("memory/padding_ratio_policy", "memory/padding_ratio_reward"):
        share = newest(rows, name)
        if share is not None and share > 0.5:
            return (
                f"{share:.0%} of the tokens that an update computes are padding, because this model pads the rows of a "
                "micro-batch to the longest. Set trainer.micro_train_batch_size_per_gpu=1, or lower "
                "trainer.max_tokens_per_microbatch, so that fewer rows of unequal length share one."
            )
    return None


def find_memory_creep(rows: Rows, config: Config) -> str | None:
    """Find memory that grows in each quarter of the last 40 steps, without longer rows."""
    for name in ("memory/step", "system/memory_usage"):
        values = numbers(rows, name)[5:][-40:]  # the first steps allocate
        if len(values) < 40:
            continue
        means = [statistics.fmean(values[start : start + 10]) for start in range(0, 40, 10)]
        lengths = numbers(rows, "generate/max_num_tokens")[-40:]
        is_longer = len(lengths) == 40 and max(lengths[20:]) > 1.1 * max(lengths[:20])
        if is_longer or means[-1] < 1.2 * means[0] or any(b < 1.03 * a for a, b in pairwise(means)):
            continue
        per_step = (means[-1] - means[0]) / 30
        return (
            f"{name} grew from {means[0]:.2f} to {means[-1]:.2f} GB over 40 steps ({1000 * per_step:.0f} MB per step), "
            "although rows did not get longer: something keeps references, often an environment, a reward function or "
            "a callback. Run environments with environment.skyrl_gym.isolation=process to tell which."
        )
    return None


def find_unused_tools(rows: Rows, config: Config) -> str | None:
    """Find agents that offer tools which the model never calls."""
    if (share := newest(rows, "agent/no_tool_calls", 1)) is None or share < 1:
        return None
    return (
        "The requests of all rollouts offered tools, and no reply called one: does the model write calls in the format "
        "of its chat template? Set generator.chat_template, or show the format in the prompt."
    )


RULES: dict[str, Rule] = {
    "no_signal": find_missing_signal,
    "entropy_collapse": find_entropy_collapse,
    "kl_explosion": find_kl_explosion,
    "length_limit": find_length_limit,
    "invalid_rollouts": find_invalid_rollouts,
    "reward_hacking": find_reward_hacking,
    "length_change": find_length_change,
    "logprob_mismatch": find_mismatch,
    "idle_engine": find_idle_engine,
    "stragglers": find_stragglers,
    "padding": find_padding,
    "memory_creep": find_memory_creep,
    "unused_tools": find_unused_tools,
}
