"""What an S3 store holds, seen without the product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weed import Place


class S3Medium:
    """A prefix of a bucket, through botocore's plain client."""

    rounds = 25  # a request takes a hundred times as long as a call to the kernel

    def __init__(self, place: Place, client: str) -> None:
        self.place, self.uri = place, place.uri
        self.options = {**place.options, "client": client}

    def put(self, path: str, data: bytes = b"x") -> None:
        self.place.client.put_object(Bucket=self.place.bucket, Key=self.key(path), Body=data)

    def get(self, path: str) -> bytes | None:
        try:
            answer = self.place.client.get_object(Bucket=self.place.bucket, Key=self.key(path))
        except self.place.client.exceptions.NoSuchKey:
            return None
        return bytes(answer["Body"].read())

    def drop(self, path: str) -> None:
        self.place.client.delete_object(Bucket=self.place.bucket, Key=self.key(path))

    def objects(self) -> set[str]:
        return {path for path, _ in self.listed()}

    def listed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        pages = self.place.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.place.bucket, Prefix=self.key("")
        )
        for page in pages:
            for each in page.get("Contents", ()):
                yield each["Key"].removeprefix(self.key("")), each

    def uploads(self) -> list[str]:
        """The keys of multipart uploads that are neither completed nor aborted."""
        answer = self.place.client.list_multipart_uploads(Bucket=self.place.bucket, Prefix=self.key(""))
        return [each["Key"] for each in answer.get("Uploads", ())]

    def key(self, path: str) -> str:
        return f"{self.place.prefix}/{path}" if self.place.prefix else path
