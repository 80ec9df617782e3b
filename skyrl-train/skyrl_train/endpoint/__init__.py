"""HTTP endpoint for the model under training, with OpenAI's and Anthropic's APIs. Requests become trajectories."""

from skyrl_train.endpoint.process import EndpointProcess
from skyrl_train.endpoint.server import Endpoint
from skyrl_train.endpoint.service import ModelService
from skyrl_train.endpoint.session import AgentSession

__all__ = ["AgentSession", "Endpoint", "EndpointProcess", "ModelService"]
