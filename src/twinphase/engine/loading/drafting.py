"""Loads draft models and multi-token prediction layers."""

from __future__ import annotations

from dataclasses import replace

from twinphase.backends.base import Backend, KVCacheSpec
from twinphase.blueprint import Blueprint
from twinphase.config import EngineConfig
from twinphase.engine.engine import Engine
from twinphase.engine.mtp_runner import MtpRunner
from twinphase.engine.runner import Runner
from twinphase.errors import InvalidRequestError
from twinphase.models.decoder import Decoder
from twinphase.models.loader import open_model, read_blueprint
from twinphase.models.mtp import MtpHead, mtp_problem
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.draft_model_policy import DraftModelPolicy
from twinphase.speculation.mtp import Mtp
from twinphase.speculation.speculator import Speculator
from twinphase.speculative import MOST_DRAFTED, USUAL_BY_MTP, SpeculativeConfig
from twinphase.tokenizer.agreement import first_difference
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.hub import resolve_model


def drafts_by_mtp(config: SpeculativeConfig, checkpoint: Checkpoint, target: Blueprint) -> bool:
    """Whether the model's own multi-token prediction (MTP) layer drafts.

    Raises:
        InvalidRequestError: the configuration asks for the layer, and the model has none.
    """
    if config.method not in ("auto", "mtp"):
        return False
    problem = mtp_problem(checkpoint, target)
    if problem is not None and config.method == "mtp":
        raise InvalidRequestError(
            f"speculative_config has the method 'mtp', but: {problem}", "Use auto, or ngram."
        )
    return problem is None


def load_mtp(
    target: Decoder,
    checkpoint: Checkpoint,
    backend: Backend,
    config: EngineConfig,
    speculation: SpeculativeConfig,
) -> Mtp:
    """The target's MTP layer on a new `backend`; `config` is resolved."""
    limit = config.max_model_len or target.blueprint.context_length
    head = MtpHead(target, checkpoint, backend, limit, MOST_DRAFTED)
    blocks = config.num_kv_blocks or 1
    backend.allocate_kv_cache(KVCacheSpec.of(head.blueprint, blocks, config.block_size))
    tokens = speculation.num_speculative_tokens
    return Mtp(
        MtpRunner(head, backend, config.block_size),
        num_layers=target.blueprint.num_layers,
        num_tokens=tokens if speculation.method == "mtp" else USUAL_BY_MTP,
        num_blocks=blocks,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )


def open_draft_model(model: str, target: Checkpoint, quantization: str) -> Checkpoint:
    """Open a model that can draft for `target`.

    Args:
        model: name or path of the draft model.
        target: the model to draft for.
        quantization: quantization of the target, which is applied to a folder of the draft model
            too.

    Raises:
        InvalidRequestError: the model has recurrent layers, or another vocabulary; the message
            names the first token that differs.
        TwinphaseError: the model cannot be found or read.
    """
    path = resolve_model(model)
    checkpoint = open_model(path, quantization=quantization if path.is_dir() else "none")
    if read_blueprint(checkpoint).recurrent_layers:
        raise InvalidRequestError(
            f"{path.name} cannot be a draft model: it has recurrent layers, whose state "
            "cannot be restored after a rejected draft.",
            "Use a draft model with attention in all layers.",
        )
    difference = first_difference(
        Tokenizer.from_checkpoint(target), Tokenizer.from_checkpoint(checkpoint)
    )
    if difference is not None:
        raise InvalidRequestError(
            f"{path.name} cannot draft for {target.path.name}, their vocabularies "
            f"differ: {difference}.",
            "Use a draft model of the same family.",
        )
    return checkpoint


def draft_config(target: EngineConfig, model: Checkpoint) -> EngineConfig:
    """The configuration of a draft model's engine, derived from its target's resolved one."""
    context = read_blueprint(model).context_length
    return replace(
        target,
        max_model_len=min(target.max_model_len or context, context),
        trace_file=None,
        speculative_config=None,
        itl_slo_ms=None,
        tensor_parallel_size=1,
    )


def make_draft_model(draft: Engine, target: Engine, num_speculative_tokens: int) -> DraftModel:
    """Make a draft model from an engine with a `draft_config`.

    It drafts up to `num_speculative_tokens` tokens per request and step of `target`.
    """
    eos_token_ids = target.scheduler.eos_token_ids
    if isinstance(draft.executor, Runner):
        draft.executor.eos_token_ids = tuple(eos_token_ids)
    return DraftModel(
        draft.executor.execute,
        draft.scheduler.kv_cache,
        draft.cost_model,
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=draft.vocab_size,
        max_model_len=draft.scheduler.max_model_len,
        max_num_batched_tokens=draft.scheduler.config.max_num_batched_tokens,
        eos_token_ids=eos_token_ids,
        slo_seconds=lambda: target.scheduler.pace.slo_seconds,
    )


def add_draft_model(target: Engine, draft: Engine, num_speculative_tokens: int) -> None:
    """Make one engine's model draft for another engine that already speculates."""
    if not isinstance(target.drafter, Speculator):
        raise TypeError("the engine has no speculator")
    model = make_draft_model(draft, target, num_speculative_tokens)
    target.drafter.draft_model = DraftModelPolicy(model, target.cost_model)
