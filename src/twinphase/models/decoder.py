"""The forward pass of every decoder, over the `Backend` protocol and directed by a `Blueprint`.

A layer consists of two halves, attention and feed-forward, each with a residual connection. It is
easiest to read as Llama first: a norm before each half, and none of the blueprint's options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twinphase.backends.base import Array, Operations, WeightLoader
from twinphase.blueprint import Blueprint, DeltaNet, MatrixStates, Rope
from twinphase.models.tensors import (
    EXPERTS_GATE_UP,
    LAYER_EMBEDDING,
    LAYER_PROJECTION,
    SHARED_GATE_UP,
    Shape,
    attention_projections,
    gate_up,
    layer_tensors,
    multiplied,
    taken_apart,
)
from twinphase.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class StateWeights:
    """Weights of a delta rule or a state space besides its convolution and projections.

    Attributes:
        gate: projection to the gate of the result.
        steps: projection to alpha and beta of a delta rule, or to the steps of a state space.
        skip: factors of each head's values in the skip connection of a state space.
    """

    gate: Array
    steps: Array
    decay: Array
    step_bias: Array
    norm: Array
    skip: Array | None


@dataclass(frozen=True)
class LayerEmbedding:
    """The per-layer embedding of all layers, or one layer's part of it.

    Attributes:
        table: embedding rows with the parts of all layers.
        projection: from the hidden state to the parts of all layers, or back from one layer's part.
        gate: gate of one layer.
    """

    projection: Array
    norm: Array
    table: Array | None = None
    gate: Array | None = None


@dataclass(frozen=True)
class SharedExpert:
    """The expert of a mixture that all rows use, and the weights of its gate, if any."""

    gate_up: Array
    down: Array
    gate: Array | None


@dataclass(frozen=True)
class Mixer:
    """Weights of attention or of a recurrence; None for parts that the blueprint does not have.

    Attributes:
        place: index among the layers that cache KV of this layer, or of the one whose KV it attends
            to; for a recurrence, index among the layers with a state.
        qkv, output: input and output projections.
        scale: factor of the output that is added.
    """

    place: int
    qkv: Array
    output: Array
    scale: float
    qkv_bias: Array | None = None
    output_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    sinks: Array | None = None
    conv: Array | None = None
    conv_bias: Array | None = None
    states: StateWeights | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; None for parts that the blueprint does not have.

    Attributes:
        mixers: attention, a recurrence, or both of them on the same rows.
    """

    attn_norm: Array | None
    mixers: tuple[Mixer, ...]
    attn_post_norm: Array | None
    ffn_norm: Array | None
    router: Array | None
    router_bias: Array | None
    choice_bias: Array | None
    shared: SharedExpert | None
    gate_up: Array | None
    gate_up_bias: Array | None
    down: Array | None
    down_bias: Array | None
    ffn_post_norm: Array | None
    embedding: LayerEmbedding | None
    scale: Array | None


class Decoder:
    """Weights on one backend, and the forward pass of a step.

    Attributes:
        kept: indices of layers whose inputs the backend keeps (`Backend.kept`), ascending;
            `num_layers` stands for the input of the head in rows with logits, and `num_layers` + 1
            for it in all rows. Must be set before the first step.
    """

    kept: tuple[int, ...] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        backend: WeightLoader,
        max_positions: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Load every tensor onto `backend`; `max_positions` limits positions.

        `progress` is called with (done, total) layers.
        """
        self.blueprint = blueprint
        checkpoint = multiplied(taken_apart(checkpoint, blueprint), blueprint)
        backend.prepare(
            checkpoint,
            blueprint,
            lambda other: Decoder(checkpoint, blueprint, other, max_positions).forward,
        )
        tables: dict[Rope | None, Array] = {
            rope: backend.rope(rope, max_positions)
            for rope in dict.fromkeys(blueprint.ropes)
            if rope
        }
        self.ropes = [tables.get(rope) for rope in blueprint.ropes]
        self.embedding = backend.embedding(checkpoint, "token_embd.weight")
        self.layers: list[Layer] = []
        for i in range(blueprint.num_layers):
            progress(i, blueprint.num_layers)
            self.layers.append(load_layer(checkpoint, blueprint, backend, i))
        self.layer_embedding: LayerEmbedding | None = None
        if blueprint.layer_embedding_size:
            self.layer_embedding = LayerEmbedding(
                table=backend.embedding(checkpoint, LAYER_EMBEDDING),
                projection=backend.matrix(checkpoint, [LAYER_PROJECTION]),
                norm=backend.vector(checkpoint, ["per_layer_proj_norm.weight"]),
            )
        self.norm = backend.vector(
            checkpoint, [f"{blueprint.output_norm}.weight"], blueprint.norm_offset
        )
        self.head = backend.matrix(
            checkpoint, ["token_embd.weight" if blueprint.tied else "output.weight"]
        )

    def forward(self, backend: Operations) -> Array:
        """Logits [num_logits, vocab_size] of the backend's current step."""
        blueprint = self.blueprint
        # A rank computes its share of the vocabulary.
        logits = backend.linear(self.hidden(backend), self.head)
        if blueprint.logit_scale != 1.0 or blueprint.logit_softcap:
            logits = backend.cap_logits(logits, blueprint.logit_scale, blueprint.logit_softcap)
        return backend.gather(logits, blueprint.span("vocab"))

    def hidden(self, backend: Operations) -> Array:
        """The last hidden state after the final norm, [num_logits, hidden_size]."""
        blueprint = self.blueprint
        x = self.first_rows(backend)
        parts = self._layer_embeddings(backend, x)
        # After the last layer that writes KV or a state, rows are independent. From there on, only
        # rows with logits are computed, unless a later layer's input must be kept.
        whole = [layer for layer in self.kept if layer < blueprint.num_layers]
        last = max(blueprint.last_writer, *whole) if whole else blueprint.last_writer
        all_rows = blueprint.num_layers + 1 in self.kept
        for index, layer in enumerate(self.layers):
            if index in self.kept:
                backend.keep(x)
            normed = self._norm(backend, x, layer.attn_norm)
            mixed = [self._mix(backend, normed, index, mixer) for mixer in layer.mixers]
            if index == last and not all_rows:
                mixed = [backend.logit_rows(h) for h in mixed]
                x = backend.logit_rows(x)
                parts = None if parts is None else backend.logit_rows(parts)
            for mixer, h in zip(layer.mixers, mixed, strict=True):
                weights = (mixer.output, mixer.output_bias, layer.attn_post_norm)
                x = self._add(backend, x, h, weights, mixer.scale)
            if layer.gate_up is not None:
                x = self._feed_forward(backend, x, index, layer)
            if layer.embedding is not None:
                x = self._add_embedding(backend, x, parts, index)
        x = backend.rms_norm(x, self.norm, blueprint.norm_eps)
        if all_rows:
            backend.keep(x)
            x = backend.logit_rows(x)
        elif blueprint.num_layers in self.kept:
            backend.keep(x)
        return x

    def first_rows(self, backend: Operations) -> Array:
        """The input of the first layer, [num_tokens, hidden_size]."""
        return backend.embed(self.embedding, self.blueprint.embedding_scale)

    def _mix(self, backend: Operations, x: Array, index: int, mixer: Mixer) -> Array:
        """The output of attention or of a recurrence for the rows of each sequence."""
        qkv = backend.linear(x, mixer.qkv, bias=mixer.qkv_bias)
        place = mixer.place
        if mixer.states is not None:
            return self._mix_states(backend, x, qkv, mixer)
        b = self.blueprint
        if mixer.conv is not None:
            return backend.gather(backend.short_conv(qkv, mixer.conv, place), b.span("states"))
        q = backend.rope_kv_write(qkv, self.ropes[index], place, mixer.q_norm, mixer.k_norm)
        h = backend.attention(q, place, b.windows[index], mixer.sinks)
        h = backend.gate_heads(h, qkv) if b.attention_gate else h
        return backend.gather(h, b.span("heads", index))

    def _mix_states(self, backend: Operations, x: Array, qkv: Array, mixer: Mixer) -> Array:
        own = mixer.states
        assert own is not None
        eps = self.blueprint.norm_eps
        span = self.blueprint.span("states")
        steps = backend.linear(x, own.steps)
        gate = backend.linear(x, own.gate)
        if isinstance(self.blueprint.recurrence, DeltaNet):
            weights = (mixer.conv, own.decay, own.step_bias)
            values = backend.delta_rule(qkv, steps, weights, mixer.place)
            return backend.gather(backend.gated_norm(values, own.norm, gate, eps), span)
        conv = (mixer.conv, mixer.conv_bias)
        weights = (own.decay, own.step_bias, own.skip)
        values = backend.state_space(qkv, steps, conv, weights, mixer.place)
        if own.norm is None:
            return backend.gather(backend.gate_mul(gate, values), span)
        # The norm is over a group of heads, so every rank computes that of the whole group.
        return backend.gate_norm(
            backend.gather(values, span), own.norm, backend.gather(gate, span), eps
        )

    def _layer_embeddings(self, backend: Operations, x: Array) -> Array | None:
        """(e + rms_norm(projection of x / sqrt(hidden_size))) / sqrt(2), of all layers' parts.

        e are rows of the table, times the square root of a part's width. A norm of scaled rows
        equals a norm with another epsilon.
        """
        if self.layer_embedding is None:
            return None
        b = self.blueprint
        size = b.layer_embedding_size
        rows = backend.embed(self.layer_embedding.table, math.sqrt(size / 2))
        h = backend.linear(x, self.layer_embedding.projection)
        eps = b.norm_eps * b.hidden_size
        return backend.add_norm(rows, h, self.layer_embedding.norm, eps, scale=math.sqrt(0.5))

    def _add_embedding(self, backend: Operations, x: Array, parts: Array, index: int) -> Array:
        """Add a layer's output for its part of the embedding to x."""
        layer = self.layers[index]
        assert layer.embedding is not None
        first = index * self.blueprint.layer_embedding_size
        h = backend.gate_mul(backend.linear(x, layer.embedding.gate), parts, first)
        h = backend.linear(h, layer.embedding.projection)
        eps = self.blueprint.norm_eps
        return backend.add_norm(x, h, layer.embedding.norm, eps, factor=layer.scale)

    def _feed_forward(self, backend: Operations, x: Array, index: int, layer: Layer) -> Array:
        """Add the second half of a layer to x."""
        blueprint = self.blueprint
        experts = blueprint.experts_of(index)
        h = self._norm(backend, x, layer.ffn_norm)
        if experts is None:
            if blueprint.ffn_gate:
                h = backend.gated_linear(h, layer.gate_up, bias=layer.gate_up_bias)
            else:
                h = backend.linear(h, layer.gate_up, bias=layer.gate_up_bias)
                h = backend.gate_mul(h, h)
            h = backend.gather(h, blueprint.span("ffn", index))
            # The layer ends here, or with its embedding.
            factor = layer.scale if layer.embedding is None else None
            weights = (layer.down, layer.down_bias, layer.ffn_post_norm)
            return self._add(backend, x, h, weights, blueprint.multipliers.ffn, factor=factor)
        mixed = backend.moe(
            h,
            layer.router,
            layer.gate_up,
            layer.down,
            experts,
            router_bias=layer.router_bias,
            choice_bias=layer.choice_bias,
            gate_up_bias=layer.gate_up_bias,
            down_bias=layer.down_bias,
        )
        mixed = backend.gather(mixed, blueprint.span("hidden"))
        if layer.shared is not None:
            own = backend.gated_linear(h, layer.shared.gate_up)
            own = backend.linear(own, layer.shared.down)
            gate = layer.shared.gate
            mixed = (
                backend.add(mixed, own) if gate is None else backend.add_gated(mixed, own, h, gate)
            )
        return backend.add(x, mixed, blueprint.residual_scale)

    def _add(
        self,
        backend: Operations,
        x: Array,
        h: Array,
        weights: tuple[Array, Array | None, Array | None],
        scale: float,
        *,
        factor: Array | None = None,
    ) -> Array:
        """Add the last linear layer of a half to x, in one operation if nothing comes in between.

        `weights` are the weights of the linear layer, its bias, and a norm of its result.
        """
        weight, bias, post_norm = weights
        scale *= self.blueprint.residual_scale
        span = self.blueprint.span("hidden")
        if post_norm is None and bias is None and scale == 1.0:
            first = span.first if span else 0
            return backend.gather(backend.linear(h, weight, residual=x, first=first), span)
        h = backend.gather(backend.linear(h, weight, bias=bias), span)
        if post_norm is not None:
            eps = self.blueprint.norm_eps
            return backend.add_norm(x, h, post_norm, eps, scale=scale, factor=factor)
        return backend.add(x, h, scale)

    def _norm(self, backend: Operations, x: Array, weight: Array | None) -> Array:
        return x if weight is None else backend.rms_norm(x, weight, self.blueprint.norm_eps)


@dataclass(frozen=True)
class _Tensors:
    """Loads one layer's tensors."""

    checkpoint: Checkpoint
    blueprint: Blueprint
    backend: WeightLoader
    index: int
    expected: Mapping[str, Shape]

    def vector(self, *names: str, plus: float = 0.0) -> Array | None:
        if not all(name in self.expected for name in names):
            return None
        return self.backend.vector(self.checkpoint, self._named(*names), plus)

    def norm(self, name: str) -> Array | None:
        return self.vector(f"{name}.weight", plus=self.blueprint.norm_offset)

    def matrix(self, *names: str) -> Array:
        load = self.backend.experts if names[0].endswith("_exps") else self.backend.matrix
        return load(self.checkpoint, self._named(*(f"{name}.weight" for name in names)))

    def attention(self) -> Mixer:
        b = self.blueprint
        qkv = attention_projections(b, self.index)
        return Mixer(
            place=sum(map(b.attends, range(b.kv_source(self.index)))),
            qkv=self.matrix(*qkv),
            qkv_bias=self.vector(*(f"{name}.bias" for name in qkv)),
            q_norm=self.norm("attn_q_norm"),
            k_norm=self.norm("attn_k_norm"),
            sinks=self.vector("attn_sinks.weight"),
            output=self.matrix("attn_output"),
            output_bias=self.vector("attn_output.bias"),
            scale=b.multipliers.attention,
        )

    def recurrence(self) -> Mixer:
        b = self.blueprint
        place = b.recurrent_layers.index(self.index)
        scale = b.multipliers.states
        if not isinstance(b.recurrence, MatrixStates):
            return Mixer(
                place=place,
                qkv=self.matrix("shortconv.in_proj"),
                conv=self.vector("shortconv.conv.weight"),
                output=self.matrix("shortconv.out_proj"),
                scale=scale,
            )
        names = ("ssm_alpha.weight", "ssm_beta.weight")[: 1 + isinstance(b.recurrence, DeltaNet)]
        states = StateWeights(
            gate=self.matrix("attn_gate"),
            steps=self.backend.exact_matrix(self.checkpoint, self._named(*names)),
            decay=self.vector("ssm_a"),
            step_bias=self.vector("ssm_dt.bias"),
            norm=self.vector("ssm_norm.weight"),
            skip=self.vector("ssm_d"),
        )
        return Mixer(
            place=place,
            qkv=self.matrix("attn_qkv"),
            conv=self.vector("ssm_conv1d.weight"),
            conv_bias=self.vector("ssm_conv1d.bias"),
            states=states,
            output=self.matrix("ssm_out"),
            scale=scale,
        )

    def _named(self, *names: str) -> list[str]:
        return [f"blk.{self.index}.{name}" for name in names]


def load_layer(
    checkpoint: Checkpoint, blueprint: Blueprint, backend: WeightLoader, index: int
) -> Layer:
    """The weights of layer `index`."""
    expected = layer_tensors(blueprint, index)
    tensors = _Tensors(checkpoint, blueprint, backend, index, expected)
    vector = tensors.vector
    norm = tensors.norm
    matrix = tensors.matrix
    mixers = [tensors.attention()] if blueprint.attends(index) else []
    if index in blueprint.recurrent_layers:
        mixers.append(tensors.recurrence())
    has_ffn = blueprint.has_ffn(index)
    experts = blueprint.experts_of(index)
    down = "ffn_down_exps" if experts else "ffn_down"
    names = gate_up(blueprint)
    shared = None
    if experts:
        names = EXPERTS_GATE_UP[experts.fused_gate_up]
    if experts and experts.shared_size:
        shared = SharedExpert(
            gate_up=matrix(*SHARED_GATE_UP[experts.fused_shared]),
            down=matrix("ffn_down_shexp"),
            gate=vector("ffn_gate_inp_shexp.weight"),
        )
    embedding = None
    if blueprint.layer_embedding_size:
        embedding = LayerEmbedding(
            gate=matrix("inp_gate"), projection=matrix("proj"), norm=vector("post_norm.weight")
        )
    return Layer(
        attn_norm=norm("attn_norm") if mixers else None,
        mixers=tuple(mixers),
        attn_post_norm=norm("post_attention_norm") if blueprint.norm_after else None,
        ffn_norm=norm(blueprint.ffn_norm) if has_ffn else None,
        router=matrix("ffn_gate_inp") if experts else None,
        router_bias=vector("ffn_gate_inp.bias"),
        choice_bias=vector("exp_probs_b.bias"),
        shared=shared,
        gate_up=matrix(*names) if has_ffn else None,
        gate_up_bias=vector(*(f"{name}.bias" for name in names)),
        down=matrix(down) if has_ffn else None,
        down_bias=vector(f"{down}.bias"),
        ffn_post_norm=norm("post_ffw_norm"),
        embedding=embedding,
        scale=vector("layer_output_scale.weight"),
    )
