"""A tool that runs Python programs on a SandboxFusion server or on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import urllib3

from skyrl_agent.tools.base import BaseTool, ToolUser, register_tool, text_parameters
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.python import PythonCodeExecutorToolGroup

TIMEOUT_S = 30.0


@register_tool("code_interpreter")
class CodeInterpreter(BaseTool):
    """A Python interpreter: the server at SANDBOX_FUSION_URL, or an isolated process if that is not set."""

    description = "Run a Python program and return what it prints. No state of earlier programs remains."
    parameters = text_parameters(code="The program. Print what you want to see.")

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Settings: `timeout` in seconds."""
        super().__init__(settings)
        self._timeout_s = float(self.settings.pop("timeout", TIMEOUT_S))
        if self.settings:
            raise ValueError(f"code_interpreter has no setting {next(iter(self.settings))!r}; it has timeout")
        self._url = os.environ.get("SANDBOX_FUSION_URL")
        self._local = None if self._url else PythonCodeExecutorToolGroup(timeout=self._timeout_s)

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        if self._local is not None:
            return self._local.python(params["code"]) or "(the program printed nothing)"
        body = {"code": params["code"], "language": "python", "run_timeout": self._timeout_s}
        try:
            response = urllib3.request(
                "POST", f"{self._url}/run_code", json=body, timeout=self._timeout_s + 10, retries=2
            )
            result = json.loads(response.data)["run_result"]
        except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ToolFailure(f"the sandbox at {self._url} failed: {error!r}") from error
        output = (result.get("stdout") or "") + (result.get("stderr") or "")
        return output.strip() or f"(the program printed nothing; status {result.get('status')})"
