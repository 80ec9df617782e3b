"""An OpenAI-compatible HTTP endpoint in front of the engine under training, and trajectories from what it was asked."""

from skyrl_train.generators.endpoint.agent_generator import AgentGenerator
from skyrl_train.generators.endpoint.agents import Agent, AgentResult
from skyrl_train.generators.endpoint.server import Endpoint
from skyrl_train.generators.endpoint.service import ModelService
from skyrl_train.generators.endpoint.session import Session

__all__ = ["Agent", "AgentGenerator", "AgentResult", "Endpoint", "ModelService", "Session"]
