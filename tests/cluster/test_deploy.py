"""Applications for Ray Serve: configuration, number of replicas, and one that really runs."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from children import end
from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase.cluster.deploy import build_openai_app, build_pd_openai_app, by_queue_seconds
from twinphase.errors import InvalidRequestError


def context(count, waiting, busy, low=1, high=8):
    metrics = {"queue_seconds": dict(enumerate(waiting)), "busy": dict(enumerate(busy))}
    return SimpleNamespace(
        current_num_replicas=count,
        aggregated_metrics=metrics,
        capacity_adjusted_min_replicas=low,
        capacity_adjusted_max_replicas=high,
    )


@pytest.mark.parametrize(
    ("count", "waiting", "busy", "wanted"),
    [
        (1, [3.0], [1.0], 2),
        (2, [3.0, 3.0], [1.0, 1.0], 3),
        (2, [90.0, 90.0], [1.0, 1.0], 4),  # at most twice as many at once
        (8, [90.0] * 8, [1.0] * 8, 8),
        (2, [1.0, 1.0], [1.0, 1.0], 2),
        (2, [0.0, 0.0], [0.2, 0.2], 1),
        (2, [0.0, 0.0], [0.3, 0.3], 2),  # one alone would have 0.6 of its seats taken
        (1, [0.0], [0.0], 1),
    ],
)
def test_replicas_follow_the_seconds_of_work_that_wait(count, waiting, busy, wanted):
    assert by_queue_seconds(context(count, waiting, busy)) == (wanted, {})


@given(
    st.integers(1, 20), st.floats(0, 1e6), st.floats(0, 100), st.integers(1, 5), st.integers(5, 20)
)
def test_there_are_never_more_or_fewer_replicas_than_allowed(count, waiting, busy, low, high):
    wanted, _ = by_queue_seconds(context(count, [waiting] * count, [busy] * count, low, high))
    assert low <= wanted <= high


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, "llm_configs"),
        ({"llm_configs": []}, "0 models"),
        ({"llm_configs": [{"model_loading_config": {}}]}, "model_id"),
        (
            {
                "llm_configs": [
                    {"model_loading_config": {"model_id": "m"}, "accelerator_type": "H100"}
                ]
            },
            "accelerator_type",
        ),
        (
            {
                "llm_configs": [
                    {"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"tp": 2}}
                ]
            },
            "tp",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(args, told):
    pytest.importorskip("ray.serve")
    with pytest.raises(InvalidRequestError, match=told):
        build_openai_app(args)


ONE = {"model_loading_config": {"model_id": "m"}}


@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [
        (ONE, None, "decode_config"),
        (ONE, {"model_loading_config": {"model_id": "n"}}, "different models"),
        (ONE, {**ONE, "engine_kwargs": {"block_size": 32}}, "block_size"),
        ({**ONE, "server_kwargs": {"max_n": 2}}, ONE, "server_kwargs"),
        (ONE, {**ONE, "kv_role": "both"}, "kv_role"),
    ],
)
def test_halves_that_do_not_go_together_are_refused(prefill, decode, told):
    pytest.importorskip("ray.serve")
    given = {"prefill_config": prefill, "decode_config": decode}
    with pytest.raises(InvalidRequestError, match=told):
        build_pd_openai_app({name: value for name, value in given.items() if value is not None})


# In a process of its own: Ray changes how its process takes signals.
SERVE = """
import json, sys
import ray
from ray import serve
from twinphase.cluster.deploy import build_openai_app, build_pd_openai_app

config, port = json.loads(sys.argv[1]), int(sys.argv[2])
one = lambda: build_openai_app({"llm_configs": [config]})
two = lambda: build_pd_openai_app({"prefill_config": config, "decode_config": config})
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, logging_level="ERROR")
serve.start(http_options={"host": "127.0.0.1", "port": port})
for application in (one, two):
    serve.run(application())
    print("serving", flush=True)
    sys.stdin.readline()
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_replicas_answer_as_the_engine_does(tmp_path):
    """Of one application, and of one in two halves, which replaces it."""
    pytest.importorskip("ray.serve")
    model = write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="Q4_0")
    params = {"max_tokens": 12, "temperature": 1.2, "seed": 5}
    (wanted,) = LLM(model, threads=1).generate(
        ["one two"], SamplingParams(**params), use_tqdm=False
    )
    config = {
        "model_loading_config": {"model_id": "tiny", "model_source": str(model)},
        "engine_kwargs": {"threads": 1},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, json.dumps(config), str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for halves in (["both"], ["decode", "prefill"]):
            assert any(line.strip() == "serving" for line in process.stdout), (
                "Ray Serve did not start"
            )
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = httpx.post(
                url, json={"model": "tiny", "prompt": "one two", **params}, timeout=60
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == wanted.outputs[0].text
            assert httpx.post(url, json={"prompt": "a", "top_p": 7}, timeout=60).status_code == 400
            roles = [
                one["role"]
                for one in httpx.get(f"http://127.0.0.1:{port}/v1/cluster").json()["workers"]
            ]
            assert sorted(roles) == halves
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(60) == 0
    finally:
        end(process)
