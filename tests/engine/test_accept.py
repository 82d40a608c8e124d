"""Blocks that one engine computed and another uses: the same tokens, bit for bit."""

import pytest

from added import make_add
from tiny_gguf import write_tiny_gguf
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.loop import EngineLoop
from twinphase.engine.process.messages import BlocksChanged, StepUpdates, Stop, WatchBlocks
from twinphase.errors import KVFrameError
from twinphase.request import Request, SamplingParams

PROMPT = [(7 * i + i * i) % 300 for i in range(75)]
PARAMS = SamplingParams(temperature=1.2, seed=5, max_tokens=12, logprobs=3, ignore_eos=True)
KINDS = {
    "reference": {"backend": "reference", "block_size": 5},
    "cpu": {"threads": 1, "block_size": 16},
    "cpu-int8": {"threads": 1, "block_size": 32, "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory, own_cache):
    return write_tiny_gguf(tmp_path_factory.mktemp("accept") / "tiny.gguf", context=128)


def answer(loaded, prompt=PROMPT, salt=None):
    """Tokens, log probabilities, and how many prompt tokens were cached."""
    request = Request("r", list(prompt), PARAMS, cache_salt=salt)
    loaded.engine.add_request(request)
    found = []
    while loaded.engine.has_work:
        found += loaded.engine.step().output.logprobs.get("r", [])
    loaded.engine.scheduler.check_integrity()
    return request.output_token_ids, found, request.counts.num_cached_tokens


def computed(loaded, salt=None):
    """The prompt's full blocks and their frames."""
    prefix_cache = loaded.engine.scheduler.kv_cache.prefix_cache
    request = Request("r", PROMPT, PARAMS, cache_salt=salt)
    blocks = [
        prefix_cache.block(request, index)
        for index in range(len(PROMPT) // prefix_cache.block_size)
    ]
    return blocks, loaded.backend.read_blocks(
        [prefix_cache.find(block.block_hash) for block in blocks]
    )


def accept(loaded, blocks, frames):
    def write(block_ids, which):
        loaded.backend.write_blocks(block_ids, [frames[number] for number in which])

    verdicts = loaded.engine.accept(blocks, write)
    loaded.engine.scheduler.check_integrity()
    return verdicts


@pytest.mark.parametrize("kind", KINDS)
def test_another_engines_blocks_are_a_prefix_hit_with_the_same_bits(path, kind):
    one, other = (LoadedEngine(path, EngineConfig(**KINDS[kind])) for _ in range(2))
    alone = answer(one)
    size = KINDS[kind]["block_size"]
    assert alone[2] == 0 and len(set(alone[0])) > 3
    answer(other, PROMPT[::-1])  # what lay in its blocks before does not matter
    blocks, frames = computed(one)
    accept(other, blocks, frames)
    found = answer(other)
    assert found == answer(one)  # with blocks of its own
    assert found[2] == (len(PROMPT) - 1) // size * size
    if kind != "reference":  # whose bits depend on how many rows are computed at once
        assert found[:2] == alone[:2]
    assert answer(other, salt="mine")[2] == 0


def test_blocks_of_another_format_are_refused_and_nothing_is_lost(path):
    one = LoadedEngine(path, EngineConfig(**KINDS["cpu"]))
    other = LoadedEngine(path, EngineConfig(threads=1, kv_cache_dtype="int8"))
    answer(one)
    here = answer(other)
    frames = computed(one)[1]
    before = other.engine.scheduler.kv_cache.pool.num_cached
    prefix_cache = other.engine.scheduler.kv_cache.prefix_cache
    named = [prefix_cache.block(Request("r", PROMPT[:0:-1], PARAMS), index) for index in range(4)]
    with pytest.raises(KVFrameError, match="kv_cache_dtype is auto, not int8"):
        accept(other, named, frames[:4])
    other.engine.scheduler.check_integrity()
    assert other.engine.scheduler.kv_cache.pool.num_cached == before
    assert answer(other)[:2] == here[:2]


def test_whoever_watches_is_told_what_can_be_found(path):
    """First all cached blocks, then each change with its number, including accepted blocks."""
    one, other = (
        LoadedEngine(path, EngineConfig(num_kv_blocks=8, **KINDS["cpu"])) for _ in range(2)
    )
    answer(one)
    blocks, frames = computed(one)
    sent = []
    left = [PROMPT[::-1], PROMPT[10:]]

    def send(message):
        sent.append(message)
        if isinstance(message, StepUpdates) and message.updates[0].ended is not None:
            for message in [make_add("r", left.pop(), PARAMS)] if left else [WatchBlocks(), Stop()]:
                loop.put(message)

    loop = EngineLoop(other, send)
    loop.put(WatchBlocks())
    loop.between_steps(lambda engine: accept(other, blocks, frames))
    loop.put(make_add("first", [1, 2, 3], PARAMS))
    loop.run()
    told = [message for message in sent if isinstance(message, BlocksChanged)]
    assert told[0] == BlocksChanged(0, [], whole=True)
    known = set()
    next_id = 0
    for message in told[1:-1]:
        assert message.number == next_id and not message.whole
        next_id += 1
        known = (known | set(message.stored)) - set(message.evicted)
    assert {block.block_hash for block in blocks} <= {
        name for message in told for name in message.stored
    }
    assert any(message.evicted for message in told)
    assert told[-1].whole and told[-1].number == next_id and set(told[-1].stored) == known
