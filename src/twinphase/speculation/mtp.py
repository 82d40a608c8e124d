"""Drafts with a model's own multi-token prediction (MTP) layer, such as Qwen3.5's.

The layer runs on its own backend with its own KV cache, which has a row for each accepted row of
the target, from the position where the target began to compute. Rows are queued until a draft is
requested, or until they fill a step. For later tokens of a draft the layer's own output replaces
the target's hidden state; their keys and values are overwritten once the target's hidden states are
known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, StepOutput
from twinphase.speculation.hidden_states import HiddenStateProposer, right_rows

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class LayerRows:
    """Rows of one sequence for the layer to compute.

    Attributes:
        blocks: ids of the sequence's blocks.
        start: index of the first row.
        token_ids: the token that follows each row's position.
        hidden: float32 [rows, hidden_size], hidden states of the target or of the layer itself.
    """

    blocks: Sequence[int]
    start: int
    token_ids: Sequence[int]
    hidden: F32


# Returns the most likely token after each sequence's last row, and the layer's output for that row
# [sequences, hidden_size].
Compute = Callable[[Sequence[LayerRows]], tuple[list[int], F32]]


@dataclass
class _Sequence:
    """The computed and queued rows of a request.

    Attributes:
        base: position in the target's sequence of the first row.
        count: number of rows with keys and values.
        blocks: ids of the blocks that hold them.
        token_ids, hidden: for each queued row after those, the token that follows and the target's
            hidden state.
    """

    base: int
    count: int = 0
    blocks: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    hidden: F32 = field(default_factory=lambda: np.empty((0, 0), np.float32))


class Mtp(HiddenStateProposer):
    """Keeps keys and values per request, in blocks of the layer's backend."""

    source = "mtp"

    def __init__(
        self,
        compute: Compute,
        *,
        num_layers: int,
        num_tokens: int,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        """Draft `num_tokens` tokens for a target of `num_layers` layers.

        `compute` has `num_blocks` blocks of keys and values, and takes up to
        `max_num_batched_tokens` rows of up to `max_num_seqs` sequences.
        """
        super().__init__()
        self.layers = (num_layers + 1,)
        self.num_tokens = num_tokens
        self._compute = compute
        self._block_size = block_size
        self._max_rows = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        self._free = list(range(num_blocks))
        self._sequences: dict[str, _Sequence] = {}

    def update(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """Queue all rows but those of rejected drafts; compute them once they fill a step."""
        for share, first, token_ids in right_rows(batch, output):
            rows = hidden[0][first : first + len(token_ids)]
            name = share.request_id
            start = share.num_computed_tokens
            sequence = self._sequences.get(name)
            if sequence is None or not 0 <= start - sequence.base <= _length(sequence):
                self.discard(name)
                sequence = self._sequences[name] = _Sequence(start)
            known = start - sequence.base
            sequence.count = min(sequence.count, known)
            waiting = known - sequence.count
            sequence.token_ids[waiting:] = token_ids
            kept = sequence.hidden[:waiting].reshape(waiting, rows.shape[1])
            sequence.hidden = np.concatenate([kept, rows])
            while len(sequence.token_ids) > self._max_rows:
                if not self._advance([(name, self._max_rows)]):
                    break

    def draft_batch(self, names: Sequence[str]) -> list[list[int]]:
        drafts: dict[str, list[int]] = {name: [] for name in names}
        last: dict[str, F32] = {}
        while behind := [name for name in names if self._waiting(name)][: self._max_seqs]:
            room = self._max_rows
            sizes: list[tuple[str, int]] = []
            for name in behind:
                size = min(room, self._waiting(name))
                sizes += [(name, size)] if size else []
                room -= size
            for name, (token_id, hidden) in self._advance(sizes).items():
                if not self._waiting(name):
                    drafts[name].append(token_id)
                    last[name] = hidden
        for ahead in range(self.num_tokens - 1):
            going = [name for name in last if self._has_room(name, ahead + 1)]
            for start in range(0, len(going), self._max_seqs):
                some = going[start : start + self._max_seqs]
                token_ids, hidden = self._compute(
                    [self._rows(name, ahead, drafts[name][-1:], last[name][None]) for name in some]
                )
                for name, token_id, row in zip(some, token_ids, hidden, strict=True):
                    drafts[name].append(token_id)
                    last[name] = row
        return [drafts[name] for name in names]

    def discard(self, name: str) -> None:
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            self._free += sequence.blocks

    def _waiting(self, name: str) -> int:
        sequence = self._sequences.get(name)
        return len(sequence.token_ids) if sequence else 0

    def _has_room(self, name: str, num_rows: int) -> bool:
        """Allocate blocks for more rows; return False if there are too few."""
        sequence = self._sequences[name]
        missing = -(-(sequence.count + num_rows) // self._block_size) - len(sequence.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sequence.blocks.append(self._free.pop())
        return True

    def _rows(self, name: str, ahead: int, token_ids: Sequence[int], hidden: F32) -> LayerRows:
        sequence = self._sequences[name]
        return LayerRows(sequence.blocks, sequence.count + ahead, token_ids, hidden)

    def _advance(self, sizes: Sequence[tuple[str, int]]) -> dict[str, tuple[int, F32]]:
        """Compute queued rows of each request; return the token and the output of its last row.

        A request without room for its rows is dropped, and starts again at its next step.
        """
        parts: dict[str, LayerRows] = {}
        for name, size in sizes:
            if self._has_room(name, size):
                sequence = self._sequences[name]
                waiting = sequence.token_ids[:size], sequence.hidden[:size]
                parts[name] = self._rows(name, 0, *waiting)
            else:
                self.discard(name)
        if not parts:
            return {}
        token_ids, hidden = self._compute(list(parts.values()))
        for name, rows in parts.items():
            sequence = self._sequences[name]
            done = len(rows.token_ids)
            sequence.count += done
            sequence.token_ids = sequence.token_ids[done:]
            sequence.hidden = sequence.hidden[done:]
        return dict(zip(parts, zip(token_ids, hidden, strict=True), strict=True))


def _length(sequence: _Sequence) -> int:
    return sequence.count + len(sequence.token_ids)
