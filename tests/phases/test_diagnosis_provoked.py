"""Each cause of docs/explain.md, provoked on a real engine: its diagnosis comes first, and not where it is absent.

Nothing here asserts a time: only which part of what was measured is the largest, and each cause is made many times
larger than the rest.
"""

import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest

from provoked import Engine
from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.backends.cpu.isa import available_isas
from twinphase.config import available_cores
from twinphase.engine.llm import LLM
from twinphase.phases.evidence import Machine
from twinphase.phases.explain import explain
from twinphase.phases.hardware import Ceilings
from twinphase.phases.report import Units
from twinphase.request import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, hidden=128, layers=4, ffn=512, tensor_type="F32", context=4096)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with own_cache(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture
def start(model):
    return lambda **config: Engine(model, **config)


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
    first, second = engine.add(engine.prompt(40), 200), engine.add(engine.prompt(40), 4)
    engine.run()
    assert engine.causes(second, "prefill")[0] == "queue"
    assert "queue" not in engine.causes(first, "prefill")
    found = engine.explain(second)
    assert "all 1 seats" in found.diagnoses[0].evidence and found.diagnoses[0].lever.flag == "--max-num-seqs"
    assert found.levers[-1].saved_seconds is None  # what others would do then is not predicted


def test_queue_for_blocks(start):
    engine = start(num_kv_blocks=1, block_size=256, max_model_len=256).warm()
    first, second = engine.add(engine.prompt(20), 230), engine.add(engine.prompt(20), 4)
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
    engine = start()
    load = engine.llm.engine.executor.execute

    def first_touch(batch):  # what a first step pays for: files not in memory yet, code not made yet
        time.sleep(0.3)
        engine.llm.engine.executor.execute = load
        return load(batch)

    engine.llm.engine.executor.execute = first_touch
    cold = engine.serve(engine.prompt(100))
    for _ in range(20):
        warm = engine.serve(engine.prompt(100))
    assert engine.causes(cold, "prefill")[0] == "cold_start"
    assert "cold_start" not in engine.causes(warm, "prefill")


def test_missed_prefix_diverged(start):
    engine = start().warm()
    prompt = engine.prompt(1000)
    fresh = engine.serve(prompt)
    moved = engine.serve([*prompt[:40], 4, *prompt[41:]])
    found = engine.explain(moved).diagnoses[0]
    assert (found.cause, found.lever.flag) == ("missed_prefix", "prompt") and "at token 40" in found.evidence
    assert "missed_prefix" not in engine.causes(fresh, "prefill")
    request, timeline = moved  # a question is expected to be new
    request.prefix_miss = replace(request.prefix_miss, part="question")
    assert engine.causes((request, timeline), "prefill")[0] == "prompt_length"
    request.prefix_miss = replace(request.prefix_miss, part="system")
    assert engine.causes((request, timeline), "prefill")[0] == "missed_prefix"


def test_missed_prefix_evicted(start):
    engine = start(num_kv_blocks=64, max_model_len=900).warm()
    prompt = engine.prompt(800)
    fresh, kept = engine.serve(prompt), engine.serve(prompt)
    engine.serve(engine.prompt(800))
    evicted = engine.serve(prompt)
    found = engine.explain(evicted).diagnoses[0]
    assert (found.cause, found.lever.flag) == ("missed_prefix", "--num-kv-blocks") and "make room" in found.evidence
    for life in (fresh, kept):
        assert "--num-kv-blocks" not in [lever.flag for lever in engine.explain(life).levers]


def test_missed_prefix_salt(start):
    engine = start().warm()
    prompt = engine.prompt(1000)
    engine.serve(prompt, cache_salt="a")
    salted, shared = engine.serve(prompt, cache_salt="b"), engine.serve(prompt, cache_salt="a")
    found = engine.explain(salted).diagnoses[0]
    assert (found.cause, found.lever.flag) == ("missed_prefix", "cache_salt")
    assert shared[0].num_cached_tokens >= 990 and "cache_salt" not in str(engine.explain(shared).levers)


def test_missed_prefix_block_granularity(start):
    engine = start(block_size=256, num_kv_blocks=32).warm()
    prompt = engine.prompt(511)
    fresh, again = engine.serve(prompt), engine.serve(prompt)
    assert again[0].num_cached_tokens == 256
    found = engine.explain(again).diagnoses[0]
    assert (found.cause, found.lever.flag) == ("missed_prefix", "--block-size")
    assert "missed_prefix" not in engine.causes(fresh, "prefill")


def _spin(stop):
    while not stop.is_set():
        sum(range(10_000))


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux tells how long a thread waited")
def test_contention(model):
    from twinphase.engine.cpu_wait import thread_cpu_wait

    engine = Engine(model).warm()
    quiet = engine.serve(engine.prompt(30), 200)
    assert "contention" not in engine.causes(quiet, "decode")
    engine.engine.cpu_wait = thread_cpu_wait
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    programs = [context.Process(target=_spin, args=(stop,)) for _ in range(3 * available_cores())]
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


class Reading:
    """What this machine does at best with float32 in NumPy, which is what the reference backend computes with.

    Measured between the steps of an engine, whose clock stands still meanwhile, so that whatever else the machine does
    slows both alike.
    """

    def __init__(self, num_matrices):
        self.matrices = [np.ones((1024, 1024), np.float32) for _ in range(num_matrices)]
        self.rows = np.ones((256, 1024), np.float32)
        self.reading, self.peaks, self.spent = [], [], 0.0

    def __call__(self):
        start = time.perf_counter()
        for matrix in self.matrices:
            self.rows[:1] @ matrix.T
        read = time.perf_counter()
        self.rows @ self.matrices[0].T
        self.reading.append(read - start)
        end = time.perf_counter()
        self.peaks.append(2 * 256 * 1024 * 1024 / (end - read))
        self.spent += end - start
        return False

    def clock(self):
        return time.perf_counter() - self.spent

    def ceilings(self, best=False):
        """In the mean, as the steps between were; or the best, as a machine's ceilings are."""
        size = len(self.matrices) << 22
        seconds = min(self.reading) if best else sum(self.reading) / len(self.reading)
        peak = max(self.peaks) if best else sum(self.peaks) / len(self.peaks)
        return Ceilings("here", 1, "numpy", ((size, size / seconds),), peak, peak, None)


def machine_of(engine, ceilings, **known):
    units = Units("float32", "float32", "float32")
    return Machine(engine.llm.config, engine.engine.shape, engine.engine.cost_model, ceilings, units, **known)


def test_model_size(tmp_path):
    path = write_tiny_gguf(tmp_path / "wide.gguf", hidden=1024, heads=8, layers=2, ffn=4096, tensor_type="F32")
    large = Engine(path, max_model_len=256).warm()
    reading = Reading(large.engine.shape.linear_bytes >> 22)
    large.engine.clock = reading.clock
    life = large.add(large.prompt(20), 40)
    large.run(until=reading)
    found = explain(*life, machine_of(large, reading.ceilings()))
    assert found.bounds["decode"] == "memory"
    causes = [one for one in found.diagnoses if one.phase == "decode"]
    assert causes[0].cause == "model_size" and causes[0].lever.flag == "model" and "MBU" in causes[0].evidence
    small = Engine(write_tiny_gguf(tmp_path / "small.gguf", tensor_type="F32"), max_model_len=256).warm()
    found = explain(*small.serve(small.prompt(20), 30), machine_of(small, reading.ceilings(best=True)))
    assert [one.cause for one in found.diagnoses if one.phase == "decode"][0] == "step_overhead"
    assert "model_size" not in [one.cause for one in found.diagnoses]


def decode_causes(llm):
    """Of an answer that the compiled backend gave."""
    llm.engine.cpu_wait = lambda: 0.0
    (output,) = llm.generate([[5] * 20], SamplingParams(max_tokens=60, ignore_eos=True, temperature=0), use_tqdm=False)
    explanation = llm.explain(output)
    return [one for one in explanation.diagnoses if one.phase == "decode"]


@pytest.mark.skipif(available_cores() < 2, reason="one processor")
def test_threads(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    (found, *_), usual = decode_causes(LLM(path, threads=1)), decode_causes(LLM(path))
    assert (found.cause, found.lever.flag) == ("threads", "--threads")
    assert "threads" not in [one.cause for one in usual]


@pytest.mark.skipif(len(available_isas()) < 2, reason="one instruction-set path")
def test_isa(tmp_path):
    best, weaker = available_isas()[:2]
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    (found, *_), usual = decode_causes(LLM(path, isa=weaker)), decode_causes(LLM(path, isa=best))
    assert (found.cause, found.lever.flag) == ("isa", "--isa") and best in found.evidence
    assert "isa" not in [one.cause for one in usual]


def test_decode_batching(start):
    engine = start().warm()
    lives = [engine.add(engine.prompt(30), 60) for _ in range(24)]
    engine.run()
    assert engine.causes(lives[0], "decode")[0] == "decode_batching"
    assert "decode_batching" not in engine.causes(engine.serve(engine.prompt(30), 60), "decode")


def test_cache_pressure(start):
    engine = start(num_kv_blocks=40, max_model_len=620, enable_prefix_caching=False).warm()
    kept, lost = engine.add(engine.prompt(180), 420), engine.add(engine.prompt(180), 150)
    engine.run()
    assert (kept[0].num_preemptions, lost[0].num_preemptions) == (0, 1)
    found = [one for one in engine.explain(lost).diagnoses if one.phase == "decode"]
    assert (found[0].cause, found[0].lever.flag) == ("cache_pressure", "--num-kv-blocks")
    assert "cache_pressure" not in engine.causes(kept, "decode")


def test_stalls(start):
    engine = start().warm()
    life = engine.add(engine.prompt(30), 12)
    engine.run(lambda: len(life[0].output_token_ids) >= 4)
    for _ in range(4):
        engine.add(engine.prompt(1000), 1)
    engine.run()
    found = [one for one in engine.explain(life).diagnoses if one.phase == "decode"]
    assert (found[0].cause, found[0].lever.flag) == ("stalls", "--itl-slo-ms")
    assert "stalls" not in engine.causes(engine.serve(engine.prompt(30), 12), "decode")


def test_slow_reader(model):
    llm = LLM(model, backend="reference")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for pause in (0.05, 0.0):
        for update in llm.stream("hello world", params):
            if pause:
                time.sleep(pause)
            output = update.output if update.finished else None
        causes = [one.cause for one in llm.explain(output).diagnoses if one.phase == "decode"]
        assert (causes[0] == "slow_reader") if pause else ("slow_reader" not in causes)


class Costly:
    """A constraint, such as a grammar, that takes its time for each token."""

    def restrict(self, logits, output_token_ids):
        time.sleep(0.03)
        return logits


def test_sampling(start):
    engine = start().warm()
    life = engine.add(engine.prompt(20), 20)
    life[0].constraint = Costly()
    engine.run()
    found = [one for one in engine.explain(life).diagnoses if one.phase == "decode"]
    assert (found[0].cause, found[0].lever.flag) == ("sampling", "sampling")


def test_greedy_sampling_is_no_cause(start):
    engine = start().warm()
    assert "sampling" not in engine.causes(engine.serve(engine.prompt(20), 20), "decode")
