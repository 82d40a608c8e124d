"""Every architecture on the reference backend gives transformers' logits, from both formats.

The checkpoints are tiny and random: norms, biases and sinks too, so that nothing is neutral.
Prompts are longer than the windows; they are prefilled at once and in chunks, and decoded in a
batch.
"""

from __future__ import annotations

import numpy as np
import pytest
from families_gguf import write_gguf
from tiny_families import FAMILIES, logits_of, make_model

from steps import Piece, Steps
from twinphase.backends.reference import ReferenceBackend
from twinphase.models.loader import open_model

TOKENS = list(np.random.default_rng(0).integers(3, 448, 70))
TOLERANCE = 1e-3  # of the norm of the logits
CASES = [(name, kind) for name in FAMILIES for kind in ("folder", "gguf")]
CASES.remove(("qwen2-window", "gguf"))  # llama.cpp's converter drops that window
CASES.remove(("falcon-h1-norm", "gguf"))  # and computes no norm before the gate


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_those_of_transformers(tmp_path, name, kind):
    model = make_model(name)
    model.save_pretrained(tmp_path / "folder")
    path = tmp_path / "folder"
    if kind == "gguf":
        path = write_gguf(open_model(path), model, tmp_path / "model.gguf")
    expected = logits_of(model, TOKENS)
    steps = Steps(path, ReferenceBackend(), num_blocks=32)
    tokens = np.array(TOKENS, np.int32)
    for sizes in ([70], [33, 5, 17]):
        _close(steps.chunked(tokens, sizes), expected)
    _close(_decoded_in_a_batch(steps, tokens, 50), expected[[50, 60]])


def _decoded_in_a_batch(steps: Steps, tokens: np.ndarray, first: int) -> np.ndarray:
    """The logits behind `first` and 10 more tokens, two sequences in one step, each a decode."""
    blocks = [steps.blocks[:10], steps.blocks[10:20]]
    for start, own in zip((first, first + 10), blocks, strict=True):
        steps.run([Piece(tokens[:start], 0, own)])
    return steps.run(
        [
            Piece(tokens[at : at + 1], at, own)
            for at, own in zip((first, first + 10), blocks, strict=True)
        ]
    )


def _close(found: np.ndarray, expected: np.ndarray) -> None:
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() <= TOLERANCE, f"{error.max():.2e} at row {error.argmax()}"
