"""Qwen3.5's multi-token prediction layer (MTP), as a model of its own.

It is a decoder layer with attention. Its input concatenates the target's hidden state at a
position, after the final norm, and the embedding of the next token; its output predicts the token
after that. Embedding and head are the target's. `speculation/mtp.py` drafts with it.
"""

from __future__ import annotations

from dataclasses import replace

from twinphase.backends.base import Array, Backend, Operations, WeightLoader
from twinphase.blueprint import Blueprint
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.decoder import Decoder, load_layer
from twinphase.models.tensors import Shape, check_tensors, layer_tensors
from twinphase.weights.checkpoint import Checkpoint

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
NEXT = "blk.0.nextn."
# If a file omits it, it is the target's norm.
NORM = f"{NEXT}shared_head_norm.weight"


def mtp_blueprint(target: Blueprint, more_positions: int) -> Blueprint:
    """The layer's blueprint, for drafts that reach `more_positions` beyond the context."""
    attends = next(i for i in range(target.num_layers) if target.attends(i))
    return replace(
        target,
        num_layers=1,
        context_length=target.context_length + more_positions,
        ropes=(target.ropes[attends],),
        windows=(target.windows[attends],),
        recurrence=None,
        recurrent_layers=(),
        dense_layers=0,
        draft_layers=0,
        tied=False,
    )


def mtp_problem(checkpoint: Checkpoint, target: Blueprint) -> str | None:
    """Why the model cannot draft with an MTP layer; None if it can."""
    if not target.draft_layers:
        return f"{checkpoint.path.name} has no layer that predicts further tokens (MTP)."
    try:
        view = _layer_alone(checkpoint, target)
        check_tensors(view, _tensors(mtp_blueprint(target, 0)), [EMBEDDING, NORM])
    except (CheckpointError, UnsupportedModelError) as error:
        return error.cause
    return None


class MtpHead(Decoder):
    """The layer on its own backend, beside the target's backend."""

    def __init__(
        self,
        target: Decoder,
        checkpoint: Checkpoint,
        backend: Backend | WeightLoader,
        max_positions: int,
        more_positions: int,
    ) -> None:
        """Load the layer of the target's `checkpoint`, for which `mtp_problem` returns None."""
        whole = target.blueprint.whole
        # The first of several ranks drafts by itself, but has only a share of the target's head.
        view = _layer_alone(checkpoint, whole, with_head=target.blueprint.share is not None)
        blueprint = self.blueprint = mtp_blueprint(whole, more_positions)
        backend.prepare(
            view,
            blueprint,
            lambda other: MtpHead(target, checkpoint, other, max_positions, more_positions).forward,
        )
        rope = blueprint.ropes[0]
        self.ropes = [rope and backend.rope(rope, max_positions + more_positions)]
        self.embedding = target.embedding
        self.layer_embedding = None
        self.head = backend.matrix(view, [HEAD]) if HEAD in view.tensors else target.head
        self.layers = [load_layer(view, blueprint, backend, 0)]
        # The next draft starts from the layer's hidden state after its norm.
        self.kept = (1,)

        def norm(name: str) -> Array:
            return backend.vector(view, [name], blueprint.norm_offset)

        self.norm = norm(NORM) if NORM in view.tensors else target.norm
        self._norms = norm(f"{NEXT}enorm.weight"), norm(f"{NEXT}hnorm.weight")
        self._join = backend.matrix(view, [f"{NEXT}eh_proj.weight"])

    def first_rows(self, backend: Operations) -> Array:
        """Embeddings, concatenated with the hidden states that the step brings."""
        eps = self.blueprint.norm_eps
        embedded = backend.embed(self.embedding, self.blueprint.embedding_scale)
        embedded = backend.rms_norm(embedded, self._norms[0], eps)
        hidden = backend.rms_norm(backend.given_rows(), self._norms[1], eps)
        return backend.linear(backend.join(embedded, hidden), self._join)


def _tensors(b: Blueprint) -> dict[str, Shape]:
    own = {f"{NEXT}{name}.weight": (b.hidden_size,) for name in ("enorm", "hnorm")}
    layer = {f"blk.0.{name}": shape for name, shape in layer_tensors(b, 0).items()}
    return {**own, f"{NEXT}eh_proj.weight": (b.hidden_size, 2 * b.hidden_size), **layer}


def _layer_alone(
    checkpoint: Checkpoint, target: Blueprint, *, with_head: bool = False
) -> Checkpoint:
    """The checkpoint with the layer's tensors as those of layer 0, the embedding and the head."""
    prefix = f"blk.{target.num_layers}."
    tensors = {EMBEDDING: checkpoint.tensors[EMBEDDING]}
    if with_head:
        source = checkpoint.tensors[EMBEDDING if target.tied else HEAD]
        tensors[HEAD] = replace(source, name=HEAD)
    for name, info in checkpoint.tensors.items():
        if name.startswith(prefix):
            own = f"blk.0.{name.removeprefix(prefix)}"
            tensors[own] = replace(info, name=own)
    return replace(checkpoint, tensors=tensors)
