"""The life cycle of `test_lifecycle` on a real S3 server: what a store in memory cannot tell of listings, deletes and uploads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from s3_medium import S3Medium

from rr_dataset.storage import Storage, open_storage
from tests.test_lifecycle import Lifecycle

if TYPE_CHECKING:
    from weed import S3Server

EXAMPLES = settings().max_examples // 10  # each of thousands of requests
STEPS = 6


class OnS3(Lifecycle):
    """Requests."""

    def __init__(self, server: S3Server, client: str) -> None:
        super().__init__()
        self.medium = S3Medium(server.place(), client)

    def place(self) -> Storage:
        return open_storage(self.medium.uri, self.medium.options)

    def objects(self) -> set[str]:
        return self.medium.objects()

    def finish(self) -> None:
        super().finish()
        assert not self.medium.uploads()


def test_any_order(s3_server: S3Server) -> None:
    run_state_machine_as_test(
        partial(OnS3, s3_server, "obstore"),
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, phases=(Phase.reuse, Phase.generate), database=None
        ),
    )
