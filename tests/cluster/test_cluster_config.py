"""How many engines there are, and how many threads each has."""

import logging

import pytest

from twinphase.cluster import config
from twinphase.cluster.config import ClusterConfig
from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("fields", "num_here", "is_cluster", "threads"),
    [
        ({}, 1, False, None),  # a lone engine takes all cores by itself
        ({"replicas": 1}, 1, False, None),
        ({"replicas": 4}, 4, True, 2),
        ({"replicas": 3, "threads_per_worker": 1}, 3, True, 1),
        ({"prefill_workers": 1, "decode_workers": 3}, 4, True, 2),
        ({"replicas": 16}, 16, True, 1),
        ({"workers": ("a:1",)}, 0, True, None),
        ({"workers": ("a:1", "b:1"), "replicas": 2}, 2, True, 4),
        ({"ray_address": "auto", "prefill_workers": 1, "decode_workers": 2}, 3, True, 2),
        ({"ray_address": "auto", "replicas": 2, "threads_per_worker": 64}, 2, True, 64),
    ],
)
def test_engines_share_the_cores(fields, num_here, is_cluster, threads, monkeypatch, caplog):
    monkeypatch.setattr(config, "available_cores", lambda: 8)
    cluster = ClusterConfig(**fields)
    assert (cluster.num_here, cluster.is_cluster, cluster.of_each(EngineConfig())) == (
        num_here,
        is_cluster,
        threads,
    )
    assert not caplog.records


def test_more_threads_than_cores_are_warned_about_and_two_answers_refused(monkeypatch, caplog):
    monkeypatch.setattr(config, "available_cores", lambda: 8)
    with caplog.at_level(logging.WARNING):
        assert ClusterConfig(replicas=3, threads_per_worker=3).of_each(EngineConfig()) == 3
    assert "more than the 8 cores" in caplog.text
    with pytest.raises(InvalidRequestError, match="--threads-per-worker"):
        ClusterConfig(replicas=2, threads_per_worker=2).of_each(EngineConfig(threads=2))
    for fields in (
        {"replicas": 0},
        {"threads_per_worker": 0},
        {"worker_silence": 0.0},
        {"elastic_roles": True},
        {"elastic_roles": True, "replicas": 2},
        {"prefill_workers": 0, "decode_workers": 1},
        {"prefill_workers": 1},
        {"decode_workers": 1},
        {"prefill_workers": 1, "decode_workers": 1, "replicas": 2},
        {"prefill_workers": 1, "decode_workers": 1, "workers": ("a:1",)},
    ):
        with pytest.raises(InvalidRequestError):
            ClusterConfig(**fields)
