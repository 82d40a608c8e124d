from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# `oracle.py` and `texts.py` are shared by the tests of this folder.
sys.path.insert(0, str(Path(__file__).parent))

from steps import USER_CACHE, own_cache  # noqa: E402
from twinphase.tokenizer.tokenizer import Tokenizer  # noqa: E402
from twinphase.weights.gguf import open_gguf  # noqa: E402
from twinphase.weights.hub import resolve_model  # noqa: E402


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model, which `make test` pulls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINPHASE_CACHE", str(USER_CACHE))
        return resolve_model()


@pytest.fixture(scope="module", autouse=True)
def cache(model_path, tmp_path_factory) -> Iterator[None]:
    with own_cache(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="session")
def token_ids(model_path, tmp_path_factory) -> dict[str, list[int]]:
    """The texts of `texts.py` as token ids, by name."""
    from texts import TEXTS

    with own_cache(tmp_path_factory.mktemp("cache")):
        tokenizer = Tokenizer.from_checkpoint(open_gguf(model_path))
        ids = {name: tokenizer.encode(text)[:2000] for name, text in TEXTS.items()}
    # The documentation differs between versions of Python.
    lengths = [len(text) for text in ids.values()]
    assert len(ids) == 20 and min(lengths) >= 50 and max(lengths) > 1500
    return ids
