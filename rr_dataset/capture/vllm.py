"""The hook for vLLM: what its engine hands out for a finished request, into the writer.

Needs `enable_return_routed_experts=True` in the engine. Nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rr_dataset.capture.responses import ResponseHook
from rr_dataset.contracts.rows import field
from rr_dataset.receipt import Receipt


class VllmRoutingHook(ResponseHook):
    """Puts the routing of RequestOutputs, of vLLM 0.21 and of the newest. Thread-safe.

    A fault never raises into serving, unless `strict`: it is a drop row, counted in `faults`, and logged once.
    """

    def on_finished(
        self,
        request_id: str,
        output: Any,
        *,
        token_start: int | None = None,
        weight_version: str | int | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> list[Receipt]:
        """Put the prompt and output rows of each choice as one record; the receipts, whose `ref` names the put.

        request_id: the rollout's id in the dataset's key scheme; with several choices `#n` is added to it.
        output: a finished RequestOutput, or the parsed JSON of an answer. With `prompt_routed_experts` it is read as 0.21's, also
            where that is None and a choice has rows of its output alone.
        token_start: the `routed_experts_prompt_start` of the request's sampling parameters.
        """
        return self._put(request_id, output, token_start, tags, weight_version=weight_version)

    def _look(self, response: Any, token_start: int | None) -> tuple[str, bool]:
        start = field(response, "routed_experts_prompt_start") if token_start is None else token_start
        return ("vllm-0.21" if not start and _is_split(response) else "vllm"), bool(start)


def _is_split(output: Any) -> bool:
    """Whether prompt and choices come apart, as in 0.21."""
    if field(output, "prompt_routed_experts") is not None:
        return True
    if not (
        "prompt_routed_experts" in output if isinstance(output, Mapping) else hasattr(output, "prompt_routed_experts")
    ):
        return False
    choices = field(output, "choices", "outputs")
    choice = choices[0] if isinstance(choices, Sequence) and len(choices) else None
    rows, ids = field(choice, "routed_experts"), field(choice, "token_ids")
    if rows is None or isinstance(rows, (str, bytes)) or ids is None:
        return False
    prompt = field(output, "prompt_token_ids")
    whole = (0 if prompt is None else len(prompt)) + len(ids) - 1  # what a newest engine has
    return len(rows) <= len(ids) and len(rows) != whole
