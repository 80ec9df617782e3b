"""SkyRL's module names since March 2026 (`skyrl.train`, `skyrl.backends`), for scripts that import them."""

import sys

from skyrl.layout import Layout

sys.meta_path.append(Layout())
