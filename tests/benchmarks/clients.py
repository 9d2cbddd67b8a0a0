"""S3 clients on a real server on loopback: ours over each of its clients, beside what they and pyarrow do alone."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import obstore
import pyarrow.fs as pafs
import s3fs
from obstore.fsspec import FsspecStore
from obstore.store import S3Store

from rr_dataset.storage import Entry, Storage, open_storage
from tests.weed import REGION, NotInstalled, Place, S3Server

from .bench import MIB, Bench, Unavailable
from .measure import Check, Pairs, at_least, shown

TAIL = 64 << 10
RANGES, RANGE = 48, 256 << 10  # the layers of a record of 12.6 MB, every second of those in the object
OBJECTS = 64
AT_ONCE = 32

Ranges = Sequence[tuple[int, int]]


class Subject(Protocol):
    """What is measured of a client. Paths are relative to the place."""

    def put(self, path: str, data: bytes) -> object: ...
    def tail(self, path: str, size: int) -> object: ...
    def ranges(self, path: str, size: int, ranges: Ranges) -> object: ...
    def directories(self, path: str) -> int: ...
    def delete(self, paths: Sequence[str]) -> object: ...


class Ours:
    """`open_storage`, creates with their condition."""

    def __init__(self, place: Place, client: str) -> None:
        self.storage: Storage = open_storage(place.uri, {**place.options, "client": client})

    def put(self, path: str, data: bytes) -> None:
        assert self.storage.create(path, data, staging="w")

    def tail(self, path: str, size: int) -> bytes:
        return self._open(path, size).tail(TAIL)

    def ranges(self, path: str, size: int, ranges: Ranges) -> object:
        data = [bytearray(stop - start) for start, stop in ranges]
        runs = [(start, [memoryview(each)]) for (start, _), each in zip(ranges, data, strict=True)]
        self._open(path, size).read_runs(runs)
        return data

    def directories(self, path: str) -> int:
        return len(self.storage.list_dirs(path))

    def delete(self, paths: Sequence[str]) -> None:
        self.storage.delete(paths)

    def _open(self, path: str, size: int) -> Any:
        return self.storage.open(path, Entry(path, size, 0.0))


class Obstore:
    """Its own calls; it fetches at most ten ranges at once."""

    def __init__(self, place: Place) -> None:
        self._base, self._store = place.prefix, s3_store(place)

    def put(self, path: str, data: bytes) -> object:
        return obstore.put(self._store, f"{self._base}/{path}", data, mode="create", use_multipart=False)

    def tail(self, path: str, size: int) -> object:
        return obstore.get_range(self._store, f"{self._base}/{path}", start=size - TAIL, end=size)

    def ranges(self, path: str, size: int, ranges: Ranges) -> object:
        starts, ends = zip(*ranges, strict=True)
        return obstore.get_ranges(self._store, f"{self._base}/{path}", starts=starts, ends=ends, coalesce=0)

    def directories(self, path: str) -> int:
        return len(obstore.list_with_delimiter(self._store, f"{self._base}/{path}")["common_prefixes"])

    def delete(self, paths: Sequence[str]) -> object:
        return obstore.delete(self._store, [f"{self._base}/{path}" for path in paths])


class Fsspec:
    """Any file system of fsspec."""

    def __init__(self, place: Place, fs: Any) -> None:
        self._base, self._fs = f"{place.bucket}/{place.prefix}", fs

    def put(self, path: str, data: bytes) -> object:
        return self._fs.pipe_file(f"{self._base}/{path}", data)

    def tail(self, path: str, size: int) -> object:
        return self._fs.cat_file(f"{self._base}/{path}", start=size - TAIL, end=size)

    def ranges(self, path: str, size: int, ranges: Ranges) -> object:
        starts, ends = map(list, zip(*ranges, strict=True))
        return self._fs.cat_ranges([f"{self._base}/{path}"] * len(starts), starts, ends)

    def directories(self, path: str) -> int:
        return len(self._fs.ls(f"{self._base}/{path}", detail=False, refresh=True))

    def delete(self, paths: Sequence[str]) -> object:
        return self._fs.rm([f"{self._base}/{path}" for path in paths])


class Arrow:
    """pyarrow's, with threads of ours for what is side by side."""

    def __init__(self, place: Place) -> None:
        self._base = f"{place.bucket}/{place.prefix}"
        self._fs = pafs.S3FileSystem(
            access_key=place.options["key"],
            secret_key=place.options["secret"],
            endpoint_override=place.options["endpoint_url"],
            region=REGION,
        )
        self._threads = ThreadPoolExecutor(AT_ONCE)

    def put(self, path: str, data: bytes) -> None:
        with self._fs.open_output_stream(f"{self._base}/{path}") as stream:
            stream.write(data)

    def tail(self, path: str, size: int) -> object:
        return self._read(path, (size - TAIL, size))

    def ranges(self, path: str, size: int, ranges: Ranges) -> object:
        return list(self._threads.map(lambda each: self._read(path, each), ranges))

    def directories(self, path: str) -> int:
        return len(self._fs.get_file_info(pafs.FileSelector(f"{self._base}/{path}")))

    def delete(self, paths: Sequence[str]) -> object:
        return list(self._threads.map(lambda path: self._fs.delete_file(f"{self._base}/{path}"), paths))

    def _read(self, path: str, wanted: tuple[int, int]) -> bytes:
        with self._fs.open_input_file(f"{self._base}/{path}") as file:  # with a HEAD
            data: bytes = file.read_at(wanted[1] - wanted[0], wanted[0])
            return data


def clients(bench: Bench) -> list[Check]:
    """What a request costs with each client, and which is the default for it."""
    with s3_server() as server:
        place = server.place()
        subjects: dict[str, Subject] = {
            "ours over obstore": Ours(place, "obstore"),
            "ours over s3fs": Ours(place, "s3fs"),
            "obstore": Obstore(place),
            "obstore's fsspec": Fsspec(
                place,
                FsspecStore("s3", config=_config(place), client_options={"allow_http": True}, skip_instance_cache=True),
            ),
            "s3fs": Fsspec(place, _s3fs(place)),
            "pyarrow": Arrow(place),
        }
        return [*_puts(bench, subjects), *_reads(bench, subjects), *_names(bench, subjects)]


def _puts(bench: Bench, subjects: dict[str, Subject]) -> Iterator[Check]:
    small, large = os.urandom(1024), os.urandom(64 * MIB)
    numbers = itertools.count()

    def put(data: bytes) -> Callable[[Subject], object]:
        return lambda subject: subject.put(f"put/{next(numbers)}", data)

    def puts(subject: Subject) -> None:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(lambda _: subject.put(f"put/{next(numbers)}", small), range(AT_ONCE * 8)))

    yield _row("put of 1 KB", subjects, put(small), bench.count(20, 100))
    yield _row(f"{AT_ONCE * 8} puts of 1 KB, {AT_ONCE} threads", subjects, puts, bench.count(2, 5))
    yield _row("put of 64 MiB", subjects, put(large), bench.count(1, 3))


def _reads(bench: Bench, subjects: dict[str, Subject]) -> Iterator[Check]:
    size = 2 * RANGES * RANGE
    data = os.urandom(size)
    maker = next(iter(subjects.values()))
    maker.put("read/large", data)
    for number in range(OBJECTS):
        maker.put(f"read/{number}", data[: 4 * RANGE])
    every_second = [(at, at + RANGE) for at in range(0, size, 2 * RANGE)]

    def objects(subject: Subject) -> None:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(
                threads.map(
                    lambda number: subject.ranges(f"read/{number}", 4 * RANGE, every_second[:1]), range(OBJECTS)
                )
            )

    yield _row("tail of 64 KB", subjects, lambda subject: subject.tail("read/large", size), bench.count(20, 100))
    yield _row(
        f"{RANGES} ranges of 256 KB of one object",
        subjects,
        lambda subject: subject.ranges("read/large", size, every_second),
        bench.count(3, 10),
    )
    yield _row(f"256 KB of each of {OBJECTS} objects", subjects, objects, bench.count(3, 10))


def _names(bench: Bench, subjects: dict[str, Subject]) -> Iterator[Check]:
    prefixes, doomed = bench.count(1_000, 16_000), bench.count(500, 2_000)
    maker = next(iter(subjects.values()))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda number: maker.put(f"list/data_id={number}/x", b""), range(prefixes)))

    def directories(subject: Subject) -> None:
        assert subject.directories("list") == prefixes

    def fill() -> None:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(lambda number: maker.put(f"gone/{number}", b""), range(doomed)))

    yield _row(f"listing of {prefixes:,} prefixes", subjects, directories, bench.count(1, 3))
    paths = [f"gone/{number}" for number in range(doomed)]
    yield _row(f"deleting {doomed:,} objects", subjects, lambda subject: subject.delete(paths), 1, fill)


def _row(
    what: str,
    subjects: dict[str, Subject],
    call: Callable[[Subject], object],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> Check:
    """All take turns, each round from another on."""
    took: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            before()
            began = time.perf_counter()
            call(subjects[name])
            took[name].append(time.perf_counter() - began)
    note = ", ".join(f"{name} {shown(float(np.median(each)), 'ms')}" for name, each in took.items())
    pairs = Pairs(took["ours over obstore"], took["ours over s3fs"])
    return at_least("clients", what, "ours over s3fs", pairs, 1.0, note=f"{what}: {note}")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Raises Unavailable where there is none."""
    try:
        with S3Server.started() as server:
            yield server
    except NotInstalled as error:
        raise Unavailable(str(error)) from None


def _config(place: Place) -> dict[str, Any]:
    return {
        "access_key_id": place.options["key"],
        "secret_access_key": place.options["secret"],
        "endpoint": place.options["endpoint_url"],
        "region": REGION,
    }


def s3_store(place: Place) -> S3Store:
    """obstore alone."""
    return S3Store(place.bucket, **_config(place), client_options={"allow_http": True})


def _s3fs(place: Place) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        **place.options,
        client_kwargs={"region_name": REGION},
        config_kwargs={"max_pool_connections": 2 * AT_ONCE},
        skip_instance_cache=True,
        use_listings_cache=False,
    )
