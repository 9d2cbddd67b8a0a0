"""What a local store has on disk, seen without the product."""

from __future__ import annotations

from pathlib import Path


class LocalMedium:
    """The directory behind a local store, without the product's code."""

    options = None  # for `open_storage`
    rounds = 200  # of what is worth repeating

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    @classmethod
    def of_a_dataset(cls, root: Path) -> LocalMedium:
        """With the folder that whoever founds a dataset makes first."""
        (root / "_rr").mkdir()
        return cls(root)

    def put(self, path: str, data: bytes = b"x") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    def get(self, path: str) -> bytes | None:
        return (self.root / path).read_bytes() if (self.root / path).exists() else None

    def drop(self, path: str) -> None:
        (self.root / path).unlink()

    def names(self, path: str = "") -> list[str]:
        return sorted(each.name for each in (self.root / path).iterdir())

    def objects(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}
