"""What the hooks of engines share: a finished response into the writer, one record for each of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rr_dataset.capture.faults import Faults
from rr_dataset.contracts import Decoded, decode
from rr_dataset.receipt import Receipt
from rr_dataset.writer import RoutingWriter


class ResponseHook:
    """Puts what an engine answers. Thread-safe as the writer is.

    A response that does not fit, or has no routing, never raises into serving: it becomes a drop row with the reason, is counted,
    and the first is logged. With `strict` it raises once the rest is stored.
    """

    def __init__(self, writer: RoutingWriter, *, num_hidden_layers: int | None = None, strict: bool = False) -> None:
        """num_hidden_layers: of the model, where dense layers follow its last MoE layer."""
        self._writer = writer
        self._num_hidden_layers = num_hidden_layers
        self.faults = Faults(strict=strict)

    def _look(self, response: Any, token_start: int | None) -> tuple[str, bool]:
        """The contract that a response follows, and whether it begins after the first token."""
        raise NotImplementedError

    def _put(
        self, request_id: str, response: Any, token_start: int | None, tags: Mapping[str, str] | None, **facts: Any
    ) -> list[Receipt]:
        """Put every sample of a response; their receipts, also of drops, in order.

        facts: what `rr_dataset.contracts.decode` takes. Several samples are `<request_id>#<index>`.
        """
        part = False  # whether a drop leaves what came before
        several = False
        errors: list[Exception] = []
        decoded: list[Decoded] = []
        receipts: list[Receipt] = []
        keys = self._writer.dataset.keys
        try:
            keys.parse(request_id)
            part = bool(token_start)
            contract, part = self._look(response, token_start)
            decoded = decode(
                contract,
                response,
                self._writer.dataset.spec,
                num_hidden_layers=self._num_hidden_layers,
                token_start=token_start,
                keep_errors=True,
                **facts,
            )
            several = len(decoded) > 1 or decoded[0].index > 0
            if several:
                keys.parse(f"{request_id}#{decoded[0].index}")  # an id with a number takes no other
        except Exception as error:  # noqa: BLE001 - whatever the engine handed over, it goes on
            decoded = []
            errors.append(error)
            receipts += self._drop(request_id, error, part=part)
        for one in decoded:
            own_id = f"{request_id}#{one.index}" if several else request_id
            try:
                receipts += self._put_one(own_id, one, tags, part=part)
            except Exception as error:  # noqa: BLE001 - as above
                errors.append(error)
                receipts += self._drop(own_id, error, part=part)
        for fault in errors:
            self.faults.tell("on_finished", fault)
        return receipts

    def _put_one(self, request_id: str, one: Decoded, tags: Mapping[str, str] | None, *, part: bool) -> list[Receipt]:
        if one.error is not None:
            raise one.error
        if one.put is None:
            return [self._writer.drop(request_id, one.reason, part=part)]
        if tags:
            one.put["tags"] = {**(one.put.get("tags") or {}), **tags}
        return [self._writer.put(request_id, **one.put)]

    def _drop(self, request_id: str, reason: Exception, *, part: bool) -> list[Receipt]:
        with suppress(Exception):  # an id that is none, a closed writer: the fault is told all the same
            return [self._writer.drop(request_id, reason, part=part)]
        return []
