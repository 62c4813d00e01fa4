"""The command `apscheduler-fence`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its extra, say how to get it."""
    try:
        from apscheduler_fence.cli.group import group  # noqa: PLC0415 - click and rich are an extra
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f'{error.name} is missing: pip install "apscheduler-fence[cli]"')
    group()
