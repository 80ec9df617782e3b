"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

_BAR = "{desc}{n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining}{postfix}"
_MAX_EVAL_METRICS = 3


class Progress:
    """A progress line: step/total, reward or loss, latest evaluation, tokens per second and time left.

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
        self._last_line: float | None = None
        self._shown: dict[str, str] = {}
        self._bar: tqdm | None = None
        if _is_terminal(self._stream):
            self._bar = tqdm(
                total=total_steps,
                initial=initial_step,
                file=self._stream,
                desc="step ",
                bar_format=_BAR,
                dynamic_ncols=True,
            )

    def update(
        self,
        step: int,
        *,
        reward: float | None = None,
        n_failed: int = 0,
        loss: float | None = None,
        eval_metrics: Mapping[str, float] | None = None,
        tokens_per_second: float | None = None,
    ) -> None:
        """Show that `step` is done. Values that are not passed keep their latest value on the line."""
        if reward is not None:
            self._shown["reward"] = f"reward {reward:.3f}" + (f" ({n_failed} rollouts failed)" if n_failed else "")
        if loss is not None:
            self._shown["loss"] = f"loss {loss:.4f}"
        if eval_metrics:
            self._shown["eval"] = f"eval at step {step}: {_format_eval(eval_metrics)}"
        if tokens_per_second is not None:
            self._shown["speed"] = f"{tokens_per_second:,.0f} tok/s"
        if self._bar is not None:
            self._bar.set_postfix_str(" · ".join(self._shown_parts()), refresh=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()
        elif self._is_line_due(step, has_eval=bool(eval_metrics)):
            self._write_line(step)

    def close(self) -> None:
        """Move the terminal to a fresh line. Safe to call twice."""
        if self._bar is not None:
            self._bar.close()

    def _shown_parts(self) -> list[str]:
        return [self._shown[key] for key in ("reward", "loss", "eval", "speed") if key in self._shown]

    def _is_line_due(self, step: int, *, has_eval: bool) -> bool:
        if self._last_line is None or has_eval or step >= self._total_steps:
            return True
        return time.monotonic() - self._last_line >= self._seconds_between_lines

    def _write_line(self, step: int) -> None:
        now = time.monotonic()
        elapsed, n_done = now - self._started, step - self._initial_step
        parts = [f"step {step}/{self._total_steps}", *self._shown_parts(), f"{tqdm.format_interval(elapsed)} elapsed"]
        if n_done > 0 and step < self._total_steps:
            parts.append(f"{tqdm.format_interval(elapsed / n_done * (self._total_steps - step))} left")
        self._stream.write(" · ".join(parts) + "\n")
        self._stream.flush()
        self._last_line = now


def _is_terminal(stream: TextIO) -> bool:
    """Return True for a terminal with a width. In some containers the width is 0, and a bar would show nothing."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def _format_eval(metrics: Mapping[str, float]) -> str:
    """Format the first few metrics without their prefixes: `avg_score 0.91, catch_rate 0.97`."""
    shown = list(metrics.items())[:_MAX_EVAL_METRICS]
    return ", ".join(f"{name.rpartition('/')[2]} {value:.3f}" for name, value in shown)
