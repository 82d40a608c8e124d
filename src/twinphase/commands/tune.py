"""`twinphase tune`: finds the fastest kernel configurations for a model on this GPU."""

from __future__ import annotations

import typer

from twinphase.errors import InvalidRequestError, StorageError


def tune(
    model: str = typer.Argument(
        ..., help="The model whose shapes are timed: a GGUF file, a folder, pypi:NAME, ..."
    ),
    device: str = typer.Option(None, help="cuda or cuda:N. [default: the first GPU]"),
    dtype: str = typer.Option("auto", help="Element type: auto, float16 or bfloat16."),
) -> None:
    """Time the GPU kernel candidates for a model's shapes, and store the fastest for later runs."""
    from twinphase.config import EngineConfig
    from twinphase.engine.loading.loading import make_backend
    from twinphase.models.loader import load_model, open_model
    from twinphase.progress import live
    from twinphase.terminal import note
    from twinphase.weights.hub import resolve_model

    backend = make_backend(EngineConfig(backend="torch", device=device, dtype=dtype))
    tune_backend = getattr(backend, "tune", None)
    if tune_backend is None:
        raise InvalidRequestError(
            "There is nothing to tune: only 16-bit kernels on a GPU, with Triton installed, have "
            "a choice.",
            "Run this on a machine with a GPU, with --dtype float16 or bfloat16.",
        )
    with live("twinphase tune") as progress:
        checkpoint = open_model(resolve_model(model))
        load_model(
            checkpoint,
            backend,
            progress=lambda done, total: progress("reading weights", done, total),
        )
        try:
            path = tune_backend(lambda done, total: progress("timing kernels", done, total))
        except OSError as error:
            raise StorageError(
                f"The result cannot be kept: {error.strerror}.",
                "Make room, or set TWINPHASE_CACHE.",
            ) from None
    note(f"Kept in {path}; the next run uses it.")
