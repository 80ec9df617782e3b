"""Dispatchers run the phases of many trajectories in parallel, within limits."""

from skyrl_agent.dispatcher.dispatchers import Dispatcher, create_dispatchers

__all__ = ["Dispatcher", "create_dispatchers"]
