"""`--speculative-config`: vLLM's keys, and clear refusals."""

import json

import pytest

from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError
from twinphase.speculative import speculative_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((given, {"method": "none"}) for given in (None, "none", "off")),
        *((method, {"method": method}) for method in ("auto", "suffix", "ngram")),
        (json.dumps(NGRAM), NGRAM),
        (
            NGRAM | {"prompt_lookup_max": 4},
            NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 4},
        ),
        (
            NGRAM | {"prompt_lookup_min": 2},
            NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 2},
        ),
        ({"num_speculative_tokens": 4}, {"method": "auto", "num_speculative_tokens": 4}),
        (
            {"model": "x", "num_speculative_tokens": 2},
            {"method": "draft_model", "model": "x", "num_speculative_tokens": 2},
        ),
        *(
            (given, given)
            for given in (
                {"method": "suffix", "num_speculative_tokens": 24},
                {"method": "suffix", "suffix_decoding_max_spec_factor": 2},
                {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
                {"method": "draft_model", "model": "x", "num_speculative_tokens": 2},
            )
        ),
        *(
            (
                {"method": method, "model": "folder"},
                {"method": method, "model": "folder", "num_speculative_tokens": 3},
            )
            for method in ("medusa", "eagle3")
        ),
    ],
)
def test_what_is_taken(given, expected):
    usual = {"num_speculative_tokens": 16, "prompt_lookup_min": 5, "prompt_lookup_max": 5}
    config = vars(speculative_config(given))
    assert {key: config[key] for key in {**usual, **expected}} == {**usual, **expected}
    EngineConfig(speculative_config=given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("magic", "neither a method nor valid JSON"),
        ("[1]", "of type list"),
        ('{"method": "magic"}', "'magic', which is not known"),
        ('{"method": "eagle"}', "'eagle', which is not supported"),
        ('{"method": ["ngram"]}', "is not known"),
        *(
            ({"method": method, **given}, f"{method}' without a model")
            for method in ("medusa", "eagle3")
            for given in ({}, {"model": 3}, {"model": ""})
        ),
        (
            {"method": "medusa", "model": "folder", "prompt_lookup_min": 2},
            "'prompt_lookup_min', which the method 'medusa'",
        ),
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
