"""Settings of every test run."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from counting_proxy import CountingProxy
    from s3_medium import S3Medium
    from weed import Place, S3Server

# Files are written and processes started inside properties: the time of one example says nothing.
settings.register_profile("ci", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A job in the background, or under nohup, ignores these, and so would all processes that the tests start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server, started by the first test that asks for it."""
    weed = importlib.import_module("weed")  # botocore takes a quarter of a second, from those who ask
    try:
        with weed.S3Server.started() as server:
            yield server
    except weed.NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture
def s3(s3_server: S3Server) -> Place:
    """An own prefix: `uri`, `options` for `storage_options`, `environment` for processes, botocore's `client`."""
    return s3_server.place()


@pytest.fixture(params=["obstore", "s3fs"])
def medium(s3: Place, request: pytest.FixtureRequest) -> S3Medium:
    """A place and what sees it without the product, for each client; `storage_options` name it."""
    made: S3Medium = importlib.import_module("s3_medium").S3Medium(s3, request.param)
    return made


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CountingProxy]:
    """Before the server: counts requests, and fails those it is told to."""
    with importlib.import_module("counting_proxy").CountingProxy.before(s3_server.port) as proxy:
        yield proxy
