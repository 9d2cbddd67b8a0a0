"""The hook for vLLM: what its engine hands out for a finished request, into the writer.

Needs `enable_return_routed_experts=True` in the engine. Nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        output: a finished RequestOutput, or the parsed JSON of an answer. Where it has `prompt_routed_experts`, or says
            None there, it is read as 0.21's.
        token_start: the `routed_experts_prompt_start` of the request's sampling parameters.
        """
        contract = "vllm-0.21" if _is_split(output) else "vllm"
        facts = {"token_start": token_start} if contract == "vllm" else {}
        return self.put(contract, request_id, output, tags, weight_version=weight_version, **facts)


def _is_split(output: Any) -> bool:
    """Whether prompt and choices come apart. A newest engine's choice is an array or a .npy that begins with the prompt."""
    if field(output, "prompt_routed_experts") is not None:
        return True
    named = (
        "prompt_routed_experts" in output if isinstance(output, Mapping) else hasattr(output, "prompt_routed_experts")
    )
    return named and not any(
        isinstance(field(choice, "routed_experts"), (str, bytes))
        for choice in field(output, "choices", "outputs") or ()
    )
