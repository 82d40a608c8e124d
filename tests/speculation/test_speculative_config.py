"""`--speculative-config`: vLLM's keys, and clear refusals."""

import pytest

from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError
from twinphase.speculative import speculative_config


@pytest.mark.parametrize(
    ("given", "method", "most", "lookup"),
    [
        (None, "none", 16, (5, 5)),
        ("none", "none", 16, (5, 5)),
        ("off", "none", 16, (5, 5)),
        ("auto", "auto", 16, (5, 5)),
        ("suffix", "suffix", 16, (5, 5)),
        ("ngram", "ngram", 16, (5, 5)),
        ('{"method": "ngram", "num_speculative_tokens": 3}', "ngram", 3, (5, 5)),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
            "ngram",
            3,
            (4, 4),
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2},
            "ngram",
            3,
            (2, 2),
        ),
        ({"method": "suffix", "num_speculative_tokens": 24}, "suffix", 24, (5, 5)),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 2}, "suffix", 16, (5, 5)),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, "suffix", 16, (5, 5)),
        ({"num_speculative_tokens": 4}, "auto", 4, (5, 5)),
        (
            {"method": "draft_model", "model": "x", "num_speculative_tokens": 2},
            "draft_model",
            2,
            (5, 5),
        ),
        ({"model": "x", "num_speculative_tokens": 2}, "draft_model", 2, (5, 5)),
    ],
)
def test_what_is_taken(given, method, most, lookup):
    config = speculative_config(given)
    assert (config.method, config.num_speculative_tokens) == (method, most)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lookup
    EngineConfig(speculative_config=given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("magic", "neither a method nor valid JSON"),
        ("[1]", "of type list"),
        ('{"method": "magic"}', "'magic', which is not known"),
        ('{"method": "eagle"}', "'eagle', which is not supported"),
        ('{"method": ["ngram"]}', "is not known"),
        ('{"method": "ngram"}', "without num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens is True"),
        ('{"method": "ngram", "num_speculative_tokens": 65}', "num_speculative_tokens is 65"),
        ('{"method": "ngram", "num_speculative_tokens": 2.5}', "num_speculative_tokens is 2.5"),
        (
            '{"method": "suffix", "prompt_lookup_max": 3}',
            "'prompt_lookup_max', which the method 'suffix'",
        ),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', "'draft_model' without a model"),
        (
            '{"method": "draft_model", "num_speculative_tokens": 3, "model": 3}',
            "'draft_model' without a model",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_tree_depth": 24}',
            "'suffix_decoding_max_tree_depth', which",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_spec_factor": 0}',
            "suffix_decoding_max_spec_factor is 0",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_cached_requests": -1}',
            "max_cached_requests is -1",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, '
            '"suffix_decoding_max_cached_requests": 1}',
            "which the method",
        ),
        ('{"model": "x"}', "'draft_model' without num_speculative_tokens"),
        ("draft_model", "'draft_model' without num_speculative_tokens"),
        ('{"method": "auto", "model": "x"}', "'model', which the method 'auto'"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, '
            '"prompt_lookup_max": 2}',
            "prompt_lookup_min 5 above prompt_lookup_max 2",
        ),
    ],
)
def test_what_is_refused(given, match):
    with pytest.raises(InvalidRequestError, match=match):
        EngineConfig(speculative_config=given)
