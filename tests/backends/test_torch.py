"""What the torch backend refuses, with a fix in one line, and that only it imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from steps import Steps, own_cache
from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase.backends.device import open_device
from twinphase.backends.torch import peaks
from twinphase.backends.torch.backend import TorchBackend
from twinphase.cli import run_app
from twinphase.config import EngineConfig
from twinphase.engine.loading.ceilings import compute_units, measure_ceilings, measured_ceilings
from twinphase.errors import InvalidRequestError, OutOfMemoryError
from twinphase.installed import install_command
from twinphase.phases.hardware import save_ceilings
from twinphase.phases.report import phase_report
from twinphase.terminal import report_lines


@pytest.mark.parametrize(
    ("fields", "match"),
    (
        ({"device": "tpu"}, "device is 'tpu'. Use cpu, cuda or cuda:N"),
        ({"device": "cuda:-1"}, "Use cpu, cuda or cuda:N"),
        ({"dtype": "float64"}, "Use one of: auto, float16, bfloat16, float32"),
        ({"isa": "avx2"}, "isa is 'avx2'"),
        (
            {"backend": "cpu", "device": "cuda"},
            "device is 'cuda' with the cpu backend. Use the torch backend",
        ),
        ({"backend": "cpu", "enforce_eager": True}, "enforce_eager is True with the cpu backend"),
        ({"backend": "cpu", "dequantize": True}, "dequantize is True with the cpu backend"),
        (
            {"backend": "reference", "dtype": "float16"},
            "dtype is 'float16' with the reference backend",
        ),
    ),
)
def test_settings_that_do_not_fit(fields, match):
    with pytest.raises(InvalidRequestError, match=match):
        EngineConfig(**{"backend": "torch", **fields})


@pytest.mark.parametrize(
    ("cuda", "count", "match"),
    (
        (None, 0, "built for CPUs only. Install torch with CUDA"),
        ("13.0", 0, "no NVIDIA driver, or no GPU"),
        ("13.0", 2, "there are 2 CUDA devices. Use cuda:0 to cuda:1"),
    ),
)
def test_devices_that_are_not_there(monkeypatch, cuda, count, match):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(InvalidRequestError, match=match):
        open_device("torch", device="cuda:2")
    if cuda is None:
        assert open_device("torch").units({("Q4_0", 2)}).linear == "float32"


@pytest.mark.parametrize(
    ("capability", "dtype", "match"),
    (
        (
            RuntimeError("The NVIDIA driver is too old.\nUpdate it."),
            "auto",
            "cuda:0: The NVIDIA driver is too old. Upd",
        ),
        (
            (6, 1),
            "auto",
            r"cuda:0 \(An old one\) has compute capability 6.1; 7.5 is needed. Use a GPU of the "
            "Turing",
        ),
        (
            (7, 5),
            "bfloat16",
            r"dtype is 'bfloat16', which cuda:0 \(An old one\) does not compute in. "
            "Use --dtype float16",
        ),
    ),
)
def test_gpus_that_cannot_be_used(monkeypatch, capability, dtype, match):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answers = {"side_effect" if isinstance(capability, Exception) else "return_value": capability}
    fakes = {
        "device_count": Mock(return_value=1),
        "get_device_name": Mock(return_value="An old one"),
    }
    for name, fake in {**fakes, "get_device_capability": Mock(**answers)}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(InvalidRequestError, match=match):
        open_device("torch", device="cuda", dtype=dtype)


def test_memory_that_is_not_there(tmp_path, monkeypatch):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(
        OutOfMemoryError,
        match=r"KV cache: [\d.]+ GB in bfloat16 on cpu, beside the weights \(0.0 GB\).",
    ):
        Steps(path, TorchBackend("cpu", "bfloat16"), num_blocks=1 << 40)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "cat", full)
    with pytest.raises(
        OutOfMemoryError, match=r"weights: 0.0 GB in float32 on cpu. .* --dtype float16 or bfloat16"
    ):
        Steps(path, TorchBackend("cpu"))


def test_torch_is_an_extra_and_loaded_for_its_own_backend_only():
    code = """
import sys
import twinphase.cli, twinphase.engine.loading.loading, twinphase.backends.device as device
device.open_device("cpu")
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as where it is not installed
try:
    device.open_device("torch")
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert install_command("torch") in done.stdout, done.stderr


@pytest.fixture
def short_measurement(monkeypatch) -> None:
    # One reading of each counts as settled.
    monkeypatch.setattr(peaks, "TOTAL_SECONDS", 0)
    monkeypatch.setattr(peaks, "AGREEING_READINGS", 1)
    monkeypatch.setitem(peaks.WORKING_SETS, "cpu", (1, 2))
    monkeypatch.setitem(peaks.SIDE, "cpu", 64)


def test_ceilings_and_the_share_of_the_host(tmp_path, short_measurement):
    """Both phases have their efficiency once the device is measured."""
    with own_cache(tmp_path / "cache"):
        llm = LLM(
            write_tiny_gguf(tmp_path / "tiny.gguf"), backend="torch", device="cpu", num_kv_blocks=8
        )
        [ceilings] = measure_ceilings(llm.config)
        save_ceilings(ceilings)
        assert measured_ceilings(llm.config) == ceilings
        assert (
            ceilings.isa == "torch on processor"
            and ceilings.peak("float32")
            and ceilings.peak("float16")
        )
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
        units = compute_units(llm.checkpoint, llm.config)
        report = phase_report(output.metrics, units=units, ceilings=ceilings, wall_seconds=1.0)
    for row in report.phases:
        assert row.efficiency and row.bound != "unknown" and 0 < row.host_share < 1
    assert all(", host " in line for line in report_lines(report)[:2])


@pytest.mark.slow
def test_roofline_and_estimate_of_this_backend(tmp_path, short_measurement, capsys):
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    threads = torch.get_num_threads()
    form = f"--backend torch --threads {threads} --json"
    points = (
        "--prompt-lengths 16 --batches 2 --contexts 9 --batch-context 8 --repetitions 1 --steps 2"
    )
    with own_cache(tmp_path / "cache"):
        here = ["estimate", path, "--hardware", "this", "--backend", "torch", "--json"]
        assert (
            run_app(here) == 2
            and "Run `twinphase roofline --backend torch` first" in capsys.readouterr().err
        )
        assert (
            run_app(
                ["roofline", path, *form.split(), *points.split(), "--ceiling-repetitions", "1"]
            )
            == 0
        )
        data = json.loads(capsys.readouterr().out)["data"]
        assert {one["isa"] for one in data["ceilings"]["runs"]} == {"torch on processor"}
        for samples in data["samples"].values():
            parts = samples[0]["parts"]
            assert parts.keys() == {"linear", "attention", "other"} and all(
                seconds > 0 for seconds in parts.values()
            )
        assert run_app(here) == 0
        assert json.loads(capsys.readouterr().out)["decode"]["seconds"] > 0


def test_tuning_without_a_gpu_is_one_line(capsys):
    assert run_app(["tune", "nothing.gguf", "--device", "cpu"]) == 2
    assert "There is nothing to tune" in capsys.readouterr().err
