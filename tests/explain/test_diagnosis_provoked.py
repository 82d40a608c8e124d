"""Each cause of docs/explain.md, provoked on a real engine: first if present, absent if not.

Nothing here depends on how busy the machine is: each step takes what the test says
(`provoked.Script`), and the engine's clock stands still meanwhile. Only `test_contention` looks at
the real one.
"""

import multiprocessing
import time
from dataclasses import replace

import pytest

from provoked import Engine, Script, usual_seconds
from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.backends.base import Units
from twinphase.backends.cpu import isa as isa_module
from twinphase.backends.cpu.isa import ISAS, available_isas
from twinphase.config import available_cores
from twinphase.engine.frontends.llm import LLM
from twinphase.engine.frontends.outputs import Transcript
from twinphase.explain.evidence import Machine
from twinphase.explain.explanation import explain
from twinphase.phases.hardware import Ceilings
from twinphase.phases.work import step_cost, weight_bytes_read
from twinphase.request import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, tensor_type="F32", context=4096)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with own_cache(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture
def start(model):
    return lambda **config: Engine(model, **config)


def slow_tokens(engine, life):
    """The explanation of its time after the first token."""
    return [one for one in engine.explain(life).diagnoses if one.phase == "decode"]


def test_prompt_length(start):
    engine = start().warm()
    assert engine.causes(engine.serve(engine.prompt(1500)), "prefill")[0] == "prompt_length"
    explanation = engine.explain(engine.serve(engine.prompt(1500)))
    (lever,) = (lever for lever in explanation.levers if lever.flag == "prompt")
    (found,) = (found for found in explanation.diagnoses if found.cause == "prompt_length")
    assert 0.3 * found.seconds < lever.saved_seconds < found.seconds  # half of the tokens
    again = engine.serve(known := engine.prompt(1000)), engine.serve(known)
    assert "prompt_length" in engine.causes(again[0], "prefill")


def test_queue_for_seats(start):
    engine = start(max_num_seqs=1).warm()
    first = engine.add(engine.prompt(40), 200)
    second = engine.add(engine.prompt(40), 4)
    engine.run()
    assert engine.causes(second, "prefill")[0] == "queue"
    assert "queue" not in engine.causes(first, "prefill")
    found = engine.explain(second)
    assert (
        "the only seat" in found.diagnoses[0].evidence
        and found.diagnoses[0].lever.flag == "--max-num-seqs"
    )
    assert found.levers[-1].saved_seconds is None  # what others would do then is not predicted


def test_queue_for_blocks(start):
    engine = start(num_kv_blocks=1, block_size=256, max_model_len=256).warm()
    first = engine.add(engine.prompt(20), 230)
    second = engine.add(engine.prompt(20), 4)
    engine.run()
    found = engine.explain(second).diagnoses[0]
    assert (found.cause, found.lever.flag) == ("queue", "--num-kv-blocks")
    assert "queue" not in engine.causes(first, "prefill")


def test_prefill_batching(start):
    engine = start().warm()
    lives = [engine.add(engine.prompt(30), 4) for _ in range(16)]
    engine.run()
    assert engine.causes(lives[0], "prefill")[0] == "prefill_batching"
    assert "prefill_batching" not in engine.causes(engine.serve(engine.prompt(30)), "prefill")


def test_cold_start(start):
    pages = [0.3]  # what a first step pays for: files not in memory yet, code not made yet
    engine = start(seconds=lambda batch: usual_seconds(batch) + (pages.pop() if pages else 0.0))
    cold = engine.serve(engine.prompt(100))
    for _ in range(20):
        warm = engine.serve(engine.prompt(100))
    assert engine.causes(cold, "prefill")[0] == "cold_start"
    assert "cold_start" not in engine.causes(warm, "prefill")


def known(found):
    """Causes of a bad TTFT with a share."""
    return [
        one.cause for one in found.diagnoses if one.phase == "prefill" and one.share is not None
    ]


def test_missed_prefix_diverged(start):
    engine = start().warm()
    prompt = engine.prompt(1000)
    fresh = engine.serve(prompt)
    moved = engine.serve([*prompt[:40], 4, *prompt[41:]])
    found = engine.explain(moved)
    assert known(found)[0] == "prompt_length"  # how much of the rest was sent before is not known
    (missed,) = (one for one in found.diagnoses if one.cause == "missed_prefix")
    assert (missed.share, missed.lever.flag, missed.lever.saved_seconds) == (None, "prompt", None)
    assert "at token 40" in missed.evidence
    assert "missed_prefix" not in engine.causes(fresh, "prefill")
    request, timeline = moved  # a question is expected to be new
    request.counts.prefix_miss = replace(request.counts.prefix_miss, part="question")
    assert "missed_prefix" not in engine.causes((request, timeline), "prefill")
    request.counts.prefix_miss = replace(request.counts.prefix_miss, part="system")
    assert "missed_prefix" in engine.causes((request, timeline), "prefill")


def test_a_new_prompt_that_begins_like_another_claims_no_missed_prefix(start):
    engine = start().warm()
    prompt = engine.prompt(20)
    engine.serve([*prompt, *engine.prompt(200)])
    found = engine.explain(engine.serve([*prompt, *engine.prompt(1500)]))
    assert known(found)[0] == "prompt_length" and "missed_prefix" not in known(found)
    assert all(lever.saved_seconds is None for lever in found.levers if "token 20" in lever.advice)


def test_missed_prefix_evicted(start):
    engine = start(num_kv_blocks=64, max_model_len=900).warm()
    prompt = engine.prompt(800)
    fresh = engine.serve(prompt)
    kept = engine.serve(prompt)
    engine.serve(engine.prompt(800))
    evicted = engine.serve(prompt)
    found = engine.explain(evicted).diagnoses[0]
    assert (found.cause, found.lever.flag) == (
        "missed_prefix",
        "--num-kv-blocks",
    ) and "evicted" in found.evidence
    for life in (fresh, kept):
        assert "--num-kv-blocks" not in [lever.flag for lever in engine.explain(life).levers]


def test_the_first_prompt_of_a_salt_is_a_prompt_like_any_other(start):
    engine = start().warm()
    prompt = engine.prompt(1000)
    engine.serve(prompt, cache_salt="a")
    salted = engine.serve(prompt, cache_salt="b")
    shared = engine.serve(prompt, cache_salt="a")
    found = engine.explain(salted)
    assert known(found)[0] == "prompt_length" and "missed_prefix" not in engine.causes(
        salted, "prefill"
    )
    assert "others' tokens are not shared with it" in found.diagnoses[0].evidence
    assert not any(
        "salt" in lever.flag + lever.advice for lever in found.levers
    )  # tenants stay apart
    assert shared[0].counts.num_cached_tokens >= 990


def test_missed_prefix_block_granularity(start):
    engine = start(block_size=256, num_kv_blocks=32).warm()
    prompt = engine.prompt(511)
    fresh = engine.serve(prompt)
    again = engine.serve(prompt)
    assert again[0].counts.num_cached_tokens == 256
    found = engine.explain(again)
    (missed,) = (one for one in found.diagnoses if one.cause == "missed_prefix")
    assert (missed.share, missed.lever.flag, missed.lever.saved_seconds) == (
        None,
        "--block-size",
        None,
    )
    assert known(found)[0] == "prompt_length"
    assert "missed_prefix" not in engine.causes(fresh, "prefill")


def _spin(stop):
    while not stop.is_set():
        sum(range(10_000))


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux tells how long a thread waited"
)
def test_contention(model):
    from twinphase.engine.cpu_wait import thread_cpu_wait

    engine = Engine(model, seconds=None).warm()
    engine.engine.recorder.cpu_wait = thread_cpu_wait
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    programs = [
        context.Process(target=_spin, args=(stop,), daemon=True)
        for _ in range(3 * available_cores())
    ]
    for program in programs:
        program.start()
    try:
        deadline = time.monotonic() + 30
        while thread_cpu_wait() == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        lives = [engine.serve(engine.prompt(30), 150) for _ in range(3)]
    finally:
        stop.set()
        for program in programs:
            program.join()
    assert any(engine.causes(life, "decode")[0] == "contention" for life in lives)


def test_contention_is_told_of_the_phase_that_met_it(start):
    engine = start()
    Script(engine.engine, lambda batch: 1.0, cpu_wait=lambda batch: 0.9 * bool(batch.prefills))
    life = engine.warm().serve(engine.prompt(30), 20)
    assert engine.causes(life, "prefill")[0] == "contention"
    assert "contention" not in engine.causes(life, "decode")


# of a machine that computes in no time and reads slowly
BANDWIDTH = 1e9
PEAK = 1e18


def decode_of(engine, length, busy):
    """Causes of slow tokens after `length` prompt tokens; bytes take `busy` of each step's time."""
    shape = engine.engine.shape
    ceilings = Ceilings("p", 1, "numpy", ((1, BANDWIDTH), (1 << 40, BANDWIDTH)), PEAK, PEAK, None)

    def seconds(batch):
        read = step_cost(shape, batch.work).bytes + weight_bytes_read(
            shape, batch.work.rows, batch.work.logits
        )
        return read / BANDWIDTH / busy

    Script(engine.engine, seconds)
    life = engine.serve(engine.prompt(length), 20)
    units = Units("float32", "float32", "float32")
    machine = Machine(engine.llm.config, shape, engine.engine.cost_model, ceilings, units)
    found = explain(life[0].counts, life[1], machine)
    return [one for one in found.diagnoses if one.phase == "decode"]


def test_model_size(start):
    (found, *rest) = decode_of(start(), 20, 0.8)
    assert (found.cause, found.lever.flag, rest) == (
        "model_size",
        "model",
        [],
    ) and "MBU 8" in found.evidence
    assert [one.cause for one in decode_of(start(), 20, 0.1)] == ["kernels_below_peak"]


def test_context_length(start):
    (found, *_) = decode_of(start(max_model_len=4096, max_num_batched_tokens=512), 3000, 0.8)
    assert found.cause == "context_length" and "3000 prompt tokens" in found.evidence
    assert "context_length" not in [one.cause for one in decode_of(start(), 20, 0.8)]


def decode_causes(llm):
    """The causes for an answer of the compiled backend."""
    Script(llm.engine, lambda batch: 0.01)
    (output,) = llm.generate(
        [[5] * 20], SamplingParams(max_tokens=20, ignore_eos=True, temperature=0), use_tqdm=False
    )
    explanation = llm.explain(output)
    return {one.cause: one for one in explanation.diagnoses if one.phase == "decode"}


@pytest.mark.skipif(available_cores() < 2, reason="one processor")
def test_threads(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = decode_causes(LLM(path, threads=1))
    usual = decode_causes(LLM(path))
    assert (
        found["threads"].lever.flag == "--threads" and found["threads"].share is None
    )  # no ceiling is known
    assert found["unknown_bound"].share > 0.9  # what else there is to say is said too
    assert "threads" not in usual


def test_isa(tmp_path, monkeypatch):
    """As if this processor had a better path, so that no other one has to be compiled."""
    usable = available_isas()
    better = next(name for name in ISAS if name != usable[0])
    llm = LLM(write_tiny_gguf(tmp_path / "tiny.gguf"), isa=usable[0])
    usual = decode_causes(llm)
    monkeypatch.setattr(isa_module, "available_isas", lambda: [better, *usable])
    found = decode_causes(llm)
    assert (
        found["isa"].lever.flag == "--isa"
        and better in found["isa"].evidence
        and found["isa"].share is None
    )
    assert found["unknown_bound"].share > 0.9
    assert "isa" not in usual


def test_decode_batching(start):
    engine = start().warm()
    lives = [engine.add(engine.prompt(30), 30) for _ in range(24)]
    engine.run()
    assert engine.causes(lives[0], "decode")[0] == "decode_batching"
    assert "decode_batching" not in engine.causes(engine.serve(engine.prompt(30), 30), "decode")


def test_cache_pressure(start):
    engine = start(num_kv_blocks=40, max_model_len=620, enable_prefix_caching=False)
    Script(engine.engine, lambda batch: 0.01 * (1 + len(batch.prefills)))
    engine.warm()
    kept = engine.add(engine.prompt(180), 420)
    lost = engine.add(engine.prompt(180), 150)
    engine.run()
    assert (kept[0].counts.num_preemptions, lost[0].counts.num_preemptions) == (0, 1)
    found = slow_tokens(engine, lost)
    assert (found[0].cause, found[0].lever.flag) == ("cache_pressure", "--num-kv-blocks")
    assert "cache_pressure" not in engine.causes(kept, "decode")


def test_stalls(start):
    engine = start().warm()
    life = engine.add(engine.prompt(30), 12)
    engine.run(lambda: len(life[0].output_token_ids) >= 4)
    for _ in range(4):
        engine.add(engine.prompt(1000), 1)
    engine.run()
    found = slow_tokens(engine, life)
    assert (found[0].cause, found[0].lever.flag) == ("stalls", "--itl-slo-ms")
    assert "stalls" not in engine.causes(engine.serve(engine.prompt(30), 12), "decode")


def answered(model, pause, text="hello world", **config):
    """Causes by phase of an answer whose reader takes `pause` seconds for each piece."""
    llm = LLM(model, backend="reference", **config)
    script = Script(llm.engine, lambda batch: 0.01)
    for update in llm.stream(text, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)):
        script.now += pause
        output = update.output if update.finished else None
    return by_phase(llm.explain(output))


def by_phase(explanation):
    """Names of the causes."""
    return {
        phase: [one.cause for one in explanation.diagnoses if one.phase == phase]
        for phase in ("prefill", "decode")
    }


def test_slow_reader(model):
    assert answered(model, pause=0.05)["decode"][0] == "slow_reader"
    assert "slow_reader" not in answered(model, pause=0.0005)["decode"]


def test_slow_reader_of_progress(model):
    chunks = {"text": "hello world " * 40, "max_num_batched_tokens": 16}
    assert answered(model, pause=0.05, **chunks)["prefill"][0] == "slow_reader"
    assert "slow_reader" not in answered(model, pause=0.0005, **chunks)["prefill"]


def causes_of_slow_text(model, monkeypatch, place, method, seconds):
    """Causes by phase of an answer for which a method that handles text takes `seconds`."""
    llm = LLM(model, backend="reference")
    script = Script(llm.engine, lambda batch: 0.01)
    place = place or llm._loaded
    unhurried = getattr(place, method)

    def slowly(*args):
        script.now += seconds
        return unhurried(*args)

    monkeypatch.setattr(place, method, slowly)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate(["hello"], params, use_tqdm=False)
    return by_phase(llm.explain(output))


def test_tokenize(model, monkeypatch):
    slow, quick = (
        causes_of_slow_text(model, monkeypatch, None, "encode", seconds)
        for seconds in (0.5, 0.0005)
    )
    assert slow["prefill"][0] == "tokenize" and "tokenize" not in quick["prefill"]


@pytest.mark.parametrize("seconds", [0.5, 0.0005])
def test_detokenize(model, monkeypatch, seconds):
    for causes in causes_of_slow_text(
        model, monkeypatch, Transcript, "take_tokens", seconds
    ).values():
        assert (causes[0] == "detokenize") if seconds > 0.1 else ("detokenize" not in causes)


def test_unattributed(start):
    for pause in (0.5, 0.0005):
        engine = start()
        script = Script(engine.engine, lambda batch: 0.01)

        def idle(script=script, pause=pause):  # between two steps, which nobody names
            script.now += pause
            return False

        life = engine.add(engine.prompt(20), 20)
        engine.run(idle)
        causes = engine.causes(life, "decode")
        assert (causes[0] == "unattributed") if pause > 0.1 else ("unattributed" not in causes)


def test_sampling(start):
    for seconds in (0.9, 0.05):
        engine = start()
        Script(engine.engine, lambda batch: 1.0, sampling=seconds)
        life = engine.warm().serve(engine.prompt(20), 20, temperature=1.0)
        found = slow_tokens(engine, life)
        if seconds > 0.1:
            assert (found[0].cause, found[0].lever.flag) == ("sampling", "sampling")
            greedy = engine.explain(engine.serve(engine.prompt(20), 20)).diagnoses
            assert [one.lever for one in greedy if one.cause == "sampling"] == [None]
        else:
            assert "sampling" not in [one.cause for one in found]
