"""What hypothesis draws: specs, routing arrays, rows of one request id, rows with their payload."""

from __future__ import annotations

from math import gcd
from typing import Any
from urllib.parse import quote
from zlib import crc32

import numpy as np
from hypothesis import strategies as st

from rr_dataset.keys import KeyScheme, RequestKey
from rr_dataset.record import STATUSES, TOPK_ORDERS, Range, RoutingSpec, Row, RowData, Span

RUN_ID = "run-1"
# What JSON, Arrow and C strings may trip over; lone surrogates are no text.
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@st.composite
def specs(draw: st.DrawFn, max_layers: int = 92, max_experts: int = 1000) -> RoutingSpec:
    """Any spec: dense layers before, between and behind, both dtypes, also one wider than needed."""
    num_layers = draw(st.integers(1, max_layers))
    dense = draw(st.sets(st.integers(0, num_layers + 8), max_size=8))
    num_experts = draw(st.integers(2, max_experts))
    return RoutingSpec(
        moe_layers=tuple(i for i in range(num_layers + len(dense)) if i not in dense)[:num_layers],
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(22, num_experts))),
        dtype=draw(st.sampled_from(["", "uint16"])),
        topk_order=draw(st.sampled_from(TOPK_ORDERS)),
    )


def routing(spec: RoutingSpec, num_layers: int, num_tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """[num_layers, num_tokens, top_k] ids of the spec's dtype; those of one token differ, as a router's do."""
    rng = np.random.default_rng(seed)
    shape = (num_layers, num_tokens, 1)
    steps = [step for step in range(1, spec.num_experts) if gcd(step, spec.num_experts) == 1]
    first = rng.integers(spec.num_experts, size=shape)
    ids = (first + rng.choice(steps, size=shape) * np.arange(spec.top_k)) % spec.num_experts
    if spec.topk_order == "sorted":
        ids.sort(axis=-1)
    return ids.astype(spec.dtype)


@st.composite
def ranges_within(draw: st.DrawFn, start: int, stop: int, max_size: int = 3) -> tuple[Range, ...]:
    """Sorted, disjoint ranges that are not empty and do not touch."""
    cuts = sorted(draw(st.sets(st.integers(start, stop), max_size=2 * max_size)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


@st.composite
def weight_spans_within(draw: st.DrawFn, start: int, stop: int) -> tuple[Span, ...]:
    ranges = draw(ranges_within(start, stop))
    return tuple((a, b, draw(st.sampled_from(["v1", "v2"]))) for a, b in ranges)


@st.composite
def rows(
    draw: st.DrawFn,
    spec: RoutingSpec,
    t_submit: int = 1,
    writer: int = 1,
    max_tokens: int = 12,
    request_id: str = "math:1",
    components: tuple[str | None, ...] = ("math", "1"),
) -> Row:
    """One put: whole, a part along the tokens, along the layers or both, or a drop."""
    dropped = draw(st.integers(0, 7)) == 0
    layers: tuple[int, ...] = ()
    if not dropped:
        some = st.sets(st.sampled_from(spec.moe_layers), min_size=1)
        layers = tuple(sorted(draw(st.just(set(spec.moe_layers)) | some)))
    part = draw(st.booleans()) or (not dropped and layers != spec.moe_layers)
    start = draw(st.integers(0, max_tokens)) if part else draw(st.sampled_from([0, 0, 0, 2]))
    stop = start + draw(st.integers(0, max_tokens))
    status = draw(st.sampled_from([s for s in STATUSES if s != "dropped"]))
    return Row(
        record_id=f"{t_submit:016x}-{writer:016x}",
        request_id=request_id,
        components=components,
        choice=None,
        t_submit=t_submit,
        token_start=start,
        num_tokens=stop - start,
        part=part,
        status="dropped" if dropped else status,
        run_id=RUN_ID,
        layers=layers,
        reason=draw(st.none() | texts),
        missing=() if dropped else draw(st.just(()) | ranges_within(start, stop)),
        weight_version=draw(st.sampled_from([None, "v1", "v2"])),
        weight_spans=draw(st.just(()) | weight_spans_within(start, stop)),
        tags=draw(st.just({}) | st.dictionaries(texts, texts, max_size=2)),
        has_token_ids=not dropped and draw(st.booleans()),
        has_logprobs=not dropped and draw(st.booleans()),
    )


@st.composite
def rows_of_one_id(draw: st.DrawFn, spec: RoutingSpec, max_rows: int = 6, max_tokens: int = 12) -> list[Row]:
    """Rows of two writers whose clocks may tie, in any order, some of them twice."""
    stamps = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2)), max_size=max_rows, unique=True))
    made = [draw(rows(spec, t_submit, writer, max_tokens)) for t_submit, writer in stamps]
    again = draw(st.lists(st.sampled_from(made), max_size=2)) if made else []
    return draw(st.permutations(made + again))


def payload(spec: RoutingSpec, row: Row, seed: int = 0) -> RowData:
    """The row with ids, token ids and logprobs of its shape."""
    rng = np.random.default_rng(seed)
    n = row.num_tokens
    return RowData(
        row,
        routed_experts=routing(spec, len(row.layers), n, seed) if row.layers else None,
        token_ids=rng.integers(0, 1 << 17, n, dtype=np.int32) if row.has_token_ids else None,
        logprobs=rng.normal(size=n).astype(np.float32) if row.has_logprobs else None,
    )


# --- Request ids and key schemes: what the grammar allows, built up from parts, so that no test asks the parser what is legal.

ABSENT_LITERAL = "__HIVE_DEFAULT_PARTITION__"
NASTY = ("/", "..", ".", "_", "%", "%2F", "=", "#", "#x", ":", "\\", "\n", "\0", " ", "é", "日本", "\U0001f600", "_rr")

nasty_texts = st.lists(texts | st.sampled_from(NASTY), max_size=4).map("".join)
any_texts = nasty_texts | st.text(st.characters(), max_size=40) | st.text("ab:#01", max_size=12)  # lone surrogates too
path_values = nasty_texts.filter(lambda text: 0 < len(quote(text, safe="")) < 200 and text != ABSENT_LITERAL)
decimals = (st.integers(0, 12) | st.integers(0, 1 << 80)).map(str)
key_schemes = st.sampled_from(
    [
        KeyScheme.fastdeploy(),
        KeyScheme.fastdeploy(partition_by=2),
        KeyScheme.by_step(),
        KeyScheme.uuid(),
        KeyScheme.uuid(buckets=1),
        KeyScheme.uuid(buckets=1 << 16),
    ]
)


@st.composite
def keys_of(draw: st.DrawFn, scheme: KeyScheme) -> RequestKey:
    """Any legal request id of the scheme, with what it must parse to."""
    text = draw(path_values)
    if text.rpartition("#")[1] and text.rpartition("#")[2].strip("0123456789") == "":
        text += "x"  # or it would end in a sample number
    found: tuple[str | None, ...]
    if scheme.buckets is not None:
        base = text
        found = (str(crc32(text.encode()) % scheme.buckets), text)
    elif scheme.split == "right":
        depth = 3 if ":" in text else draw(st.integers(0, 3))
        values = [text, *(draw(decimals) for _ in range(depth))]
        base = ":".join(values)
        found = (*values, *[None] * (3 - depth))
    else:
        step = draw(decimals)
        base, found = draw(st.sampled_from([(step, (step, None)), (f"{step}:{text}", (step, text))]))
    choice = draw(st.none() | st.integers(0, 3) | st.just((1 << 31) - 1))
    return RequestKey(base if choice is None else f"{base}#{choice}", found, choice)
