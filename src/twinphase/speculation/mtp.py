"""Drafts of a model's own layer for further tokens (MTP, Qwen3.5).

The layer is computed on a backend of its own, with a KV cache of its own: a row for each of the
target's rows that is known to be right, from the position where the target began to compute. Rows
wait until a draft is wanted, or until they fill a step. For later tokens of a draft the layer's own
output replaces the target's hidden state; what it writes for them is written again with the
target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Backend, StepInputs
from twinphase.batch import Batch, StepOutput
from twinphase.models.mtp import MtpHead
from twinphase.speculation.hidden_states import HiddenStateProposer, right_rows

F32 = NDArray[np.float32]
Part = tuple["_Sequence", int, Sequence[int], F32]


@dataclass
class _Sequence:
    """A request's rows.

    Attributes:
        base: the target's position of the first row.
        count: rows with keys and values.
        blocks: ids of the blocks that hold them.
        token_ids, hidden: of the rows after those, which wait: the token that follows each, and the
            target's hidden state.
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
        head: MtpHead,
        backend: Backend,
        *,
        num_layers: int,
        num_tokens: int,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        """Draft `num_tokens` tokens for a target of `num_layers` layers.

        `backend` has the head, and a KV cache of `num_blocks` blocks; its steps have up to
        `max_num_batched_tokens` rows of `max_num_seqs` sequences.
        """
        super().__init__()
        self.layers = (num_layers + 1,)
        self.num_tokens = num_tokens
        self._head = head
        self._backend = backend
        self._block_size = block_size
        self._max_rows = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        self._free = list(range(num_blocks))
        self._sequences: dict[str, _Sequence] = {}
        # No request pays for what happens once; its keys and values are overwritten.
        nothing = np.zeros((1, head.blueprint.hidden_size), np.float32)
        self._step([(_Sequence(0, blocks=[0]), 0, [0], nothing)])

    def update(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """Keep all rows but those of rejected drafts; compute those that fill a step."""
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
                each = [self._sequences[name] for name in some]
                parts = [
                    (sequence, sequence.count + ahead, drafts[name][-1:], last[name][None])
                    for name, sequence in zip(some, each, strict=True)
                ]
                token_ids, hidden = self._step(parts)
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
        """Whether there are blocks for this number of rows more; they are taken."""
        sequence = self._sequences[name]
        missing = -(-(sequence.count + num_rows) // self._block_size) - len(sequence.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sequence.blocks.append(self._free.pop())
        return True

    def _advance(self, sizes: Sequence[tuple[str, int]]) -> dict[str, tuple[int, F32]]:
        """Compute rows that wait, so many of each request; the last one's token and output.

        A request without room for its rows is dropped: it begins again with its next step.
        """
        parts: list[Part] = []
        names: list[str] = []
        for name, size in sizes:
            if not self._has_room(name, size):
                self.discard(name)
                continue
            sequence = self._sequences[name]
            names.append(name)
            parts.append(
                (sequence, sequence.count, sequence.token_ids[:size], sequence.hidden[:size])
            )
        if not parts:
            return {}
        token_ids, hidden = self._step(parts)
        for sequence, _, done, _ in parts:
            sequence.count += len(done)
            sequence.token_ids = sequence.token_ids[len(done) :]
            sequence.hidden = sequence.hidden[len(done) :]
        return dict(zip(names, zip(token_ids, hidden, strict=True), strict=True))

    def _step(self, parts: Sequence[Part]) -> tuple[list[int], F32]:
        """The most likely token after each part's last row, and that row of the layer's output.

        A part is a sequence, the place of its first row, the tokens, and the hidden states.
        """
        counts = [len(token_ids) for _, _, token_ids, _ in parts]
        ends = np.cumsum(counts)
        tables = np.zeros((len(parts), max(len(part[0].blocks) for part in parts)), np.int32)
        positions = []
        slots = []
        for table, (sequence, start, token_ids, _) in zip(tables, parts, strict=True):
            table[: len(sequence.blocks)] = sequence.blocks
            at = np.arange(start, start + len(token_ids), dtype=np.int32)
            positions.append(at)
            block_ids = table[at // self._block_size].astype(np.int64)
            slots.append(block_ids * self._block_size + at % self._block_size)
        inputs = StepInputs(
            token_ids=np.concatenate([token_ids for _, _, token_ids, _ in parts]).astype(np.int32),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots),
            query_start=np.concatenate([[0], ends]).astype(np.int32),
            block_tables=tables,
            num_decodes=len(parts) if max(counts) == 1 else 0,
            logit_rows=(ends - 1).astype(np.int32),
            hidden=np.concatenate([hidden for _, _, _, hidden in parts]),
        )
        logits = self._backend.execute(self._head.forward, inputs)
        best: list[int] = logits.argmax(axis=1).tolist()
        return best, self._backend.kept()[0].copy()


def _length(sequence: _Sequence) -> int:
    return sequence.count + len(sequence.token_ids)
