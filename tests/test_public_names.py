import subprocess
import sys

import pytest

import twinphase


def test_public_names_resolve():
    for name in twinphase.__all__:
        assert getattr(twinphase, name) is not None
    assert set(twinphase.__all__) <= set(dir(twinphase))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = twinphase.nothing


@pytest.mark.parametrize("module", ["twinphase", "twinphase.cli", "twinphase.phases.hardware"])
def test_start_up_imports_nothing_heavy(module):
    libraries = ["numpy", "numba", "llvmlite", "tokenizers", "jinja2", "gguf", "rich", "requests"]
    heavy = [*libraries, "huggingface_hub"]
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
