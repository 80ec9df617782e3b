"""The command `skyrl` with Fleet's environment: `python -m integrations.fleet doctor KEY=VALUE…`.

To train, use `integrations.fleet.entrypoints.main_fleet`. It also logs metrics by environment.
"""

from integrations.fleet.entrypoints.main_fleet import register_fleet
from skyrl_train.entrypoints.cli import main

if __name__ == "__main__":
    register_fleet()
    raise SystemExit(main())
