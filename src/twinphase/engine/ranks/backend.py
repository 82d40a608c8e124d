"""Tensor parallelism: a model computed by several processes; rank 0 is the engine's own.

Every rank has a share of each layer and the KV cache of its heads; to an engine they are one
backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import (
    Backend,
    Forward,
    KVCacheSpec,
    SampledRows,
    SamplingPlan,
    StepInputs,
)
from twinphase.backends.kv_frames import pack_frames, unpack_frames
from twinphase.blueprint import Blueprint, KVShape, Span
from twinphase.config import EngineConfig
from twinphase.engine.ranks.messages import Read, Step, Write
from twinphase.engine.ranks.ranks import Ranks
from twinphase.models.decoder import Decoder
from twinphase.models.loader import load_model
from twinphase.models.share import kv_spans, share_of
from twinphase.numa import bound_to
from twinphase.weights.checkpoint import Checkpoint


def load_on_ranks(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    config: EngineConfig,
    backend: Backend,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Decoder, Backend]:
    """Load a model on the ranks of a resolved `config`: rank 0's model, all ranks' backend.

    Raises:
        TwinphaseError: as `load_model`, on any rank.
    """
    count = config.tensor_parallel_size
    if count == 1:
        return load_model(checkpoint, backend, config.max_model_len, progress, blueprint), backend
    mine, share = share_of(checkpoint, blueprint, 0, count)
    ranks = Ranks(checkpoint, blueprint, config)
    backend.group = ranks.group
    try:
        with bound_to(ranks.cores):
            model = load_model(mine, backend, config.max_model_len, progress, share)
    except BaseException:
        ranks.close()
        raise
    everyone: Any = _RankedBackend(backend, ranks, model)
    return model, everyone


class _RankedBackend:
    """One backend that computes on all ranks; other attributes are those of rank 0's backend."""

    def __init__(self, local: Backend, ranks: Ranks, model: Decoder) -> None:
        self._local = local
        self._ranks = ranks
        self._model = model
        self.rank_wait = 0.0  # Seconds that rank 0 waited for others in the last step.
        whole = model.blueprint.whole
        count = ranks.group.ranks
        self._layers = whole.kv_shapes
        # KV heads of each rank and group of layers.
        self._heads = [list(kv_spans(whole, rank, count).values()) for rank in range(count)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """Allocate rank 0's KV cache; the others have theirs when they are ready."""
        try:
            with bound_to(self._ranks.cores):
                self._local.allocate_kv_cache(spec)
        except BaseException:
            self._ranks.close()
            raise
        self._ranks.wait_until_ready()

    def kv_bytes_per_token(
        self, dtype: str | None = None, layers: Sequence[KVShape] | None = None
    ) -> int:
        """Bytes of all KV heads per token."""
        return self._local.kv_bytes_per_token(dtype, layers or self._layers)

    def _run(
        self, compute: Callable[[Forward, StepInputs], Any], forward: Forward, inputs: StepInputs
    ) -> Any:
        """A step on all ranks.

        Raises:
            EngineDeadError: a rank is missing, or this one failed; nothing can be computed any
                more.
        """
        self._ranks.tell(Step.of(inputs, self._model.kept))
        waited = self._ranks.group.waits()[0]
        self._ranks.step_begins()
        try:
            with bound_to(self._ranks.cores):  # The threads of the first step stay there.
                result = compute(forward, inputs)
        except Exception as error:
            self._ranks.check()  # An error that names the missing rank is more useful.
            raise self._ranks.given_up(error) from error
        except BaseException:
            self._ranks.close()
            raise
        finally:
            self._ranks.step_ends()
        self._ranks.check()
        self.rank_wait = self._ranks.group.waits()[0] - waited
        return result

    def execute(self, forward: Forward, inputs: StepInputs) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._run(self._local.execute, forward, inputs)
        return logits

    @property
    def device_sampler(self) -> Any:
        return None if self._local.device_sampler is None else self

    def launch(self, forward: Forward, inputs: StepInputs) -> None:
        assert self._local.device_sampler is not None
        self._run(self._local.device_sampler.launch, forward, inputs)

    def sample(self, plan: SamplingPlan) -> SampledRows:
        assert self._local.device_sampler is not None
        return self._local.device_sampler.sample(plan)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Read the frames that a single rank would give."""
        self._ranks.tell(Read(list(block_ids)))
        frames = [self._local.read_blocks(block_ids), *self._ranks.blocks()]
        fingerprint = self._local.kv_fingerprint
        whole = np.empty((len(block_ids), self._nbytes(self._totals)), np.uint8)
        for spans, theirs in zip(self._heads, frames, strict=True):
            sizes = [span.size for span in spans]
            found = unpack_frames(fingerprint, theirs, self._nbytes(sizes))
            for to, part in zip(self._views(whole, spans), self._parts(found, sizes), strict=True):
                to[:] = part
        return pack_frames(fingerprint, whole)

    def write_blocks(self, block_ids: Sequence[int], frames: Sequence[bytes | memoryview]) -> None:
        """Write each rank's heads on that rank."""
        fingerprint = self._local.kv_fingerprint
        whole = unpack_frames(fingerprint, frames, self._nbytes(self._totals))
        self._ranks.check()
        for rank, spans in enumerate(self._heads):
            sizes = [span.size for span in spans]
            mine = np.empty((len(whole), self._nbytes(sizes)), np.uint8)
            for to, part in zip(self._parts(mine, sizes), self._views(whole, spans), strict=True):
                to[:] = part
            packed = pack_frames(fingerprint, mine)
            if rank == 0:
                self._local.write_blocks(block_ids, packed)
            else:
                self._ranks.tell_one(rank, Write(list(block_ids), packed))

    @property
    def _totals(self) -> list[int]:
        """KV heads of each group of layers."""
        return [span.total for span in self._heads[0]]

    def _nbytes(self, heads: Sequence[int]) -> int:
        return sum(rows * heads[group] * size for group, rows, size in self._local.frame_parts())

    def _parts(self, blocks: NDArray[np.uint8], heads: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Views [blocks, rows, heads, bytes] of blocks with `heads` heads in each group."""
        views = []
        start = 0
        for group, rows, size in self._local.frame_parts():
            end = start + rows * heads[group] * size
            views.append(blocks[:, start:end].reshape(len(blocks), rows, heads[group], size))
            start = end
        return views

    def _views(self, whole: NDArray[np.uint8], spans: Sequence[Span]) -> list[NDArray[np.uint8]]:
        """Views of a rank's heads in blocks of all heads."""
        parts = zip(self._local.frame_parts(), self._parts(whole, self._totals), strict=True)
        mine = ((spans[group], part) for (group, _, _), part in parts)
        return [part[:, :, span.first : span.first + span.size] for span, part in mine]
