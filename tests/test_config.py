import pytest

from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError


def test_resolving_fills_in_what_the_model_decides():
    config = EngineConfig().resolve(1000)
    assert (config.max_model_len, config.num_kv_blocks) == (1000, 63)
    assert EngineConfig(max_model_len=32, num_kv_blocks=9).resolve(1000).num_kv_blocks == 9
    assert EngineConfig(max_num_batched_tokens=8).resolve(1000).max_num_seqs == 8


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens is True"),
        ({"threads": -1}, "threads is -1"),
        ({"num_kv_blocks": 1.5}, "num_kv_blocks is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"backend": "tpu"}, "Use one of: cpu, reference"),
    ],
)
def test_values_out_of_range(fields, match):
    with pytest.raises(InvalidRequestError, match=match):
        EngineConfig(**fields)
