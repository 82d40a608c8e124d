"""Loads the draft model of the proposer `draft_model` beside its target."""

from __future__ import annotations

from dataclasses import replace

from twinphase.config import EngineConfig
from twinphase.engine.engine import Engine
from twinphase.engine.runner import Runner
from twinphase.errors import InvalidRequestError
from twinphase.models.loader import open_model, read_blueprint
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.draft_model_policy import DraftModelPolicy
from twinphase.speculation.speculator import Speculator
from twinphase.tokenizer.agreement import first_difference
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.hub import resolve_model


def open_draft_model(model: str, target: Checkpoint, quantization: str) -> Checkpoint:
    """Open a model that can draft for `target`.

    Args:
        model: a name or path, as of any model.
        target: the model to draft for.
        quantization: that of the target; a folder is quantized in the same way.

    Raises:
        InvalidRequestError: it has recurrent layers, or its vocabulary is another one; the message
            names the first token that differs.
        TwinphaseError: as for any model.
    """
    path = resolve_model(model)
    checkpoint = open_model(path, quantization=quantization if path.is_dir() else "none")
    if read_blueprint(checkpoint).recurrent_layers:
        raise InvalidRequestError(
            f"{path.name} cannot be a draft model: it has recurrent layers, whose state does "
            "not go back where a draft is rejected.",
            "Use a draft model whose layers all attend.",
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
    """The configuration of a draft model's engine, from the resolved one of its target."""
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
    """The draft model that an engine of `draft_config` computes.

    It drafts up to `num_speculative_tokens` tokens of a request in a step of `target`.
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
    """Have one engine's model draft for another engine, which speculates already."""
    if not isinstance(target.drafter, Speculator):
        raise TypeError("the engine has no speculator")
    model = make_draft_model(draft, target, num_speculative_tokens)
    target.drafter.draft_model = DraftModelPolicy(model, target.cost_model)
