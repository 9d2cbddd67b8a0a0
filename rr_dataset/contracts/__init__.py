"""Routing as other systems put it on the wire, decoded into what `RoutingWriter.put` takes.

name              array                                              tokens                    layers     missing
fastdeploy        base64 of raw bytes, dtype and shape unsaid        S, or S - 1 after EOS     MoE        greatest number
fastdeploy-store  [layers, padded tokens, top_k], or one per layer   S, or S - 1 after EOS     MoE        -1, greatest number
vllm-0.21         nested lists, prompt and choices apart             S, or S - 1               MoE or all -1; None
vllm              base64 of .npy for each choice                     S - 1, from a start       all        None
sglang            base64 of raw bytes, int32 or dtype said           S - 1, from a start       all        0
verl              [B, prompt + response, layers, top_k]              S - 1 of the unmasked     MoE or all 0
slime, miles      [S - 1, layers, top_k]                             S - 1                     all        -1, arange
prime-rl          base64 with shape, start and dtype                 S, or S - 1, from a start all        0
nemo-rl           text with dtype and shape before the base64        S                         MoE or all -1
megatron          one [tokens, top_k] for each router                of the rank               MoE        none

S is the number of prompt and output tokens; the last of them is never fed, so most arrays end before it. Wherever all layers are
expected, MoE layers alone pass too, told apart by their number. Nothing in a response is trusted: sizes are compared before
anything is decoded, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from rr_dataset.contracts.arrays import refusal
from rr_dataset.contracts.engines import fastdeploy, sglang, vllm, vllm_split
from rr_dataset.contracts.rows import Decoded, Facts, PutArguments, apart, as_refusal
from rr_dataset.contracts.store import fastdeploy_store, unpadded
from rr_dataset.contracts.trainers import megatron, nemo_rl, prime_rl, slime, verl
from rr_dataset.errors import InvalidInputError
from rr_dataset.record import RoutingSpec

__all__ = ["CONTRACTS", "Decoded", "PutArguments", "decode", "unpadded"]

CONTRACTS: Mapping[str, Callable[[Any, RoutingSpec, Facts], Iterator[Decoded]]] = MappingProxyType(
    {
        "fastdeploy": fastdeploy,
        "fastdeploy-store": fastdeploy_store,
        "vllm-0.21": vllm_split,
        "vllm": vllm,
        "sglang": sglang,
        "verl": verl,
        "slime": slime,
        "miles": slime,
        "prime-rl": prime_rl,
        "nemo-rl": nemo_rl,
        "megatron": megatron,
    }
)

_FROM_A_START = frozenset(("vllm", "sglang", "prime-rl", "megatron"))  # the others' arrays begin with the first token
_WITHOUT_THE_PROMPT = frozenset(("fastdeploy", "vllm-0.21", "vllm", "sglang", "prime-rl", "nemo-rl"))


def decode(
    contract: str,
    response: Any,
    spec: RoutingSpec,
    *,
    num_hidden_layers: int | None = None,
    token_start: int | None = None,
    prompt_token_ids: Any = None,
    weight_version: str | int | None = None,
    thorough: bool = False,
    keep_errors: bool = False,
) -> list[Decoded]:
    """The records in one response of a system that `CONTRACTS` names: `writer.put(request_id, **decoded.put)`.

    response: parsed JSON, or the engine's own object; its attributes and keys are looked up by name, so no engine is imported.
    num_hidden_layers: of the model, where it has dense layers after the last MoE layer; else that one is taken for the last.
    token_start, prompt_token_ids, weight_version: what a response may leave out; they stand before what it says. Where a contract
        always begins with the first token, or has all token ids itself, it is an error to say otherwise.
    thorough: also look for an expert that a token names twice; else only its first two are compared, which finds fillers.
    keep_errors: a sample that does not fit is a `Decoded` with the error, and the others come too; else it is raised.

    There is at least one, and each has an index of its own: a sample that says the index of an earlier one does not fit.

    Arrays are views of the response's memory where they can be. Expert ids that are out of range are found by `put`.

    Raises InvalidInputError for an unknown contract or what it cannot take, and InvalidRoutingError, which says what was expected and what came.
    """
    if contract not in CONTRACTS:
        raise InvalidInputError(f"contract={contract!r}: expected one of {', '.join(CONTRACTS)}")
    if token_start and contract not in _FROM_A_START:
        raise InvalidInputError(f"token_start={token_start!r}: an array of {contract} begins with the first token")
    if prompt_token_ids is not None and contract not in _WITHOUT_THE_PROMPT:
        raise InvalidInputError(f"prompt_token_ids with {contract}, whose token ids are in the response")
    facts = Facts(num_hidden_layers, token_start, prompt_token_ids, weight_version, thorough)
    try:
        decoded = apart(contract, list(CONTRACTS[contract](response, spec, facts)))
    except Exception as error:
        raise as_refusal(f"{contract}: the response", error) from error
    if not decoded:
        raise refusal(contract, "samples", "at least one", "none")
    for one in decoded:
        if one.error is not None and not keep_errors:
            raise one.error
    return decoded
