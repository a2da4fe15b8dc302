"""A server for the tiny model that many tests share."""

import pytest
from live_server import serving


@pytest.fixture(scope="session")
def server(loaded, engine):
    with serving(loaded, engine) as running:
        yield running
