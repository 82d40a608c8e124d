"""Messages between rank 0 and the other ranks of a model, between steps."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.config import EngineConfig

# Numbers of a sequence in `StepInputs.states`.
STATE_COLUMNS = 4


# To a rank.
class LoadShare(msgspec.Struct, tag=True, frozen=True):
    """The first message; answered by `Ready` or `Failed`. `config` is resolved."""

    model: str
    config: EngineConfig
    rank: int
    meeting_place: str


class Step(msgspec.Struct, tag=True, frozen=True):
    """Compute a step: `StepInputs` as bytes, block tables of `columns` columns, layers to keep.

    Without states, `states` is empty.
    """

    token_ids: bytes
    positions: bytes
    slot_mapping: bytes
    query_start: bytes
    block_tables: bytes
    columns: int
    num_decodes: int
    logit_rows: bytes
    states: bytes
    snapshots: bytes
    kept: tuple[int, ...]

    @classmethod
    def of(cls, inputs: StepInputs, kept: tuple[int, ...]) -> Step:
        names = (
            "token_ids",
            "positions",
            "slot_mapping",
            "query_start",
            "block_tables",
            "logit_rows",
            "snapshots",
        )
        arrays = {name: getattr(inputs, name).tobytes() for name in names}
        return cls(
            **arrays,
            states=b"" if inputs.states is None else inputs.states.tobytes(),
            columns=inputs.block_tables.shape[1],
            num_decodes=inputs.num_decodes,
            kept=kept,
        )

    def inputs(self) -> StepInputs:
        def ints(data: bytes) -> NDArray[np.int32]:
            return np.frombuffer(data, np.int32)

        return StepInputs(
            token_ids=ints(self.token_ids),
            positions=ints(self.positions),
            slot_mapping=np.frombuffer(self.slot_mapping, np.int64),
            query_start=ints(self.query_start),
            block_tables=ints(self.block_tables).reshape(-1, self.columns),
            num_decodes=self.num_decodes,
            logit_rows=ints(self.logit_rows),
            states=ints(self.states).reshape(-1, STATE_COLUMNS) if self.states else None,
            snapshots=ints(self.snapshots).reshape(-1, 2),
        )


class Read(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Blocks`: this rank's part of these blocks."""

    block_ids: list[int]


class Write(msgspec.Struct, tag=True, frozen=True):
    """Put parts of frames into these blocks."""

    block_ids: list[int]
    frames: list[bytes]


# From a rank.
class Ready(msgspec.Struct, tag=True, frozen=True):
    """The rank has its weights and its KV cache."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The rank ends with an error of this kind."""

    kind: str
    cause: str
    fix: str


class Blocks(msgspec.Struct, tag=True, frozen=True):
    """The blocks of a rank, in answer to `Read`."""

    frames: list[bytes]


FromRank = Ready | Failed | Blocks
ToRank = LoadShare | Step | Read | Write
