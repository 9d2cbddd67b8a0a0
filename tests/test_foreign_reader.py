"""Other readers, made from FORMAT.md alone: nothing of rr_dataset is used here but to write what they read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import xxhash

from rr_dataset.keys import KeyScheme
from rr_dataset.layout import FORMAT_PATH, DatasetFormat
from rr_dataset.publish import publish_slab
from rr_dataset.record import RoutingSpec, Row, RowData
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneCache

FORMAT_MD = Path(__file__).parents[1] / "schemas" / "FORMAT.md"
WRITER = "00112233aabbccdd"
LAYERS = (3, 5, 60)
IDS = {
    "fastdeploy": ["math_17:2:2:1", "math_17:2:2:1#3", "a:b:0:0:0", "ünï/code", "math_17"],
    "by_step": ["120:math:17", "120", "7:x#0"],
}
COMPONENTS = {
    "fastdeploy": {
        "math_17:2:2:1": ("math_17", "2", "2", "1"),
        "math_17:2:2:1#3": ("math_17", "2", "2", "1"),
        "a:b:0:0:0": ("a:b", "0", "0", "0"),
        "ünï/code": ("ünï/code", None, None, None),
        "math_17": ("math_17", None, None, None),
    },
    "by_step": {"120:math:17": ("120", "math:17"), "120": ("120", None), "7:x#0": ("7", "x")},
}
NAMES = {"fastdeploy": ("data_id", "gen_id", "turn_id", "segment_id"), "by_step": ("step", "rest")}
CASES = [("fastdeploy", 1, "none"), ("fastdeploy", 2, "zstd"), ("by_step", 1, "lz4")]

Values = dict[str, Any]


def expected_rows(scheme: str) -> list[Values]:
    """What is put, as plain values: one column each, layers and vectors as arrays."""
    rng = np.random.default_rng(0)
    made = []
    for number, request_id in enumerate(IDS[scheme]):
        stamp = (1_700_000_000_000 + number) << 16 | 7
        tokens = (5, 0, 300, 17, 2)[number]
        dropped, part = number == 4, number == 2
        layers = {} if dropped else {layer: rng.integers(0, 300, (tokens, 6)).astype("<u2") for layer in LAYERS[part:]}
        row: Values = {
            "record_id": f"{stamp:016x}-{WRITER}",
            "request_id": request_id,
            **dict(zip(NAMES[scheme], COMPONENTS[scheme][request_id], strict=True)),
            "choice": int(request_id.rpartition("#")[2]) if "#" in request_id else None,
            "t_submit": stamp,
            "token_start": 40 if part else 0,
            "num_tokens": tokens,
            "part": part,
            "status": "dropped" if dropped else "partial" if part else "complete",
            "reason": "the spool was full" if dropped else None,
            "missing": [(41, 43), (50, 51)] if part else [],
            "weight_version": None if part else "step-12",
            "weight_spans": [(40, 100, "step-12"), (100, 340, "step-13")] if part else [],
            "run_id": "run-ü",
            "producer": "trainer" if number == 0 else "rollout",
            "tags": {"task": "mäth", "lang": ""} if number == 0 else {},
            "checksum": xxhash.xxh3_64_intdigest(b"".join(ids.tobytes() for ids in layers.values())),
            "token_ids": rng.integers(0, 1 << 20, tokens).astype("<i4") if number in (0, 2) else None,
            "logprobs": rng.normal(size=tokens).astype("<f4") if number == 2 else None,
        }
        made.append({**row, **{f"layer_{layer:03d}": layers.get(layer) for layer in LAYERS}})
    return made


def written(root: Path, scheme: str, partition_by: int, compression: str) -> None:
    keys = KeyScheme.by_step() if scheme == "by_step" else KeyScheme.fastdeploy(partition_by=partition_by)
    spec = RoutingSpec(moe_layers=LAYERS, num_experts=300, top_k=6)
    fmt = DatasetFormat(uuid="12345678-1234-5678-1234-567812345678", spec=spec, keys=keys)
    storage = open_storage(root)
    storage.create(FORMAT_PATH, fmt.to_json(), staging=WRITER)
    rows = []
    for values in expected_rows(scheme):
        fields = {name: values[name] for name in values if name in Row.__dataclass_fields__ and name != "checksum"}
        layers = {layer: values[f"layer_{layer:03d}"] for layer in LAYERS if values[f"layer_{layer:03d}"] is not None}
        fields |= {"missing": tuple(fields["missing"]), "weight_spans": tuple(fields["weight_spans"])}
        row = Row(**fields, components=tuple(values[name] for name in NAMES[scheme]), layers=tuple(layers))
        experts = np.stack(list(layers.values())) if layers else None
        rows.append(RowData(row, experts, values["token_ids"], values["logprobs"]))
    with ThreadPoolExecutor(2) as pool:
        cache = TombstoneCache(keys)
        publish_slab(
            storage, fmt, writer=WRITER, seq=4, rows=rows, cache=cache, pool=pool, compression=compression,
            now_ms=lambda: 1_700_000_001_000,
        )  # fmt: skip
    staging = root / "_rr" / "tmp" / WRITER
    staging.mkdir(parents=True, exist_ok=True)
    (staging / "half").write_bytes(b"ARROW1\0\0 cut")


# --- From here on only the text.


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, int]:
    scheme, partition_by, compression = request.param
    written(tmp_path, scheme, partition_by, compression)
    return tmp_path, scheme, partition_by


def opened(root: Path, scheme: str, partition_by: int) -> ds.Dataset:
    fields = [(name, pa.string()) for name in NAMES[scheme][:partition_by]]
    return ds.dataset(root, format="ipc", partitioning=ds.partitioning(pa.schema(fields), flavor="hive"))


def plain(value: Any) -> Any:
    """One spelling for what readers return in several: tuples and dicts of lists, bytes."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return value


def as_dict(value: Any) -> Values:
    """A map: a dict, a list of pairs, or (Polars 1) a list of {"key", "value"}."""
    return dict(value) if isinstance(value, dict) else dict(x.values() if isinstance(x, dict) else x for x in value)


def assert_same(seen: list[Values], scheme: str) -> None:
    wanted = {row["record_id"]: row for row in expected_rows(scheme)}
    assert sorted(row["record_id"] for row in seen) == sorted(wanted)
    for row in seen:
        want = wanted[row["record_id"]]
        assert set(row) == set(want)
        for name, value in want.items():
            got = plain(row[name])
            if name in ("missing", "weight_spans"):
                assert [tuple(each.values()) for each in got] == value, name
            elif name == "tags":
                assert as_dict(got) == value
            elif value is None:
                assert got is None, name
            elif name in ("token_ids", "logprobs"):
                assert np.array_equal(np.array(got, value.dtype), value), name
            elif name.startswith("layer_"):
                ids = np.frombuffer(got, "<u2").reshape(-1, 6)
                assert np.array_equal(ids, value), name
            else:
                assert (type(got), got) == (type(value), value), name


def test_pyarrow_reads_every_value(case: tuple[Path, str, int]) -> None:
    assert_same(opened(*case).to_table().to_pylist(), case[1])


def test_polars_reads_every_value(case: tuple[Path, str, int]) -> None:
    root, scheme, partition_by = case
    frame = pl.scan_ipc(root / "/".join(["*"] * partition_by) / "*.arrow").collect()
    assert_same(frame.to_dicts(), scheme)


def test_duckdb_reads_every_value(case: tuple[Path, str, int]) -> None:
    dataset = opened(*case)
    result = duckdb.sql("SELECT * FROM dataset")
    assert dataset is not None
    assert_same([dict(zip(result.columns, row, strict=True)) for row in result.fetchall()], case[1])


def test_pyarrow_prunes_by_path_and_projects(case: tuple[Path, str, int]) -> None:
    dataset, name = opened(*case), NAMES[case[1]][0]
    value = COMPONENTS[case[1]][IDS[case[1]][0]][0]
    table = dataset.to_table(columns=["request_id", "layer_060"], filter=ds.field(name) == value)
    wanted = {each for each in IDS[case[1]] if COMPONENTS[case[1]][each][0] == value}
    assert set(table["request_id"].to_pylist()) == wanted


def test_numbers_in_the_path_need_the_stated_schema(tmp_path: Path) -> None:
    written(tmp_path, "by_step", 1, "none")
    with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError)):
        ds.dataset(tmp_path, format="ipc", partitioning="hive").to_table()


def test_the_recipes_run_as_printed_and_leave_out_rows_without_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "routing", "fastdeploy", 1, "none")
    names: Values = {}
    recipes = re.findall(r"```python\n(.*?)```", FORMAT_MD.read_text(), re.DOTALL)
    assert len(recipes) == 5
    for recipe in recipes:
        exec(recipe, names)
    rows = {row["request_id"]: row["layer_003"] for row in expected_rows("fastdeploy")}
    there = {request_id: ids for request_id, ids in rows.items() if ids is not None}
    assert len(there) == 3, "without the dropped row and the part"
    read = dict(zip(names["table"]["request_id"].to_pylist(), names["ids"], strict=True))
    assert read.keys() == there.keys()
    assert all(np.array_equal(read[request_id], ids) for request_id, ids in there.items())
    assert set(names["frame"]["request_id"]) == there.keys()
    assert dict(names["sizes"]) == {request_id: ids.nbytes for request_id, ids in there.items()}


# --- A reader of the index, with nothing but struct and json.


class Flat:
    """A flatbuffer table."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.slots = at - struct.unpack_from("<i", data, at)[0]

    def field(self, number: int) -> int:
        (offset,) = struct.unpack_from("<H", self.data, self.slots + 4 + 2 * number)
        assert offset, f"field {number} is absent"
        return self.at + int(offset)

    def follow(self, at: int) -> int:
        return at + int(struct.unpack_from("<I", self.data, at)[0])

    def vector(self, number: int) -> tuple[int, int]:
        at = self.follow(self.field(number))
        return at + 4, struct.unpack_from("<I", self.data, at)[0]

    def text(self, number: int) -> bytes:
        start, length = self.vector(number)
        return self.data[start : start + length]


def index_of(file: bytes) -> tuple[Values, list[tuple[int, int, int]]]:
    """Section 4, steps 1 to 3: the index, and the offset and lengths of each record batch."""
    tail = file[-(64 << 10) :]
    length, magic = struct.unpack("<i6s", tail[-10:])
    assert magic == b"ARROW1"
    footer = tail[-10 - length : -10]
    root = Flat(footer, struct.unpack_from("<I", footer)[0])
    start, count = root.vector(3)
    blocks = [struct.unpack_from("<qi4xq", footer, start + 24 * i) for i in range(count)]
    start, count = root.vector(4)
    entries = [Flat(footer, root.follow(start + 4 * i)) for i in range(count)]
    metadata = {entry.text(0): entry.text(1) for entry in entries}
    assert xxhash.xxh3_64_hexdigest(metadata[b"rr.index"]).encode() == metadata[b"rr.index_xxh3"]
    assert metadata[b"rr.index"].isascii()
    return json.loads(metadata[b"rr.index"]), blocks


def payload_of(file: bytes, index: Values, offset: int, length: int) -> bytes:
    """One raw data buffer."""
    stored = file[offset : offset + length]
    if index["compression"] == "none" or not stored:
        return stored
    (raw_length,) = struct.unpack_from("<q", stored)
    return (
        stored[8:]
        if raw_length == -1
        else pa.Codec(index["compression"]).decompress(stored[8:], raw_length, asbytes=True)
    )


def rows_by_index(file: bytes) -> Iterator[Values]:
    index, blocks = index_of(file)
    defaults = {
        "choice": None, "reason": None, "weight_version": None, "token_start": 0, "part": False, "missing": [],
        "weight_spans": [], "producer": "rollout", "tags": {},
    }  # fmt: skip
    scalars = [name for name in expected_rows("by_step")[0] if not name.startswith(("layer_", "token_ids", "logprobs"))]
    columns = ["token_ids", "logprobs", *(f"layer_{layer:03d}" for layer in index["spec"]["moe_layers"])]
    sizes = [4, 4, *[index["spec"]["top_k"] * np.dtype(index["spec"]["dtype"]).itemsize] * (len(columns) - 2)]
    number = 0
    assert len(index["batches"]) == len(blocks)
    for batch in index["batches"]:
        ranges = zip(batch["ranges"][::2], batch["ranges"][1::2], strict=True)
        raw = [payload_of(file, index, *each) for each in ranges]
        used = [0] * len(columns)
        for _ in range(batch["num_rows"]):
            row = {name: column[number] for name, column in index["components"].items()}
            for name in scalars:
                if name not in ("step", "rest"):
                    row[name] = index[name][number] if name in index else defaults[name]
            for column, name in enumerate(columns):
                row[name] = None
                bounds = index["present_sets"][index["present"][number]]
                if any(start <= column < stop for start, stop in zip(bounds[::2], bounds[1::2], strict=True)):
                    end = used[column] + row["num_tokens"] * sizes[column]
                    row[name], used[column] = raw[column][used[column] : end], end
            yield row
            number += 1
        assert used == [len(each) for each in raw]
    assert number == index["num_rows"]


def test_the_index_alone_gives_every_value(case: tuple[Path, str, int]) -> None:
    seen = []
    for path in case[0].rglob("*.arrow"):
        for row in rows_by_index(path.read_bytes()):
            row["missing"] = [dict(enumerate(each)) for each in row["missing"]]
            row["weight_spans"] = [dict(enumerate(each)) for each in row["weight_spans"]]
            for name, dtype in (("token_ids", "<i4"), ("logprobs", "<f4")):
                row[name] = None if row[name] is None else np.frombuffer(row[name], dtype)
            seen.append(row)
    assert_same(seen, case[1])


def test_the_index_and_arrows_metadata_agree(case: tuple[Path, str, int]) -> None:
    for path in case[0].rglob("*.arrow"):
        file = path.read_bytes()
        index, blocks = index_of(file)
        for batch, (offset, metadata_length, body_length) in zip(index["batches"], blocks, strict=True):
            message = Flat(file, offset + 8 + struct.unpack_from("<I", file, offset + 8)[0])
            record_batch = Flat(file, message.follow(message.field(2)))
            start, count = record_batch.vector(2)
            buffers = [struct.unpack_from("<qq", file, start + 16 * i) for i in range(count)]
            payload = buffers[-(8 + 3 * len(LAYERS)) :]
            data = [payload[3], payload[7], *payload[10::3]]
            body = offset + metadata_length
            assert batch["ranges"] == [number for at, length in data for number in (body + at, length)]
            assert all(at % 8 == 0 and at + length <= body_length for at, length in buffers)
            assert struct.unpack_from("<q", file, record_batch.field(0)) == (batch["num_rows"],)


def test_paths_and_names_are_as_told(case: tuple[Path, str, int]) -> None:
    root, scheme, partition_by = case
    wanted = {}
    for row in expected_rows(scheme):
        values = tuple(row[name] for name in NAMES[scheme][:partition_by])
        wanted.setdefault(values, []).append(row["t_submit"])
    seen = {}
    for path in root.glob("*=*/**/*.arrow"):
        pairs = [part.split("=") for part in path.relative_to(root).parts[:-1]]
        assert [name for name, _ in pairs] == list(NAMES[scheme][:partition_by])
        values = tuple(None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value) for _, value in pairs)
        level, tmin, tmax, rows, writer, seq = path.stem.split("-")
        assert (level, writer, seq) == ("00", WRITER, "4")
        seen[values] = (int(tmin, 16), int(tmax, 16), int(rows))
    assert seen == {values: (min(stamps), max(stamps), len(stamps)) for values, stamps in wanted.items()}
