"""The `Backend` protocol over torch tensors, on a processor or a GPU, in plain torch operations.

Weights are dequantized once, to the element type; keys and values are kept in it. What is summed
over many layers or tokens stays float32: the hidden states between layers, norms, rotations,
softmax and logits. Not for kernels of our own, whose oracle this is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinphase.backends.base import (
    Array,
    Forward,
    KVCacheSpec,
    SampledRows,
    SamplingPlan,
    StepInputs,
)
from twinphase.backends.group import Group
from twinphase.backends.kv_frames import is_finite, kv_fingerprint, pack_frames, unpack_frames
from twinphase.backends.rope_tables import query_scales, rope_tables
from twinphase.backends.states import NoRecurrence, refuse_unlike_layers
from twinphase.backends.torch.collective import Collective
from twinphase.backends.torch.device import (
    bind,
    find_device,
    find_dtype,
    mark,
    pinned,
    seconds_between,
)
from twinphase.backends.torch.experts import gate_and_up, mixture
from twinphase.backends.torch.graphs import Graph, Graphs, cuda_graphs
from twinphase.backends.torch.parts import execute_in_parts
from twinphase.backends.torch.plain import attention, capped, gated, product, rotated
from twinphase.backends.torch.sampling import sample
from twinphase.blueprint import Blueprint, KVShape, Rope, Span
from twinphase.errors import OutOfMemoryError
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize

# Kernels are compiled for arrays that are aligned to 16 bytes.
ALIGNMENT_INT64S = 2
RopeTables = tuple[Tensor, Tensor, bool, Tensor | None]


class TorchBackend(NoRecurrence):
    """A backend of plain torch. All that a step reads lives on the device, except its inputs."""

    name = "torch"
    kernels = ""  # identifies kernels that are not torch's
    dequantize = True  # while loading
    block_multiple = 1
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    group: Group | None = None
    _collective: Collective | None = None

    def __init__(
        self,
        device: str | None = None,
        dtype: str = "auto",
        threads: int | None = None,
        enforce_eager: bool = False,
    ) -> None:
        """`threads` are those of torch in this process, where the device is the processor.

        Raises:
            InvalidRequestError: the device does not exist.
        """
        self.device_sampler = self
        self.device = find_device(device)
        self.dtype = find_dtype(dtype, self.device)
        self.wide = torch.promote_types(self.dtype, torch.float32)  # of sums
        cuda = self.device.type == "cuda" and not enforce_eager
        self.make_graph: Callable[[], Graph] | None = cuda_graphs() if cuda else None
        self.graphs: Graphs | None = None
        self._captured_context: int | None = None  # tokens, while a step is captured
        self._kept: list[Tensor] = []
        self._wanted: dict[str, int] = {}  # bytes by purpose
        if threads is not None:
            torch.set_num_threads(threads)

    # Weights.
    def prepare(
        self, checkpoint: Checkpoint, blueprint: Blueprint, forward_on: Callable[..., Forward]
    ) -> None:
        """Remember what the model is made of, unless its layers are of several kinds."""
        refuse_unlike_layers(checkpoint, blueprint, self.name)
        self.blueprint = blueprint
        self._checkpoint = checkpoint
        self._embedding: tuple[str, Any] | None = None

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Array:
        """[outputs, inputs] in the element type; a head tied to the embedding shares its memory."""
        if self._embedding is not None and list(names) == [self._embedding[0]]:
            return self._embedding[1]
        return self._put(checkpoint, names, 0, self.dtype)

    exact_matrix = matrix

    def experts(self, checkpoint: Checkpoint, names: Sequence[str]) -> Array:
        """[experts, outputs, inputs] in the element type."""
        return self._put(checkpoint, names, 1, self.dtype)

    def vector(self, checkpoint: Checkpoint, names: Sequence[str], plus: float = 0.0) -> Tensor:
        """Tensors side by side, float32 of their shape."""
        return self._put(checkpoint, names, -1, self.wide) + plus

    def embedding(self, checkpoint: Checkpoint, name: str) -> Array:
        """[vocab_size, hidden_size] in the element type."""
        table = self._put(checkpoint, [name], 0, self.dtype)
        self._embedding = name, table
        return table

    def _put(
        self, checkpoint: Checkpoint, names: Sequence[str], axis: int, dtype: torch.dtype
    ) -> Tensor:
        infos = [checkpoint.tensors[name] for name in names]
        with self._weight_memory(checkpoint):
            parts = [dequantize(checkpoint.raw(info.name), info.shape, info.type) for info in infos]
            return torch.cat(
                [torch.from_numpy(part).to(self.device, dtype) for part in parts], axis
            )

    def _weight_memory(self, checkpoint: Checkpoint) -> AbstractContextManager[None]:
        tensors = checkpoint.tensors.values()
        wide = self.dtype.itemsize > 2
        packed = self.kernels and not self.dequantize
        wanted = sum(
            info.nbytes if packed else math.prod(info.shape) * self.dtype.itemsize
            for info in tensors
        )
        return self._memory(
            "weights",
            wanted,
            "Use a smaller model" + (", or --dtype float16 or bfloat16." if wide else "."),
        )

    @contextmanager
    def _memory(self, purpose: str, nbytes: int, fix: str) -> Iterator[None]:
        """Turns torch's errors of lacking memory into ours; `purpose` takes `nbytes` in all."""
        self._wanted[purpose] = nbytes
        try:
            yield
        except RuntimeError as error:
            # On a processor torch raises a plain RuntimeError.
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if not out_of_memory and "allocate memory" not in str(error):
                raise
            dtype = str(self.dtype).removeprefix("torch.")
            others = [
                f"the {name} ({size / 1e9:.1f} GB)"
                for name, size in self._wanted.items()
                if name != purpose
            ]
            beside = f", beside {' and '.join(others)}" if others else ""
            size = f"{nbytes / 1e9:.1f} GB in {dtype} on {self.device}{beside}"
            raise OutOfMemoryError(f"No memory for the {purpose}: {size}.", fix) from None

    def rope(self, rope: Rope, max_positions: int) -> RopeTables:
        """Cosines, sines, whether pairs are interleaved, and scales of the queries."""
        cos, sin = (
            torch.from_numpy(table).to(self.device) for table in rope_tables(rope, max_positions)
        )
        scales = query_scales(rope, max_positions)
        on_device = None if scales is None else torch.from_numpy(scales).to(self.device)
        return cos, sin, rope.interleaved, on_device

    # KV cache.
    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """[layers, 2, blocks, block_size, kv_heads, head_dim], keys and then values."""
        # One block more, for the rows that pad a captured step.
        shape = (
            spec.num_layers,
            2,
            spec.num_blocks + 1,
            spec.block_size,
            spec.shape.num_heads,
            spec.shape.head_dim,
        )
        self.kv_spec = spec
        nbytes = self.kv_bytes_per_token() * spec.num_blocks * spec.block_size
        with self._memory(
            "KV cache", nbytes, "Lower --num-kv-blocks, --max-model-len or --max-num-seqs."
        ):
            self.kv = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.slots = self.kv.view(spec.num_layers, 2, -1, *shape[4:])

    def kv_bytes_per_token(
        self, dtype: str | None = None, layers: Sequence[KVShape] | None = None
    ) -> int:
        """The sum of 2 H_kv d b over layers, with b the bytes of the element type."""
        size = self.dtype.itemsize
        return sum(2 * s.num_heads * s.head_dim * size for s in layers or self.kv_spec.layers)

    @cached_property
    def kv_fingerprint(self) -> str:
        """Torch's version and the device stand for the order of sums."""
        cuda = self.device.type == "cuda"
        device = (
            torch.cuda.get_device_name(self.device)
            if cuda
            else torch.backends.cpu.get_cpu_capability()
        )
        facts = {
            "backend": self.name,
            "torch": torch.__version__,
            "device": device,
            "dtype": str(self.dtype),
        }
        facts |= {"kernels": self.kernels, "dequantized": str(self.dequantize)}
        if self.group is not None and not self.kernels and (cuda or self.dtype.itemsize < 4):
            # Their products have other shapes, and other orders of sums.
            facts["ranks"] = str(self.group.ranks)
        return kv_fingerprint(self._checkpoint, self.blueprint, self.kv_spec, **facts)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """[layers, 2, block_size, kv_heads, head_dim] in the element type each."""
        blocks = self.kv[:, :, list(block_ids)].movedim(2, 0).contiguous().view(torch.uint8)
        # One copy to pinned memory, which the device writes by itself.
        host = torch.empty(
            blocks.shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        ).copy_(blocks)
        return pack_frames(self.kv_fingerprint, host.numpy().reshape(len(blocks), -1))

    def write_blocks(self, block_ids: Sequence[int], frames: Sequence[bytes | memoryview]) -> None:
        nbytes = self.kv_bytes_per_token() * self.kv_spec.block_size
        rows = unpack_frames(self.kv_fingerprint, frames, nbytes)
        layers, both, _, *block = self.kv.shape
        blocks = (
            pinned(rows, self.device)
            .to(self.device)
            .view(self.dtype)
            .view(len(rows), layers, both, *block)
        )
        self.kv[:, :, list(block_ids)] = blocks.movedim(0, 2)

    def frame_parts(self) -> list[tuple[int, int, int]]:
        spec = self.kv_spec
        rows = 2 * spec.num_layers * spec.block_size
        return [(0, rows, spec.shape.head_dim * self.dtype.itemsize)]

    def has_finite_numbers(self, frame: bytes | bytearray | memoryview) -> bool:
        return is_finite(frame, str(self.dtype).removeprefix("torch."))

    # One step.
    def execute(self, forward: Forward, inputs: StepInputs) -> NDArray[np.float32]:
        self.launch(forward, inputs)
        logits: NDArray[np.float32] = self.logits.float().cpu().numpy()
        return logits

    execute_in_parts = execute_in_parts  # for measuring

    def launch(self, forward: Forward, inputs: StepInputs) -> None:
        """Replay a captured step, or run its operations; logits stay on the device."""
        bind(self.device)
        start = mark(self.device)
        self._kept = list[Tensor]()
        self.inputs = inputs
        with self._step_memory():
            captured = self.graphs.find(inputs) if self.graphs is not None else None
            if captured is None:
                self._upload(self._arrays(inputs))
                self.logits: Tensor = forward(self)
            else:
                captured.buffer.copy_(
                    self._flat(self._arrays(captured.padded(inputs))), non_blocking=True
                )
                captured.graph.replay()
                self.logits = captured.logits[: inputs.num_tokens]
                self._kept = [x[: inputs.num_tokens] for x in captured.kept]
        self._times = start, mark(self.device)

    def capture(
        self,
        forward: Forward,
        max_num_seqs: int,
        max_model_len: int,
        progress: Callable[[float, int, str], None] | None,
    ) -> None:
        """Capture decode steps, unless something in `forward` needs the host."""
        bind(self.device)
        if self.make_graph is None or (self.blueprint.experts is not None and not self.kernels):
            return  # plain torch asks the host which rows each expert has
        graphs = Graphs(self.kv_spec, max_num_seqs, max_model_len)
        self.inputs = graphs.sizes[0].padded(None)
        tell = progress or (lambda *_: None)
        fix = "Use --enforce-eager, or lower --num-kv-blocks or --max-num-seqs."
        with (
            torch.inference_mode(),
            self._memory("graphs", graphs.sizes[0].rows * self._row_bytes, fix),
        ):
            for done, size in enumerate(graphs.sizes):
                tell(done, len(graphs.sizes), f"graph of {size.rows} rows")
                self.inputs = size.padded(None)
                self._captured_context = size.context
                size.buffer = self._upload(self._arrays(self.inputs))
                forward(self)  # loads what it needs, which may not happen while capturing
                size.graph = self.make_graph()
                self._kept = []
                size.logits = size.graph.capture(lambda: forward(self))
                size.kept = self._kept
                self._kept = []
        self.graphs = graphs
        self._captured_context = None
        tell(len(graphs.sizes), len(graphs.sizes), "graphs")

    def sample(self, plan: SamplingPlan) -> SampledRows:
        start = mark(self.device)
        with self._step_memory():
            sampled = sample(self.logits.to(self.wide), plan)
        seconds = seconds_between(start, mark(self.device))
        return replace(
            sampled, forward_seconds=seconds_between(*self._times), sampling_seconds=seconds
        )

    @contextmanager
    def _step_memory(self) -> Iterator[None]:
        wanted = self.inputs.num_tokens * self._row_bytes
        with (
            torch.inference_mode(),
            self._memory("step", wanted, "Lower --max-num-batched-tokens."),
        ):
            yield

    @property
    def _row_bytes(self) -> int:
        """Roughly the widest layer in float32, its result, and its logits."""
        b = self.blueprint
        return 4 * (4 * b.ffn_size + 2 * b.hidden_size + b.vocab_size)

    def _arrays(self, inputs: StepInputs) -> dict[str, NDArray[np.signedinteger]]:
        """What a step reads on the device besides weights and cache, by name."""
        names = "token_ids", "positions", "slot_mapping", "logit_rows", "block_tables"
        return {name: getattr(inputs, name) for name in names}

    def _upload(self, arrays: dict[str, NDArray[np.signedinteger]]) -> Tensor:
        """The arrays as int64 tensors of `step`, which are parts of the one that comes back."""
        buffer = self._flat(arrays).to(self.device, non_blocking=True)
        self.step = dict[str, Tensor]()
        start = 0
        for name, array in arrays.items():
            self.step[name] = buffer[start : start + array.size].view(array.shape)
            start += -(-array.size // ALIGNMENT_INT64S) * ALIGNMENT_INT64S
        return buffer

    def _flat(self, arrays: dict[str, NDArray[np.signedinteger]]) -> Tensor:
        """All arrays in one, so that one copy takes them to the device."""
        parts = [
            np.pad(array.ravel(), (0, -array.size % ALIGNMENT_INT64S)) for array in arrays.values()
        ]
        return pinned(np.concatenate(parts, dtype=np.int64), self.device)

    def kept(self) -> list[NDArray[np.float32]]:
        return [x.to("cpu", torch.float32, copy=True).numpy() for x in self._kept]

    def keep(self, x: Tensor) -> None:
        """Keep the rows on the device until `kept` is called."""
        self._kept.append(x)

    def embed(self, table: Array, scale: float = 1.0) -> Tensor:
        """Rows of the table, scaled, float32."""
        rows: Tensor = table[self.step["token_ids"]]
        return rows.to(self.wide) * scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight in float32, given in the element type."""
        return self._norm(x, weight, eps).to(self.dtype)

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.to(self.wide)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def linear(
        self,
        x: Tensor,
        weight: Array,
        *,
        residual: Tensor | None = None,
        first: int = 0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x @ weight.T + residual + bias; float32 if something is added, else the element type."""
        out = product(x.to(self.dtype), weight)
        residual = None if residual is None else residual[:, first : first + out.shape[1]]
        for term in (residual, bias):
            if term is not None:
                out = out.to(self.wide) + term
        return out

    def gather(self, x: Tensor, span: Span | None) -> Tensor:
        if span is None:
            return x
        self._collective = self._collective or Collective(self.group, self.device)
        return self._collective.gather(x, span)

    def add(self, x: Tensor, h: Tensor, scale: float = 1.0) -> Tensor:
        """x + scale * h, float32."""
        return x + scale * h.to(self.wide)

    def add_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, scale: float = 1.0, **more: None
    ) -> Tensor:
        """x + scale * rms_norm(h), float32."""
        return self.add(x, self._norm(h, weight, eps), scale)

    def rope_kv_write(
        self,
        qkv: Tensor,
        rope: RopeTables | None,
        layer: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        """Normalize, rotate, write the cache, return queries [num_tokens, num_heads, head_dim]."""
        b = self.blueprint
        q, k, v = torch.split(
            qkv.view(len(qkv), -1, b.head_dim), [b.num_heads, b.num_kv_heads, b.num_kv_heads], 1
        )
        q = q.to(self.wide)
        k = k.to(self.wide)
        if q_norm is not None and k_norm is not None:
            q, k = map(self._normalize, (q, k), (q_norm, k_norm), b.norm_spans)
        if rope is not None:
            cos, sin = (table[self.step["positions"]][:, None, :] for table in rope[:2])
            q, k = (rotated(x, cos, sin, rope[2]) for x in (q, k))
            if rope[3] is not None:
                q = q * rope[3][self.step["positions"]][:, None, None]
        slots = self.step["slot_mapping"]
        self.slots[layer, 0, slots] = k.to(self.dtype)
        self.slots[layer, 1, slots] = v.to(self.dtype)
        return q.to(self.dtype)

    def _normalize(self, x: Tensor, weight: Tensor, span: Span | None) -> Tensor:
        """RMSNorm of heads of x [rows, heads, head_dim], or of rows as wide as the weight.

        A rank has the columns of `span`.
        """
        rows = (
            x.reshape(len(x), -1, len(weight)) if span is None else self.gather(x.flatten(1), span)
        )
        out = self._norm(rows, weight, self.blueprint.norm_eps)
        return (out if span is None else out[:, span.first : span.first + span.size]).view(x.shape)

    def attention(
        self, q: Tensor, layer: int, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """softmax(scale * q k^T) v, causal and within the window, over gathered keys and values.

        Sequences that decode one row each are computed together, others one by one.
        """
        starts = self.inputs.query_start[:-1].tolist()
        ends = self.inputs.query_start[1:].tolist()
        count = self.inputs.num_decodes
        together = count if count and ends[count - 1] == count else 0
        tables = self.step["block_tables"]
        positions = self.step["positions"]
        out = torch.empty_like(q)
        b = self.blueprint
        size = self.kv_spec.block_size
        cache = self.slots[layer], size, b.scale, b.attention_softcap, window, sinks
        if together:
            rows = slice(together)
            width = tables.shape[1] * size
            out[rows] = attention(
                q[rows, None], positions[rows, None], tables[rows], width, *cache
            )[:, 0]
        for sequence in range(together, len(ends)):
            rows = slice(starts[sequence], ends[sequence])
            length = int(self.inputs.context_lens[sequence])
            own = tables[sequence : sequence + 1]
            out[rows] = attention(q[None, rows], positions[None, rows], own, length, *cache)[0]
        return out.flatten(1)

    def gate_mul(self, gate_up: Tensor, up: None = None, first: int = 0) -> Tensor:
        """activation(gate) * up in float32, given in the element type."""
        return gated(gate_up.to(self.wide), self.blueprint.activation).to(self.dtype)

    gated_linear: Callable[..., Tensor] = gate_and_up
    moe: Callable[..., Tensor] = mixture

    def logit_rows(self, x: Tensor) -> Tensor:
        """The wanted rows."""
        return x[self.step["logit_rows"]]

    def cap_logits(self, logits: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Scaled, then capped, float32."""
        logits = logits.to(self.wide) * scale
        return logits if softcap is None else capped(logits, softcap)
