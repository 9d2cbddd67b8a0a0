"""FastDeploy's request ids: `chatcmpl-<rollout id>-<uuid4>_<idx>`, where idx counts the samples of n > 1."""

from __future__ import annotations

import re

from rr_dataset.errors import InvalidRequestIdError

_ID = re.compile(
    r"chatcmpl-(?P<rollout>.+)-[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?:_(?P<index>0|[1-9][0-9]*))?",
    re.DOTALL,
)
_SAMPLE = re.compile(r"#[0-9]+\Z")


def split_request_id(request_id: str) -> str:
    """The rollout id of a request, as FastDeploy splits it; nothing is evaluated.

    Raises InvalidRequestIdError for a foreign id, such as that of a health check.
    """
    match = _ID.fullmatch(request_id)
    if match is None:
        raise InvalidRequestIdError(f"request id {request_id!r}: expected chatcmpl-<rollout id>-<uuid4>_<idx>")
    return match["rollout"]


def record_id_of(request_id: object) -> str | None:
    """The id of the record: the rollout id, with `#<idx>` for all samples but the first.

    None for a foreign id, and for a rollout id that ends with such a `#<idx>` itself: two requests would be one record.
    """
    match = _ID.fullmatch(request_id) if isinstance(request_id, str) else None
    if match is None or _SAMPLE.search(match["rollout"]):
        return None
    return match["rollout"] if match["index"] in (None, "0") else f"{match['rollout']}#{match['index']}"
