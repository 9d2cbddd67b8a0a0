"""Compaction: bytes at rest of real routing, its speed, and what a read costs afterwards.

The routing is the slice of real data that comes with the demo: 200 requests of 22 prompts.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

import rr_dataset as rr
from rr_dataset.clock import pack, wall_ms
from rr_dataset.demo.rollouts import SPEC, load_rollouts
from rr_dataset.layout import ShardName, partition_path
from rr_dataset.record import Row, RowData
from rr_dataset.shard import build_shard, read_index
from rr_dataset.storage import open_storage

from .bench import Array, Bench, write_file
from .measure import Check, Pairs, at_least, at_most, interleave

WRITER = "a" * 16
JOINED_BYTES = 400_000

Records = dict[str, Array]  # LTK, by request id


def compact_size(bench: Bench) -> list[Check]:
    """How much smaller real routing is, as ids came from the router and as sets, in short and in joined records."""
    checks = []
    for order, payload_target, file_target in (("preserve", 4.0, 3.7), ("sorted", 5.5, 5.0)):
        for what, records in (("short records", short_records()), ("joined to 0.4 MB", joined_records())):
            with bench.folder() as folder:
                root = store(folder / "dataset", records, order)
                rr.compact(root)
                raw, payload, files = sizes(root)
            for name, size, target in (("payload", payload, payload_target), ("files", files, file_target)):
                ratio = raw / size
                checks.append(
                    Check(
                        f"compact-size-{order}-{name}",
                        f"bytes at rest after compaction, {name}, {order}, {what}",
                        "raw uint8",
                        f"{size / 1e6:.2f} MB",
                        f"{raw / 1e6:.2f} MB",
                        ratio,
                        "x",
                        ">=",
                        target,
                        note="the slice of real routing that the demo has, whose prompts are shorter than those the target was set on",
                    )
                )
    return checks


def compact_speed(bench: Bench) -> list[Check]:
    """Verified, synced compaction of prompts of 8 x 0.4 MB against reading, compressing and writing the same columns."""
    records = repeated(joined_records(), bench.count(2, 8))
    with bench.folder() as folder:
        root = store(folder / "dataset", records, "preserve")
        raw = sorted(root.glob("*/*.arrow"))
        size = sum(array.nbytes for array in records.values())
        codec = pa.Codec("zstd", 3)
        numbers = itertools.count()

        def ours(_: int) -> None:
            rr.compact(root)

        def theirs(_: int) -> None:
            """Each prompt's records as columns, one compressed file a prompt."""
            plain = folder / f"plain-{next(numbers)}"
            plain.mkdir()
            for prompt, paths in itertools.groupby(raw, key=lambda path: path.parent):
                contents = [path.read_bytes() for path in paths]
                whole = b"".join(contents)
                step = len(whole) // SPEC.num_layers
                packed = [codec.compress(whole[i * step : (i + 1) * step]) for i in range(SPEC.num_layers)]
                write_file(plain / prompt.name, np.frombuffer(b"".join(map(bytes, packed)), np.uint8))

        def before() -> None:
            for path in root.glob("*/01-*"):
                path.unlink()
            for path in folder.glob("plain-*"):
                shutil.rmtree(path)

        pairs = interleave(ours, theirs, bench.count(3, 5), before)
    note = f"{size / 1e6 / pairs.ours_s:,.0f} MB/s against {size / 1e6 / pairs.theirs_s:,.0f} MB/s, one thread"
    what = f"compact {size / 1e6:,.0f} MB, {len(records)} records, one a shard, verified"
    return [at_least("compact-speed", what, "read, zstd:3 and write the same bytes", pairs, 0.5, note=note)]


def compact_get(bench: Bench) -> list[Check]:
    """One record, and all of a prompt, out of a compacted shard against raw ones."""
    records = joined_records()
    prompt = next(iter(records)).partition(":")[0]
    ids = [request_id for request_id in records if request_id.startswith(f"{prompt}:")]
    with bench.folder() as folder:
        raw = store(folder / "raw", records, "preserve")
        packed = store(folder / "packed", records, "preserve")
        rr.compact(packed)
        for path in packed.glob("*/00-*"):
            path.unlink()
        ours, theirs = rr.open_dataset(packed), rr.open_dataset(raw)
        rounds = bench.count(50, 200)
        one = interleave(lambda _: ours.get(ids[0]), lambda _: theirs.get(ids[0]), rounds)
        many = interleave(lambda _: ours.get_many(ids), lambda _: theirs.get_many(ids), rounds)
    return [
        _read("compact-get", f"get of one record of 0.4 MB, compacted with {len(ids) - 1} others", one, 20.0),
        _read("compact-get-many", f"get_many of {len(ids)} records of 0.4 MB, a whole prompt, compacted", many, 8.0),
    ]


def _read(row: str, what: str, pairs: Pairs, target: float) -> Check:
    return at_most(row, what, "the same from raw shards", pairs, target, note="each column is decoded once per call")


def short_records() -> Records:
    """The demo's requests as they are."""
    return {rollout.request_id(0): rollout.routed_experts for rollout in load_rollouts()}


def joined_records() -> Records:
    """The same, the prompts of one kind joined, sample by sample and turn by turn, until a record has about 0.4 MB."""
    by_prompt: dict[int, dict[tuple[int, int], Array]] = {}
    for rollout in load_rollouts():
        by_prompt.setdefault(rollout.prompt, {})[rollout.sample, rollout.turn] = rollout.routed_experts
    kinds: dict[frozenset[tuple[int, int]], list[int]] = {}
    for prompt, samples in by_prompt.items():
        kinds.setdefault(frozenset(samples), []).append(prompt)
    joined: Records = {}
    for keys, prompts in kinds.items():
        for number, group in enumerate(_groups(prompts, by_prompt, min(keys))):
            for sample, turn in sorted(keys):
                parts = [by_prompt[prompt][sample, turn] for prompt in group]
                joined[f"joined_{len(keys)}_{number}:{sample}:{turn}:0"] = np.concatenate(parts, axis=1)
    return joined


def _groups(
    prompts: Sequence[int], by_prompt: dict[int, dict[tuple[int, int], Array]], key: tuple[int, int]
) -> Iterator[list[int]]:
    group: list[int] = []
    size = 0
    for prompt in prompts:
        group.append(prompt)
        size += by_prompt[prompt][key].nbytes
        if size >= JOINED_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def repeated(records: Records, times: int) -> Records:
    """The records again and again, each time as other prompts of other experts."""
    found: Records = {}
    for i in range(times):
        experts = np.random.default_rng(i).permutation(SPEC.num_experts).astype(SPEC.dtype)
        found.update({f"again_{i}_{key}": experts[array] for key, array in records.items()})
    return found


def store(root: Path, records: Records, order: str) -> Path:
    """A dataset with each record in a raw shard of its own."""
    dataset = rr.create_dataset(root, replace(SPEC, topk_order=order))
    spec, keys = dataset.spec, dataset.keys
    for number, (request_id, experts) in enumerate(records.items()):
        key, stamp = keys.parse(request_id), pack(wall_ms(), number)
        row = Row(
            record_id=f"{stamp:016x}-{WRITER}",
            request_id=request_id,
            components=key.components,
            choice=key.choice,
            t_submit=stamp,
            token_start=0,
            num_tokens=experts.shape[1],
            part=False,
            status="complete",
            run_id="bench",
            layers=spec.moe_layers,
        )
        path = root / partition_path(keys.partition(key.components))
        path.mkdir(exist_ok=True)
        name = ShardName(0, stamp, stamp, 1, writer=WRITER, seq=number)
        (path / name.text).write_bytes(build_shard([RowData(row, experts)], dataset.format))
    return root


def sizes(root: Path) -> tuple[int, int, int]:
    """Raw payload, stored payload and files of the compacted shards, in bytes."""
    storage = open_storage(root)
    raw = payload = files = 0
    for path in root.glob("*/01-*"):
        with storage.open(str(path.relative_to(root))) as source:
            index = read_index(source)
        at = 0
        while at < len(index.rows):
            batch = index.batch_of(at)
            at = index.batch_rows(batch).stop
            _, stored, plain = index.buffers(batch).sum(axis=0).tolist()
            payload, raw = payload + stored, raw + plain
        files += path.stat().st_size
    return raw, payload, files
