"""One rank's share of a model: rows of its tensors, and the share's blueprint.

Every linear layer is divided by its outputs and reads whole input rows, so that each output is the
same sum in the same order as on a single rank: the bits do not depend on the number of ranks.
Recurrent layers are divided by heads or channels, which are independent. The small matrices of
layer embeddings (Gemma 4) and shared experts are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from twinphase.blueprint import (
    Blueprint,
    DeltaNet,
    KVShape,
    Mamba2,
    MatrixStates,
    Share,
    ShortConv,
    Span,
)
from twinphase.errors import InvalidRequestError
from twinphase.models.tensors import taken_apart
from twinphase.weights.checkpoint import Checkpoint, TensorInfo
from twinphase.weights.rows import RowsCheckpoint, Runs

Rows = tuple[str, Runs]  # The name of a tensor without its ending, and rows of it.
ENDINGS = (".weight", ".bias", "")
# Kernels compute this number of channels of a short convolution together.
CHANNELS_AT_ONCE = 32


class _StateHeads(NamedTuple):
    """A rank's heads of a recurrence: (first, number) of key heads, and runs of value heads."""

    keys: tuple[int, int]
    values: Runs


def share_of(
    checkpoint: Checkpoint, blueprint: Blueprint, rank: int, ranks: int
) -> tuple[Checkpoint, Blueprint]:
    """The part of a model that rank `rank` of `ranks` computes; with one rank, the whole model.

    Raises:
        InvalidRequestError: there are more ranks than heads or other units to divide, or the KV
            heads are not divisible by the ranks.
    """
    if ranks == 1:
        return checkpoint, blueprint
    b = blueprint
    _check(checkpoint.path.name, b, ranks)
    heads = [_query_heads(b, other, ranks) for other in range(ranks)]
    dims = [b.kv_shape(i).head_dim for i in range(b.num_layers)]
    keys = [_kv_span(b, b.num_kv_heads, other, ranks) for other in range(ranks)]
    share = Share(
        rank=rank,
        ranks=ranks,
        whole=b,
        heads=tuple(_columns(heads, rank, b.num_heads, dim) for dim in dims),
        keys=_columns([(one.first, one.size) for one in keys], rank, b.num_kv_heads, b.head_dim),
        states=_states(b, rank, ranks),
        ffn=tuple(_ffn(b.ffn_width(i), rank, ranks) for i in range(b.num_layers)),
        experts=_ffn(b.experts.ffn_size, rank, ranks) if b.experts else None,
        hidden=_span(b.hidden_size, rank, ranks, ((32, ranks), (1, 0))),
        vocab=_span(b.vocab_size, rank, ranks, ((32, ranks), (1, 0))),
    )
    local = replace(
        b,
        num_heads=heads[rank][1],
        num_kv_heads=keys[rank].size,
        recurrence=_recurrence(b, share),
        experts=b.experts and replace(b.experts, fused_gate_up=False),
        share=share,
        tied=False,
        fused_qkv=False,
        fused_gate_up=False,
    )
    if b.full_kv:
        span = _kv_span(b, b.full_kv.num_heads, rank, ranks)
        local = replace(local, full_kv=replace(b.full_kv, num_heads=span.size))
    return _shared(taken_apart(checkpoint, b), b, share), local


def _check(name: str, b: Blueprint, ranks: int) -> None:
    """Raise InvalidRequestError if a model cannot be divided among this number of ranks."""
    counts = {"attention heads": b.num_heads}
    if isinstance(b.recurrence, MatrixStates):
        counts["heads in its recurrent layers"] = b.recurrence.value_heads
    widths = {b.ffn_width(i) for i in range(b.num_layers)}
    widths |= {b.experts.ffn_size} if b.experts else set()
    counts["columns in a feed-forward layer"] = min(widths)
    for what, most in counts.items():
        if ranks > most:
            raise InvalidRequestError(
                f"tensor_parallel_size is {ranks}, but {name} has {most} {what}.",
                f"Use at most {most}.",
            )
    if b.full_kv and (
        b.full_kv.head_dim == b.head_dim
        or max(b.full_kv.num_heads, b.num_kv_heads) % min(b.full_kv.num_heads, b.num_kv_heads)
    ):
        raise InvalidRequestError(
            f"tensor_parallel_size is {ranks}, but the layers of {name} have {b.num_kv_heads} KV "
            f"heads of {b.head_dim} and {b.full_kv.num_heads} of {b.full_kv.head_dim}, which ranks "
            "do not divide.",
            "Leave tensor_parallel_size out.",
        )


def rank_sizes(
    checkpoint: Checkpoint, blueprint: Blueprint, ranks: int
) -> list[tuple[int, Blueprint]]:
    """Bytes of stored tensors and blueprint of each rank's share; raises as `share_of` does."""
    shares = [share_of(checkpoint, blueprint, rank, ranks) for rank in range(ranks)]
    return [(sum(one.nbytes for one in mine.tensors.values()), b) for mine, b in shares]


def kv_spans(blueprint: Blueprint, rank: int, ranks: int) -> dict[KVShape, Span]:
    """A rank's KV heads in layers of each shape, in the order of the cache's groups."""
    shapes = dict.fromkeys(blueprint.kv_shapes)
    return {shape: _kv_span(blueprint, shape.num_heads, rank, ranks) for shape in shapes}


def _divide(total: int, units: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """The start and the size of a rank's share of `total` items, in whole `units`.

    Units are in descending order, each a multiple of the next. If there are more ranks than units
    of one size, each unit is divided into units of the next size; several ranks may have the same
    unit of the smallest size.
    """
    unit, *smaller = units
    count = total // unit
    if ranks <= count:
        first, end = (i * count // ranks * unit for i in (rank, rank + 1))
        return first, end - first
    number = rank * count // ranks
    if not smaller:
        return number * unit, unit
    sharing = [other for other in range(ranks) if other * count // ranks == number]
    first, size = _divide(unit, smaller, sharing.index(rank), len(sharing))
    return number * unit + first, size


def _query_heads(b: Blueprint, rank: int, ranks: int) -> tuple[int, int]:
    """The start and the number of a rank's query heads.

    Query heads of one KV head are split only if there are more ranks than KV heads.
    """
    counts = {b.num_kv_heads, b.full_kv.num_heads if b.full_kv else b.num_kv_heads}
    groups = sorted({b.num_heads // count for count in counts}, reverse=True)
    return _divide(b.num_heads, [*groups, 1], rank, ranks)


def _kv_span(b: Blueprint, count: int, rank: int, ranks: int) -> Span:
    """The KV heads, of `count`, that a rank's query heads read; several ranks may read one."""
    group = b.num_heads // count
    first, size = _query_heads(b, rank, ranks)
    return Span(first // group, max(1, size // group), count, 1, ())


def _columns(heads: Sequence[tuple[int, int]], rank: int, total: int, dim: int) -> Span:
    """The columns of a rank's heads; `heads` is (first, number) among the heads of all ranks."""
    first, size = heads[rank]
    return Span(dim * first, dim * size, dim * total, dim, tuple(dim * one for one, _ in heads))


def _ffn(width: int, rank: int, ranks: int) -> Span:
    return _span(width, rank, ranks, ((256, 4 * ranks), (32, ranks), (1, 0)))


def _states(b: Blueprint, rank: int, ranks: int) -> Span | None:
    """The columns of a rank in a recurrence's output."""
    r = b.recurrence
    if r is None:
        return None
    if isinstance(r, ShortConv):
        unit = CHANNELS_AT_ONCE if r.channels % CHANNELS_AT_ONCE == 0 else 1
        return Span(*_divide(r.channels, [unit], rank, ranks), r.channels, unit, ())
    runs = _state_heads(r, rank, ranks).values
    first = r.value_dim * runs[0][0]
    size = r.value_dim * sum(count for _, count in runs)
    step = r.value_dim * r.key_heads
    return Span(first, size, r.num_values, r.value_dim, (), runs=len(runs), step=step)


def _state_heads(r: MatrixStates, rank: int, ranks: int) -> _StateHeads:
    """A rank's heads; a key head's value heads are split only if ranks exceed key heads."""
    group = r.value_heads // r.key_heads
    first, size = _divide(r.value_heads, [group, 1], rank, ranks)
    keys = first // group, max(1, size // group)
    if not r.tiled:
        return _StateHeads(keys, [(first, size)])
    # Indices of value heads within each key head: all of them, or some.
    numbers = range(first % group, first % group + min(size, group))
    return _StateHeads(keys, [(number * r.key_heads + keys[0], keys[1]) for number in numbers])


def _recurrence(b: Blueprint, share: Share) -> ShortConv | DeltaNet | Mamba2 | None:
    """A rank's share of the recurrence; None if no layer is recurrent."""
    r = b.recurrence
    if r is None or share.states is None:
        return None
    if isinstance(r, ShortConv):
        return replace(r, channels=share.states.size)
    keys = _state_heads(r, share.rank, share.ranks).keys[1]
    return replace(r, key_heads=keys, value_heads=share.states.size // r.value_dim)


def _span(total: int, rank: int, ranks: int, multiples: tuple[tuple[int, int], ...]) -> Span:
    """The columns of a rank's share of `total` columns.

    `multiples` are pairs of a unit and a minimum number of units; the first one that fits is used.
    """
    multiple, units = next(
        (one, -(-total // one)) for one, least in multiples if -(-total // one) >= least
    )
    firsts = [min(total, i * units // ranks * multiple) for i in range(ranks + 1)]
    return Span(firsts[rank], firsts[rank + 1] - firsts[rank], total, multiple, tuple(firsts[:-1]))


def _layer_rows(b: Blueprint, share: Share, layer: int) -> Iterator[tuple[str, Rows]]:
    """(name, rows) of each divided tensor of a layer; names have no endings."""
    if layer in b.recurrent_layers:
        yield from _recurrent_rows(b, share)
    if b.attends(layer):
        yield from _attention_rows(b, share, layer)
    mixture = b.experts_of(layer)
    experts = "_exps" if mixture else ""
    hidden = [(share.hidden.first, share.hidden.size)]
    for name in ("attn_output", "ssm_out", "shortconv.out_proj", "ffn_down" + experts):
        yield name, (name, hidden)
    span = share.experts if mixture else share.ffn[layer]
    assert span is not None
    fused = ""
    if mixture and mixture.fused_gate_up:
        fused = "ffn_gate_up_exps"
    elif b.fused_gate_up and not mixture:
        fused = "ffn_up"
    for name, start in (("ffn_gate", 0), ("ffn_up", span.total)):
        target = name + experts
        at = start if fused else 0
        yield target, (fused or target, [(at + span.first, span.size)])


def _attention_rows(b: Blueprint, share: Share, layer: int) -> Iterator[tuple[str, Rows]]:
    shape = b.kv_shape(layer)
    dim = shape.head_dim
    queries = b.num_heads * dim
    span = share.heads[layer]
    kv = _kv_span(b, shape.num_heads, share.rank, share.ranks)
    gates = 1 + b.attention_gate  # The gates follow each head's queries.
    rows = {"attn_q": (gates * span.first, gates * span.size)}
    rows |= dict.fromkeys(("attn_k", "attn_v"), (kv.first * dim, kv.size * dim))
    fused_at = {"attn_q": 0, "attn_k": queries, "attn_v": queries + shape.num_heads * dim}
    for name, (first, size) in rows.items():
        fused = "attn_qkv", [(fused_at[name] + first, size)]
        yield name, fused if b.fused_qkv else (name, [(first, size)])
    yield "attn_sinks", ("attn_sinks", [(span.first // dim, span.size // dim)])


def _recurrent_rows(b: Blueprint, share: Share) -> Iterator[tuple[str, Rows]]:
    r = b.recurrence
    span = share.states
    assert r is not None and span is not None
    values = [(first, size) for _, first, size in span.pieces]
    if isinstance(r, ShortConv):
        # A file stores the three matrices below each other in one.
        parts = [(part * r.channels + first, size) for part in range(3) for first, size in values]
        yield "shortconv.in_proj", ("shortconv.in_proj", parts)
        yield "shortconv.conv", ("shortconv.conv", values)
        return
    heads = _state_heads(r, share.rank, share.ranks)
    first, size = (r.key_dim * count for count in heads.keys)
    keys = [(first, size), (r.num_keys + first, size)]
    if isinstance(r, Mamba2):
        mixed = values + [(r.num_values + at, count) for at, count in keys]
    else:
        mixed = keys + [(2 * r.num_keys + at, count) for at, count in values]
    for name in ("attn_qkv", "ssm_conv1d"):
        yield name, (name, mixed)
    yield "attn_gate", ("attn_gate", values)
    for name in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_d", "ssm_dt"):
        yield name, (name, heads.values)


def _shared(checkpoint: Checkpoint, b: Blueprint, share: Share) -> Checkpoint:
    """The tensors of one rank: the embedding is whole, and the head is always a separate tensor."""
    tensors = dict(checkpoint.tensors)
    copied: dict[str, tuple[str, int, Runs]] = {}
    head = "token_embd" if b.tied else "output"
    divided = [("output", (head, [(share.vocab.first, share.vocab.size)]))]
    for i in range(b.num_layers):
        divided += [
            (f"blk.{i}.{target}", (f"blk.{i}.{source}", runs))
            for target, (source, runs) in _layer_rows(b, share, i)
        ]
    for name in {rows[0] for _, rows in divided} - {"token_embd"}:
        for ending in ENDINGS:
            tensors.pop(name + ending, None)
    for target, (source, runs) in divided:
        for ending in ENDINGS:
            info = checkpoint.tensors.get(source + ending)
            if info is None:
                continue
            axis = int(source.endswith("_exps"))
            if axis or len(runs) > 1:
                copied[target + ending] = source + ending, axis, runs
            tensors[target + ending] = _rows_of(info, target + ending, axis, runs)
    fields = vars(checkpoint) | {"tensors": tensors}
    return RowsCheckpoint(**fields, copied=copied, original=checkpoint)


def _rows_of(info: TensorInfo, name: str, axis: int, runs: Runs) -> TensorInfo:
    """Rows of a tensor, or the same rows of every expert; the offset of a copy has no meaning."""
    nbytes = info.nbytes // info.shape[axis]
    size = sum(count for _, count in runs)
    return replace(
        info,
        name=name,
        shape=(*info.shape[:axis], size, *info.shape[axis + 1 :]),
        offset=info.offset + runs[0][0] * nbytes,
        nbytes=nbytes * size,
    )
