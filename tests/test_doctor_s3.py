"""The doctor at a real S3 server: in order, and what is wrong, each with its way out and no secret."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from s3_medium import S3Medium

import rr_dataset as rr
from rr_dataset.doctor import remote
from rr_dataset.storage.remote import RemoteStorage

if TYPE_CHECKING:
    from weed import Place

SPEC = rr.RoutingSpec((1, 2), num_experts=16, top_k=2)
STORE = ["dataset", "publish", "list and read", "rate", "parts", "clock", "writing"]


def at_store(place: Place, uri: str = "", **options: Any) -> dict[str, rr.Finding]:
    """The findings behind those of the host."""
    found = rr.doctor(uri or place.uri, storage_options={**place.options, **options})
    assert "secret-of-the-tests" not in str(found)
    assert "hush" not in str(found)
    return {each.check: each for each in found[[each.check for each in found].index("dataset") :]}


def test_a_store_in_order_is_left_as_it_was(s3: Place) -> None:
    rr.create_dataset(s3.uri, SPEC, storage_options=s3.options)
    seen = at_store(s3)
    assert list(seen) == STORE
    assert [each for each in seen.values() if each.level == "fail"] == []
    assert S3Medium(s3, "s3fs").objects() == {"_rr/format.json"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": "nosuch", "secret": "hush"}, "AWS_ACCESS_KEY_ID"),
        ({"secret": "hush"}, "AWS_SECRET_ACCESS_KEY"),
        ({"endpoint_url": "http://127.0.0.1:1"}, "AWS_ENDPOINT_URL"),
    ],
)
def test_what_keeps_it_from_the_store(s3: Place, options: dict[str, Any], said: str) -> None:
    (finding,) = at_store(s3, **options).values()
    assert (finding.check, finding.level) == ("dataset", "fail")
    assert said in finding.way_out


def test_no_credentials_are_found(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    (finding,) = at_store(s3, key=None, secret=None).values()
    assert (finding.check, finding.level) == ("dataset", "fail")
    assert "no credentials were found" in finding.seen
    assert "AWS_PROFILE" in finding.way_out


def test_clocks_that_may_not_differ(s3: Place) -> None:
    rr.create_dataset(s3.uri, SPEC, max_clock_skew_s=0.0, storage_options=s3.options)
    found = at_store(s3)["dataset"]
    assert (found.level, "max_clock_skew_s is 0" in found.seen) == ("warn", True)
    assert "--max-clock-skew 1" in found.way_out


def test_a_wrong_bucket(s3: Place) -> None:
    (finding,) = at_store(s3, "s3://no-such-bucket/x").values()
    assert "no such bucket" in finding.seen


def test_a_key_that_may_only_read(s3: Place) -> None:
    reader = {"key": "rr-test-reader", "secret": "reader-secret-of-the-tests"}
    assert at_store(s3, **reader)["writing"].level == "fail"
    rr.create_dataset(s3.uri, SPEC, storage_options=s3.options)
    found = at_store(s3, **reader)["writing"]
    assert (found.level, "enough to read" in found.way_out) == ("warn", True)


def test_a_store_that_replaces(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    create = RemoteStorage.create
    monkeypatch.setattr(RemoteStorage, "create", lambda *a, **k: create(*a, **k) or True)
    assert at_store(s3)["publish"].level == "fail"


def test_clocks_apart(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = remote.time.time
    monkeypatch.setattr(remote.time, "time", lambda: real() - 30)
    assert at_store(s3)["clock"].level == "fail"
