"""A shard: one Arrow IPC file of rows, with an index for exact reads in its footer. See schemas/FORMAT.md.

Building goes through `build_shard`. Reading needs the last 64 KiB of the file for `read_index`, then `read_tiles` takes
the payload that is wanted, and no more.
"""

from __future__ import annotations

from rr_dataset.shard.build import Scratch, ShardBuilder, build_shard
from rr_dataset.shard.check import Fault, check_shard
from rr_dataset.shard.index import TAIL_BYTES, ShardIndex, Source, likely_tail, read_index
from rr_dataset.shard.read import TileRead, VectorRead, read_tiles
from rr_dataset.shard.stream import SourceFile, arrow_file
from rr_dataset.shard.tiling import copy_tiles

__all__ = [
    "TAIL_BYTES",
    "Fault",
    "Scratch",
    "ShardBuilder",
    "ShardIndex",
    "Source",
    "SourceFile",
    "TileRead",
    "VectorRead",
    "arrow_file",
    "build_shard",
    "check_shard",
    "copy_tiles",
    "likely_tail",
    "read_index",
    "read_tiles",
]
