"""The mixes of `mixes.py` on the torch backend: on a processor, in float64, and on a GPU.

torch's products add in an order that depends on their shapes, so bits do depend on the batch. In
float64 what differs is 1e-15 of a value: once logits are rounded to 1e-6, which no user gets,
tokens and log probabilities must be equal. Whatever else could depend on a mix, such as cache,
positions or masks, would show.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from mix_engines import VOCAB, Alone, load
from mixes import COMPARED, run_mixes

from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.backends.torch.backend import TorchBackend


class Rounded(TorchBackend):
    def launch(self, *step: Any) -> None:
        super().launch(*step)
        self.logits = self.logits.round(decimals=6)


# The process of a rank, but for the element type, which no user can choose.
RANK = """
import sys
from twinphase.backends.torch.backend import TorchBackend
from twinphase.engine.ranks import rank
rank.make_backend = lambda config: TorchBackend("cpu", "float64", 1)
sys.exit(rank.main(*map(int, sys.argv[1:])))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", (1, 3))
def test_mixes_in_float64(tmp_path, monkeypatch, ranks):
    """As many as MIXES says, else 2; on several ranks beside alone on one."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(
        "twinphase.engine.loading.loading.make_backend",
        lambda config, progress: Rounded("cpu", "float64", 1),
    )
    monkeypatch.setattr(
        "twinphase.engine.process.start.module_command", lambda module: [sys.executable, "-c", RANK]
    )
    path = write_tiny_gguf(tmp_path / "dense.gguf", vocab=VOCAB, window=40)
    num_mixes = int(os.environ.get("MIXES", 2))
    with own_cache(tmp_path / "cache"):
        alone = Alone(load(path, backend="torch"))
        several = load(path, backend="torch", tensor_parallel_size=ranks)
        tally = run_mixes(num_mixes, several, alone)
    torch.set_num_threads(threads)
    assert tally["compared"] >= 2 * num_mixes and tally["mixed steps"] >= num_mixes, tally
    if num_mixes >= 50:
        tally.assert_reaches(COMPARED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("experts", [None, (5, 2)], ids=["dense", "experts"])
def test_mixes_on_a_gpu(tmp_path, experts):
    """In bfloat16, with our kernels and captured steps: the same bits. Needs TRITON_INTERPRET=0."""
    path = write_tiny_gguf(tmp_path / "dense.gguf", vocab=VOCAB, window=40, experts=experts)
    num_mixes = int(os.environ.get("MIXES", 10))
    with own_cache(tmp_path / "cache"):
        tally = run_mixes(
            num_mixes, load(path, backend="torch"), Alone(load(path, backend="torch"))
        )
    assert tally["compared"] >= 2 * num_mixes and tally["mixed steps"] >= num_mixes, tally
