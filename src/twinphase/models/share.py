"""One rank's share of a model: rows of its tensors, and the blueprint of its share.

Every linear layer is divided by its outputs and reads whole rows, so that each output is the sum
that one rank alone would compute, in the same order: the bits do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from twinphase.blueprint import Blueprint, Share, Span
from twinphase.errors import InvalidRequestError
from twinphase.weights.checkpoint import Checkpoint, TensorInfo

Rows = tuple[str, int, int]  # a tensor's name without its ending, the first row, how many


@dataclass(frozen=True, kw_only=True)
class _SharedCheckpoint(Checkpoint):
    """A checkpoint some of whose tensors are rows of the original's.

    Attributes:
        original: the checkpoint of all ranks.
        rows: for tensors that are rows of every expert, the original's name and the first row. They
            are copied.
    """

    original: Checkpoint
    rows: dict[str, tuple[str, int]]
    copies: dict[str, Any] = field(default_factory=dict)

    def raw(self, name: str) -> Any:
        if name not in self.rows:
            return super().raw(name)
        if name not in self.copies:
            source, first = self.rows[name]
            rows = self.original.raw(source).reshape(*self.original.tensors[source].shape[:2], -1)
            self.copies[name] = rows[:, first : first + self.tensors[name].shape[1]].reshape(-1)
        return self.copies[name]

    def release(self, name: str) -> None:
        if name not in self.rows:
            return super().release(name)
        self.copies.pop(name, None)
        return self.original.release(self.rows[name][0])


def share_of(
    checkpoint: Checkpoint, blueprint: Blueprint, rank: int, ranks: int
) -> tuple[Checkpoint, Blueprint]:
    """The part of a model that rank `rank` of `ranks` computes; with one rank, the model itself.

    Raises:
        InvalidRequestError: more ranks than heads, or than other things to divide; or a model with
            recurrent layers, or with layers with different heads.
    """
    if ranks == 1:
        return checkpoint, blueprint
    b = blueprint
    name = checkpoint.path.name
    if b.recurrent_layers or b.unlike_layers:
        what = "recurrent layers" if b.recurrent_layers else "layers with different heads"
        raise InvalidRequestError(
            f"tensor_parallel_size is {ranks}, but {name} has {what}, which ranks do not share "
            "yet.",
            "Leave tensor_parallel_size out.",
        )
    most = min(b.num_heads, b.ffn_size)
    if ranks > most:
        raise InvalidRequestError(
            f"tensor_parallel_size is {ranks}, but {name} has {b.num_heads} attention heads.",
            f"Use at most {most}.",
        )
    spans = [_heads(b, other, ranks) for other in range(ranks)]
    share = Share(
        rank=rank,
        ranks=ranks,
        whole=b,
        kv_heads=spans[rank][1],
        heads=_columns(b, [q for q, _ in spans], rank),
        keys=_columns(b, [kv for _, kv in spans], rank),
        ffn=_span(b.ffn_size, rank, ranks, ((256, 4 * ranks), (32, ranks), (1, 0))),
        hidden=_span(b.hidden_size, rank, ranks, ((32, ranks), (1, 0))),
        vocab=_span(b.vocab_size, rank, ranks, ((32, ranks), (1, 0))),
    )
    local = replace(b, num_heads=spans[rank][0].size, num_kv_heads=share.kv_heads.size, share=share)
    return _shared(checkpoint, b, share), replace(
        local, tied=False, fused_qkv=False, fused_gate_up=False
    )


def rank_sizes(checkpoint: Checkpoint, blueprint: Blueprint, ranks: int) -> list[tuple[int, int]]:
    """Bytes of stored tensors and KV heads per layer of each rank; raises as `share_of` does."""
    shares = [share_of(checkpoint, blueprint, rank, ranks) for rank in range(ranks)]
    return [
        (sum(one.nbytes for one in mine.tensors.values()), b.num_kv_heads) for mine, b in shares
    ]


def kv_heads_of(blueprint: Blueprint, rank: int, ranks: int) -> Span:
    """The KV heads of a rank."""
    return _heads(blueprint, rank, ranks)[1]


def _heads(b: Blueprint, rank: int, ranks: int) -> tuple[Span, Span]:
    """Query heads and KV heads of a rank.

    Where there are fewer KV heads than ranks, several have the same one.
    """
    count = b.num_kv_heads
    if ranks <= count:
        kv = _span(count, rank, ranks, ((1, 0),))
        return Span(kv.first * b.group, kv.size * b.group, b.num_heads, 1, ()), kv
    head = rank * count // ranks
    sharing = [other for other in range(ranks) if other * count // ranks == head]
    part = _span(b.group, sharing.index(rank), len(sharing), ((1, 0),))
    return Span(head * b.group + part.first, part.size, b.num_heads, 1, ()), Span(
        head, 1, count, 1, ()
    )


def _columns(b: Blueprint, heads: list[Span], rank: int) -> Span:
    """The columns of a rank's heads; `heads` are those of all ranks."""
    dim = b.head_dim
    mine = heads[rank]
    return Span(
        dim * mine.first,
        dim * mine.size,
        dim * mine.total,
        dim,
        tuple(dim * one.first for one in heads),
    )


def _span(total: int, rank: int, ranks: int, multiples: tuple[tuple[int, int], ...]) -> Span:
    """A rank's share of `total` columns.

    `multiples` are pairs of a unit and a least number of units; the first that fits is used.
    """
    multiple, units = next(
        (one, -(-total // one)) for one, least in multiples if -(-total // one) >= least
    )
    firsts = [min(total, i * units // ranks * multiple) for i in range(ranks + 1)]
    return Span(firsts[rank], firsts[rank + 1] - firsts[rank], total, multiple, tuple(firsts[:-1]))


def _layer_rows(b: Blueprint, share: Share) -> Iterator[tuple[str, Rows]]:
    """(name, rows) of each tensor of a layer that is divided, names without their endings."""
    dim = b.head_dim
    queries = b.num_heads * dim
    q = share.heads.first, share.heads.size
    kv = share.kv_heads.first * dim, share.kv_heads.size * dim
    fused_at = {"attn_q": 0, "attn_k": queries, "attn_v": queries + b.num_kv_heads * dim}
    for name, (first, count) in {"attn_q": q, "attn_k": kv, "attn_v": kv}.items():
        fused = ("attn_qkv", fused_at[name] + first, count)
        yield name, fused if b.fused_qkv else (name, first, count)
    yield "attn_sinks", ("attn_sinks", q[0] // dim, q[1] // dim)
    experts = "_exps" if b.experts else ""
    for name in ("attn_output", "ffn_down" + experts):
        yield name, (name, share.hidden.first, share.hidden.size)
    ffn = share.ffn
    for name, start in (("ffn_gate", 0), ("ffn_up", b.ffn_size)):
        target = name + experts
        fused = ("ffn_up", start + ffn.first, ffn.size)
        yield target, fused if b.fused_gate_up else (target, ffn.first, ffn.size)


def _shared(checkpoint: Checkpoint, b: Blueprint, share: Share) -> Checkpoint:
    """The tensors of one rank: the embedding is whole, the head always a tensor of its own."""
    tensors = dict(checkpoint.tensors)
    copied: dict[str, tuple[str, int]] = {}
    head: Rows = ("token_embd" if b.tied else "output", share.vocab.first, share.vocab.size)
    divided = [("output", head)]
    for i in range(b.num_layers):
        divided += [
            (f"blk.{i}.{target}", (f"blk.{i}.{source}", first, size))
            for target, (source, first, size) in _layer_rows(b, share)
        ]
    for name in {rows[0] for _, rows in divided} - {"token_embd"}:
        for ending in (".weight", ".bias"):
            tensors.pop(name + ending, None)
    for target, (source, first, size) in divided:
        for ending in (".weight", ".bias"):
            info = checkpoint.tensors.get(source + ending)
            if info is None:
                continue
            by_expert = source.endswith("_exps")
            if by_expert:
                copied[target + ending] = source + ending, first
            tensors[target + ending] = _rows_of(info, target + ending, first, size, by_expert)
    fields = vars(checkpoint) | {"tensors": tensors}
    return _SharedCheckpoint(**fields, rows=copied, original=checkpoint)


def _rows_of(info: TensorInfo, name: str, first: int, size: int, by_expert: bool) -> TensorInfo:
    """Rows of a tensor, or the same rows of every expert; the offset then means nothing."""
    axis = 1 if by_expert else 0
    nbytes = info.nbytes // info.shape[axis]
    return replace(
        info,
        name=name,
        shape=(*info.shape[:axis], size, *info.shape[axis + 1 :]),
        offset=info.offset + first * nbytes,
        nbytes=nbytes * size,
    )
