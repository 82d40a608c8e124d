import subprocess

import pytest

from twinphase.cluster.config import ClusterConfig
from twinphase.config import EngineConfig, module_command
from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams
from twinphase.server.config import ServerConfig
from twinphase.settings import settings_of


def test_resolving_fills_in_what_the_model_decides():
    config = EngineConfig().resolve(1000)
    assert (config.max_model_len, config.num_kv_blocks) == (1000, 64 * 1024 // 16)
    assert EngineConfig().resolve(100_000).num_kv_blocks == 100_000 // 16
    assert EngineConfig(max_model_len=32, num_kv_blocks=9).resolve(1000).num_kv_blocks == 9
    assert EngineConfig(max_num_batched_tokens=8).resolve(1000).max_num_seqs == 8


def test_no_more_than_the_models_context():
    with pytest.raises(InvalidRequestError, match="max_model_len is 1001, .* trained for 1000"):
        EngineConfig(max_model_len=1001).resolve(1000)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens is True"),
        ({"threads": -1}, "threads is -1"),
        ({"num_kv_blocks": 1.5}, "num_kv_blocks is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 63}, "seed is .* up to 9223372036854775807"),
        ({"tensor_parallel_size": 100_000_000}, "tensor_parallel_size is .* from 1 up to 256"),
        ({"backend": "tpu"}, "Use one of: cpu, reference, torch"),
        ({"kv_cache_dtype": "int4"}, "Use one of: auto, int8"),
        ({"scheduling_policy": "lifo"}, "Use one of: fcfs, priority"),
        ({"itl_slo_ms": 0}, "itl_slo_ms is 0"),
        ({"itl_slo_ms": float("nan")}, "itl_slo_ms is nan"),
        ({"itl_slo_ms": True}, "itl_slo_ms is True"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1"),
    ],
)
def test_values_out_of_range(fields, match):
    with pytest.raises(InvalidRequestError, match=match):
        EngineConfig(**fields)


@pytest.mark.parametrize("config", [EngineConfig, ClusterConfig, ServerConfig])
def test_every_integer_has_both_bounds(config):
    integers = {
        name: declared
        for name, (kind, _, declared) in settings_of(config).items()
        if kind.removesuffix(" | None") == "int"
    }
    assert integers
    assert not [
        name for name, one in integers.items() if one.minimum is None or one.maximum is None
    ]


def test_every_number_of_sampling_has_both_bounds():
    numbers = {
        name: declared
        for name, (kind, _, declared) in settings_of(SamplingParams).items()
        if kind.removesuffix(" | None") in ("int", "float")
    }
    assert {"temperature", "top_p", "top_k", "repetition_penalty", "seed"} <= numbers.keys()
    for name, one in numbers.items():
        low = one.above if one.minimum is None else one.minimum
        assert low is not None and one.maximum is not None, name
        for value in (low if one.minimum is None else low - 1, one.maximum + 1):
            with pytest.raises(InvalidRequestError, match=name):
                SamplingParams(**{name: value})


def test_the_cache_takes_a_quarter_of_the_free_memory_at_most(monkeypatch):
    monkeypatch.setattr("twinphase.config.free_memory", lambda: 4 * 16 * 100 * 1000)
    assert EngineConfig().resolve(1000, kv_token_bytes=1000).num_kv_blocks == 100
    assert (
        EngineConfig().resolve(8000, kv_token_bytes=1000).num_kv_blocks == 500
    )  # one whole request at least
    monkeypatch.setattr("twinphase.config.free_memory", lambda: None)
    assert EngineConfig(max_num_seqs=2).resolve(1000, kv_token_bytes=1000).num_kv_blocks == 128


def test_a_process_of_ours_runs_nothing_from_the_working_directory(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('not ours')")
    command = [*module_command("twinphase.cli"), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("twinphase ") and done.returncode == 0
    command = module_command("msgspec")  # the library has no __main__, which is as far as it gets
    assert (
        "not ours"
        not in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    )
