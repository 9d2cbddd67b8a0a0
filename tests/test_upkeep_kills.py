"""Compaction and garbage collection killed before each call of the operating system that changes or lists something.

Children are forked and patched, one for each call, and die of SIGKILL; a fresh reader must then see what the model says,
and what was left undone must be done by the next runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rr_dataset.folding import FOLD_AFTER_S
from tests.lifecycle import LATER_MS, Seen, collect_at, compact_at, fill, now_ms, record_ids, seen, shards
from tests.spooled import quick_folder
from tests.test_delete_kills import die_at

TTL_MS = 7 * 86_400_000
LIVE_ROWS = 9  # of `fill` and one put more


def act_compact(root: Path, ms: int) -> None:
    """Removes what an earlier run replaced, then compacts again."""
    compact_at(root, ms + LATER_MS)


def act_collect(root: Path, ms: int) -> None:
    """Removes replaced and covered shards and leftovers, drops one tombstone, notes others, folds."""
    collect_at(root, ms + TTL_MS + 2 * LATER_MS)


ACTIONS: dict[str, Callable[[Path, int], None]] = {"compact": act_compact, "collect": act_collect}


def prepare(root: Path, ms: int) -> Seen:
    """Everything in every state: raw, compacted, replaced, deleted; a tombstone with a note that it may go."""
    stored, model = fill(root, ms - int(FOLD_AFTER_S * 1000) - 60_000)
    compact_at(root, ms)
    stored.put("t:0:0:0")
    stored.put("t:1:0:0")
    mark = stored.tombstone("prefix", "t:0", made=ms - LATER_MS)
    model["t:1:0:0"] = seen(root)["t:1:0:0"]
    note = root / "_rr/gc" / f"{ms:012x}-{'0' * 32}.json"
    note.parent.mkdir()
    note.write_text(json.dumps([json.loads(mark.read_text())[0]["uuid"]]))
    return model


def drive(base: Path, action: str, ms: int) -> None:
    """Act on copies of `base/template`, killed one call later each time, until one gets through."""
    for number in range(1000):
        root = base / str(number)
        shutil.copytree(base / "template", root, copy_function=os.link)
        pid = os.fork()
        if not pid:
            die_at(number)
            ACTIONS[action](root, ms)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{number} {status}\n")
        if not status:
            return


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


def killed_everywhere(base: Path, action: str) -> int:
    ms = now_ms()
    model = prepare(base / "template", ms)
    assert seen(base / "template") == model
    code = f"from pathlib import Path; from tests.test_upkeep_kills import drive; drive(Path({str(base)!r}), {action!r}, {ms})"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = [line.split() for line in done.stdout.splitlines()]
    assert ended[-1][1] == "0"
    assert {status for _, status in ended[:-1]} == {"9"}
    for number, _ in ended:
        root = base / number
        assert seen(root) == model, f"killed before call {number}"
        for again in range(3, 6):
            compact_at(root, ms + again * LATER_MS)
            collect_at(root, ms + TTL_MS + again * LATER_MS)
        assert seen(root) == model, f"killed before call {number}"
        assert len(list(record_ids(root))) == LIVE_ROWS
        assert len(shards(root)) == 4
        assert not (root / "_rr/tmp").exists()
        assert not list((root / "_rr/tombstones").iterdir())
        shutil.rmtree(root)
    return len(ended)


@pytest.mark.parametrize("action", list(ACTIONS))
def test_killed_at_every_call(base: Path, action: str) -> None:
    assert killed_everywhere(base, action) >= 40
