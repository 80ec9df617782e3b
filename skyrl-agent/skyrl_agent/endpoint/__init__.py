"""HTTP endpoint for the model under training, with OpenAI's and Anthropic's APIs. Requests become trajectories."""

from skyrl_agent.endpoint.process import EndpointProcess
from skyrl_agent.endpoint.server import Endpoint
from skyrl_agent.endpoint.service import ModelService
from skyrl_agent.endpoint.session import AgentSession

__all__ = ["AgentSession", "Endpoint", "EndpointProcess", "ModelService"]
