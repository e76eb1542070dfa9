"""From a matrix cell to the configuration of everything in it.

Cells differ in more than their name says: eviction policy, L2 adapters, retention, lock strength and the size of load
slices (two chunks, or production's, into which all fits) rotate with the cell's position in the matrix, so that the
whole matrix covers each of them several times with every group layout.
"""

from __future__ import annotations

from kvcore.errors import ConfigError
from kvcore.keys import Namespace
from kvcore.ladder.admissions import FLOOR_CHUNKS
from kvcore.ladder.matrix import FULL_MATRIX, MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.server_stack import StackConfig
from kvcore.loads import SLICE_BYTES
from kvcore.placement import Placement
from kvcore.sim.model import FingerprintModel, build_model
from kvcore.storage import StorageConfig

MODEL_NAME = "fingerprint"
L1_BYTES = 8 << 20
CHUNK_TOKENS_MAX = 48
L2_CHOICES = (("file",), ("memory",), ("memory", "file"))


def configure(
    cell: MatrixCell, options: LadderOptions, l2: tuple[str, ...] | None = None
) -> tuple[StackConfig, FingerprintModel]:
    """The cache's configuration and the model. Raises `ConfigError` for a chunk size that does not fit the groups."""
    if options.chunk_tokens > CHUNK_TOKENS_MAX:
        raise ConfigError(
            f"chunks of {options.chunk_tokens} tokens are too long: requests have up to 40 chunks, "
            f"and the simulated model has positions for chunks of {CHUNK_TOKENS_MAX} tokens at most"
        )
    layout, model = build_model(cell.groups, cell.ranks, chunk_tokens=options.chunk_tokens, seed=options.seed + 1)
    place = FULL_MATRIX.index(cell)
    namespace = Namespace(MODEL_NAME, kv_dtype="uint64", layout=layout.fingerprint, chunk_tokens=options.chunk_tokens)
    config = StackConfig(
        layout=layout,
        namespace=namespace,
        placement=Placement("rank" if cell.ranks > 1 else "chunk", max(1, cell.servers)),
        load_async=cell.load_async,
        l1_bytes=L1_BYTES if options.l1_bytes is None else options.l1_bytes,
        l2=l2 or L2_CHOICES[place % len(L2_CHOICES)],
        policy=("lru", "s3fifo")[place // 2 % 2],
        retain=place % 5 == 3,
        weak_locks=place % 4 == 2,
        storage=StorageConfig(load_slice_bytes=2 * sum(layout.cell_bytes_rows) if place % 5 >= 3 else SLICE_BYTES),
        transfer=options.transfer,
        admission=options.admission,
        admission_seed=options.seed,
        admission_floor_tokens=FLOOR_CHUNKS * options.chunk_tokens,
    )
    return config, model
