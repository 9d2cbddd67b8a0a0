"""The hook for SGLang: what `/generate` or its offline engine answers, into the writer.

Needs `--enable-return-routed-experts`, and `return_routed_experts` in the request. Nothing of SGLang is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rr_dataset.capture.responses import ResponseHook
from rr_dataset.contracts.engines import sglang_samples, sglang_start
from rr_dataset.receipt import Receipt


class SglangRoutingHook(ResponseHook):
    """Puts the routing in `meta_info`. Thread-safe.

    A fault never raises into serving, unless `strict`: it is a drop row, counted in `faults`, and logged once.
    """

    def on_finished(
        self,
        request_id: str,
        output: Any,
        *,
        prompt_token_ids: Any = None,
        token_start: int | None = None,
        weight_version: str | int | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> list[Receipt]:
        """Put the rows of a finished request; the receipts, whose `ref` names the put.

        request_id: the rollout's id in the dataset's key scheme; with several samples `#n` is added to it.
        output: the dict of a request with its `meta_info`, a list of them (n > 1), or the `meta_info` alone.
        prompt_token_ids: the `input_ids` of the request, which the answer leaves out; without them no token ids are stored.
        token_start: the request's `routed_experts_start_len`, where `meta_info` does not repeat it.
        """
        return self._put(
            request_id, output, token_start, tags, prompt_token_ids=prompt_token_ids, weight_version=weight_version
        )

    def _look(self, response: Any, token_start: int | None) -> tuple[str, bool]:
        starts = map(sglang_start, sglang_samples(response)) if token_start is None else [token_start]
        return "sglang", any(map(bool, starts))
