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


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, twinphase; print([m for m in ('numpy', 'numba', 'tokenizers', 'jinja2') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
