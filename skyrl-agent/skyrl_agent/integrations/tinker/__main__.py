"""Run `python -m skyrl_agent.integrations.tinker`."""

from skyrl_agent.integrations.tinker.agents import main

main()
