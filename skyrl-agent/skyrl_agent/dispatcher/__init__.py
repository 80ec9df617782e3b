"""Dispatchers run the phases of many trajectories in parallel, within limits."""

from skyrl_agent.dispatcher.dispatchers import TrajectoryDispatcher, create_dispatchers

__all__ = ["TrajectoryDispatcher", "create_dispatchers"]
