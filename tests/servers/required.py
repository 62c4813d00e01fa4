"""What becomes of a test whose server is not installed."""

import os

import pytest

from servers.server import Controls


def require(server: type[Controls]) -> None:
    """Skips the test if the server's programs are missing; on CI, where nothing may be missing, fails it."""
    if not server.available():
        reason = f"{server.__name__} is not installed"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
