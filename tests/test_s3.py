"""A dataset on S3, from the first put to an empty bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from s3_medium import S3Medium

import rr_dataset as rr

if TYPE_CHECKING:
    from weed import Place

SPEC = rr.RoutingSpec(range(4), num_experts=16, top_k=2)
IDS = [f"p{number % 4}:0:{number}:0" for number in range(20)]


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_a_dataset_lives_and_dies(s3: Place, client: str) -> None:
    medium = S3Medium(s3, client)
    routing = dict(zip(IDS, np.arange(20 * 5 * 4 * 2, dtype=np.uint8).reshape(20, 5, 4, 2) % 16, strict=True))
    options = rr.WriterOptions(spool_bytes=8 << 20, slab_bytes=1 << 20, storage_options=medium.options)
    with rr.RoutingWriter(s3.uri, options, create=SPEC) as writer:
        for half in (IDS[:10], IDS[10:]):
            for request_id in half:
                writer.put(request_id, routing[request_id])
            writer.flush(60)
    dataset = rr.open_dataset(s3.uri, storage_options=medium.options)
    np.testing.assert_array_equal(dataset.get(IDS[3]).to_numpy("TLK"), routing[IDS[3]])
    _holds(dataset, routing, IDS)

    assert rr.compact(s3.uri, storage_options=medium.options).outputs == 4
    _holds(dataset, routing, IDS)
    rr.delete_prefix(s3.uri, "p1", storage_options=medium.options)
    left = [request_id for request_id in IDS if not request_id.startswith("p1:")]
    _holds(dataset, routing, left)
    assert not [path for path in medium.objects() if path.startswith("data_id=p1/")]

    rr.collect_garbage(s3.uri, storage_options=medium.options)
    assert rr.verify(s3.uri, storage_options=medium.options).sound
    rr.delete(s3.uri, everything=True, storage_options=medium.options)
    assert {path.partition("/")[0] for path in medium.objects()} == {"_rr"}
    assert not medium.uploads()


def _holds(dataset: rr.RoutingDataset, routing: dict[str, np.ndarray], ids: list[str]) -> None:
    assert sorted(dataset.ids()) == sorted(ids)
    for request_id, record in zip(ids, dataset.get_many(ids), strict=True):
        np.testing.assert_array_equal(record.to_numpy("TLK"), routing[request_id])
