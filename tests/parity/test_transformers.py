"""The `reference` backend computes what transformers computes in float32 on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle

from steps import Piece, Steps
from twinphase.backends.reference import ReferenceBackend

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-3  # relative norm of the logits
BEGINNING = 128  # tokens of each text, but for the longest, which is taken whole


def test_logits_of_twenty_beginnings_and_one_whole_text(model_path: Path, token_ids: dict[str, list[int]]) -> None:
    """Of 19 texts the first 128 tokens, and of the longest all, up to 2,000: only it shows what the length does."""
    oracle = Oracle(model_path)
    reference = Steps(model_path, ReferenceBackend(), num_blocks=125)
    errors = {}
    longest = max(token_ids, key=lambda name: len(token_ids[name]))
    for name, text in token_ids.items():
        ids = text if name == longest else text[:BEGINNING]
        tokens, worst = np.array(ids, np.int32), 0.0
        for rows, expected in oracle.logits(ids):
            logits = reference.run([Piece(tokens[rows], rows.start, reference.blocks)])
            error = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
            worst = max(worst, float(error.max()))
        errors[name] = worst
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < TOLERANCE, errors
