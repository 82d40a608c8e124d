from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.speculation.tiny_heads import LAYERS, VOCAB

from steps import own_cache
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Path]:
    """The model that heads draft for."""
    folder = tmp_path_factory.mktemp("target")
    with own_cache(folder / "cache"):
        yield write_tiny_gguf(
            folder / "target.gguf", vocab=VOCAB, layers=LAYERS, tensor_type="Q8_0"
        )
