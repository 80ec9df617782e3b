"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

_BAR = "{desc}{n_fmt}/{total_fmt} {percentage:.0f}% |{bar:20}| {elapsed}<{remaining}, {rate_fmt}{postfix}"
_EVAL_METRICS = ("eval/all/avg_score", "eval/environment/", "val/loss", "val/accuracy")  # prefixes
_MAX_EVAL_METRICS = 3


class Progress:
    """A progress line: steps done, reward or loss, latest evaluation, tokens per second, time left, steps per second.

    `stream` defaults to standard error. A terminal shows one changing line. Elsewhere, a line is written every
    `seconds_between_lines`, and for the first step, the last step and steps with evaluation metrics.
    """

    def __init__(
        self, total_steps: int, initial_step: int, stream: TextIO | None = None, *, seconds_between_lines: float = 5.0
    ) -> None:
        self._stream = stream or sys.stderr
        self._total_steps = total_steps
        self._initial_step = initial_step
        self._seconds_between_lines = seconds_between_lines
        self._started = time.monotonic()
        self._last_line_at: float | None = None
        self._shown: dict[str, str] = {}
        self._bar: tqdm | None = None
        # In some containers a terminal has a width of 0, and a bar would show nothing.
        if self._stream.isatty() and os.get_terminal_size(self._stream.fileno()).columns > 0:
            self._bar = tqdm(
                total=total_steps,
                initial=initial_step,
                file=self._stream,
                desc="step ",
                unit=" steps",
                bar_format=_BAR,
                dynamic_ncols=True,
            )

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` is done. Metrics that it lacks stay on the line with their last value."""
        if (reward := metrics.get("reward/avg_raw_reward")) is not None:
            n_failed = int(metrics.get("generate/n_invalid", 0))
            self._shown["reward"] = f"reward {reward:.3f}" + (f" ({n_failed} failed)" if n_failed else "")
        if (loss := metrics.get("train/loss")) is not None:
            self._shown["loss"] = f"loss {loss:.4f}"
        scores = [f"{n.rpartition('/')[2]} {value:.3f}" for n, value in metrics.items() if n.startswith(_EVAL_METRICS)]
        if scores:
            self._shown["eval"] = f"eval at step {step}: {', '.join(scores[:_MAX_EVAL_METRICS])}"
        if (tokens_per_second := metrics.get("trainer/tokens_per_second")) is not None:
            self._shown["speed"] = f"{tokens_per_second:,.0f} tok/s"
        shown = [self._shown[key] for key in ("reward", "loss", "eval", "speed") if key in self._shown]
        if self._bar is not None:
            self._bar.set_postfix_str(" · ".join(shown), refresh=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()
            return
        now = time.monotonic()
        is_recent = self._last_line_at is not None and now - self._last_line_at < self._seconds_between_lines
        if is_recent and not scores and step < self._total_steps:
            return
        self._last_line_at, elapsed = now, now - self._started
        percentage = 100 * step / max(self._total_steps, 1)
        parts = [f"step {step}/{self._total_steps} ({percentage:.0f}%)", *shown]
        parts.append(f"{tqdm.format_interval(elapsed)} elapsed")
        n_done = step - self._initial_step
        if n_done > 0 and step < self._total_steps:
            parts.append(f"{tqdm.format_interval(elapsed / n_done * (self._total_steps - step))} left")
        if n_done > 0:
            is_slow = elapsed > n_done
            parts.append(f"{elapsed / n_done:.2f} s/step" if is_slow else f"{n_done / max(elapsed, 1e-9):.2f} steps/s")
        self._stream.write(" · ".join(parts) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Move the terminal to a fresh line. Safe to call twice."""
        if self._bar is not None:
            self._bar.close()
