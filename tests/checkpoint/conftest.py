"""A folder for the checkpoints that several tests of a file take up."""

import pytest


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")
