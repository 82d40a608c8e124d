"""Loads the model of the proposer `draft_model`, as any model is, beside the one that it drafts for."""

from __future__ import annotations

from dataclasses import replace

from twinphase.engine.loading.loading import LoadedEngine
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


def open_draft_model(model: str, target: LoadedEngine) -> Checkpoint:
    """A model that can draft for `target`, of which the weights need not be loaded yet.

    Args:
        model: a name or path, as of any model; a folder is quantized as the target is.
        target: with its checkpoint, configuration and tokenizer.

    Raises:
        InvalidRequestError: its vocabulary is another one; the message names the first token that
            differs.
        TwinphaseError: as for any model.
    """
    path = resolve_model(model)
    checkpoint = open_model(
        path, quantization=target.config.quantization if path.is_dir() else "none"
    )
    read_blueprint(checkpoint)  # refuses what cannot write
    difference = first_difference(target.text.tokenizer, Tokenizer.from_checkpoint(checkpoint))
    if difference is not None:
        raise InvalidRequestError(
            f"{path.name} cannot draft for {target.checkpoint.path.name}, their vocabularies "
            f"differ: {difference}.",
            "Use a draft model of the same family.",
        )
    return checkpoint


def add_draft_model(
    target: LoadedEngine, checkpoint: Checkpoint, num_speculative_tokens: int
) -> None:
    """Have an opened model draft for `target`, whose engine speculates already."""
    drafter = target.engine.drafter
    engine = target.engine
    if not isinstance(drafter, Speculator):
        raise TypeError("the engine has nobody to ask a draft model")
    loaded = load_draft_model(checkpoint, num_speculative_tokens, target)
    drafter.draft_model = DraftModelPolicy(loaded, engine.cost_model.seconds, engine.shape.window)


def load_draft_model(
    model: Checkpoint, num_speculative_tokens: int, target: LoadedEngine
) -> DraftModel:
    """The model that `open_draft_model` opened, with as many KV blocks as `target` has.

    It drafts up to `num_speculative_tokens` tokens of a request in a step.
    """
    context = read_blueprint(model).context_length
    eos_token_ids = target.text.tokenizer.eos_token_ids
    length = min(target.config.max_model_len or context, context)
    config = replace(
        target.config,
        max_model_len=length,
        trace_file=None,
        speculative_config=None,
        itl_slo_ms=None,
        tensor_parallel_size=1,
    )
    engine = LoadedEngine(model, config).engine
    if isinstance(engine.executor, Runner):
        engine.executor.eos_token_ids = tuple(eos_token_ids)  # what ends an output, the target says
    return DraftModel(
        engine.executor.execute,
        engine.scheduler.kv_cache,
        engine.cost_model,
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=engine.vocab_size,
        max_model_len=length,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=eos_token_ids,
        slo_seconds=lambda: target.engine.scheduler.pace.slo_seconds,
    )
