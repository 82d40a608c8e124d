"""Loads the model of the proposer `draft_model`, as any model is, beside the one that it drafts for."""

from __future__ import annotations

from dataclasses import asdict, replace

from twinphase.engine.loading import LoadedEngine
from twinphase.engine.runner import Runner
from twinphase.errors import InvalidRequestError
from twinphase.models.loader import open_model, read_blueprint
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.speculator import Speculator
from twinphase.speculation.writing import Writing
from twinphase.tokenizer.agreement import first_difference
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.hub import resolve_model

__all__ = ["add_draft_model", "load_draft_model"]


def add_draft_model(target: LoadedEngine, model: str, num_speculative_tokens: int) -> None:
    """Have `model` draft for `target`, whose engine speculates already; see `load_draft_model`."""
    drafter, engine = target.engine.drafter, target.engine
    if not isinstance(drafter, Speculator):
        raise TypeError("the engine has nobody to ask a draft model")
    loaded = load_draft_model(model, num_speculative_tokens, target)
    drafter.writing = Writing(loaded, engine.cost_model.seconds, engine.shape.window)


def load_draft_model(model: str, num_speculative_tokens: int, target: LoadedEngine) -> DraftModel:
    """A model that drafts for `target`, with as many KV blocks as that has.

    Args:
        model: a name or path, as of any model; a folder is quantized as the target is.
        num_speculative_tokens: most drafts of a request in a step.
        target: loaded.

    Raises:
        InvalidRequestError: its vocabulary is another one; the message names the first token that differs.
        TwinphaseError: as for any model.
    """
    path = resolve_model(model)
    checkpoint = open_model(path, quantization=target.config.quantization if path.is_dir() else "none")
    blueprint, tokenizer = read_blueprint(checkpoint), target.text.tokenizer
    difference = first_difference(tokenizer, Tokenizer.from_checkpoint(checkpoint))
    if difference is not None:
        raise InvalidRequestError(
            f"{path.name} cannot draft for {target.checkpoint.path.name}, their vocabularies differ: {difference}.",
            "Use a draft model of the same family.",
        )
    length = min(target.config.max_model_len or blueprint.context_length, blueprint.context_length)
    config = replace(target.config, max_model_len=length, trace_file=None, speculative_config=None, itl_slo_ms=None)
    engine = LoadedEngine(checkpoint, **asdict(config)).engine
    if isinstance(engine.executor, Runner):
        engine.executor.eos_token_ids = tuple(tokenizer.eos_token_ids)  # what ends an output, the target says
    return DraftModel(
        engine.executor.execute,
        engine.scheduler.kv_cache,
        engine.cost_model,
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=engine.vocab_size,
        max_model_len=length,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=tokenizer.eos_token_ids,
        itl_slo_ms=target.config.slo_number,
    )
