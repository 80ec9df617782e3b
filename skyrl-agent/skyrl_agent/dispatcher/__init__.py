"""Dispatchers run the phases of many trajectories in parallel, within limits."""

from skyrl_agent.dispatcher.dispatchers import DISPATCHERS, Dispatcher, create_dispatcher

__all__ = ["DISPATCHERS", "Dispatcher", "create_dispatcher"]
