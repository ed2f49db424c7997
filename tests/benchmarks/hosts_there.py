"""Tests on hosts with shaped links, where this machine can make them."""

import pytest


def skip_without_hosts(done):
    """Skips the test where its script has ended because hosts cannot be made here."""
    if done.returncode == 2 and (
        "needs Linux and root" in done.stderr or "it needs the command" in done.stderr
    ):
        pytest.skip(done.stderr.strip())
