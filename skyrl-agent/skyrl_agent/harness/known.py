"""Known agents: commands, environment variables and files. A harness file can define the same for other agents.

Placeholders: {task}, {model}, {base_url} (with /v1), {origin} (without), {api_key}, {home}, {cwd}.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL_LIMITS = {"contextWindow": 131_072, "maxTokens": 16_384}
PI_MODEL = {
    "id": "{model}",
    "name": "{model}",
    "reasoning": False,
    "input": ["text"],
    "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
    **MODEL_LIMITS,
}
PI_PROVIDER = {"baseUrl": "{base_url}", "api": "openai-completions", "apiKey": "{api_key}", "models": [PI_MODEL]}
OPENCODE_PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "SkyRL",
    "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
    "models": {"{model}": {"name": "{model}", "limit": {"context": 131_072, "output": 16_384}}},
}
CODEX_CONFIG = """\
model = "{model}"
model_provider = "skyrl"

[model_providers.skyrl]
name = "SkyRL"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


@dataclass(frozen=True, slots=True)
class KnownAgent:
    """A program with its arguments, environment variables and files."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    install: str = ""


AGENTS: Mapping[str, KnownAgent] = {
    "mini-swe-agent": KnownAgent(
        ("mini", "-m", "openai/{model}", "-y", "--exit-immediately", "-o", "{home}/trajectory.json", "-t", "{task}"),
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        install="pip install mini-swe-agent",
    ),
    "pi": KnownAgent(
        ("pi", "-p", "--no-session", "--provider", "skyrl", "--model", "{model}", "{task}"),
        {"PI_CODING_AGENT_DIR": "{home}/.pi", "PI_OFFLINE": "1"},
        {"{home}/.pi/models.json": json.dumps({"providers": {"skyrl": PI_PROVIDER}})},
        install="npm install @mariozechner/pi-coding-agent",
    ),
    "opencode": KnownAgent(
        ("opencode", "run", "{task}"),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        {
            "{home}/.config/opencode/opencode.json": json.dumps(
                {"model": "skyrl/{model}", "provider": {"skyrl": OPENCODE_PROVIDER}}
            )
        },
        install="npm install opencode-ai",
    ),
    "codex": KnownAgent(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"),
        {"CODEX_HOME": "{home}/.codex"},
        {"{home}/.codex/config.toml": CODEX_CONFIG},
        install="npm install @openai/codex",
    ),
    "claude-code": KnownAgent(
        ("claude", "--bare", "-p", "--model", "{model}", "--dangerously-skip-permissions", "{task}"),
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"},
        install="npm install @anthropic-ai/claude-code",
    ),
}
