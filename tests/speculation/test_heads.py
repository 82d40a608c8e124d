"""Medusa and EAGLE-3 heads, compared with plain torch after the papers; answers stay equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from steps import Piece, Steps, own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.reference import ReferenceBackend
from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import (
    CheckpointError,
    InvalidRequestError,
    ModelNotFoundError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.models.loader import open_model
from twinphase.request import Request, SamplingParams
from twinphase.speculation.eagle3 import Eagle3
from twinphase.speculation.load_heads import load_heads
from twinphase.speculation.medusa import Medusa
from twinphase.speculation.speculator import Speculator
from twinphase.speculative import speculative_config

VOCAB = 320
WIDTH = 64
LAYERS = 4
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "vocab_size": VOCAB,
    "draft_vocab_size": 100,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}
MEDUSA = {
    "model_type": "medusa",
    "num_heads": 3,
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "vocab_size": VOCAB,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("target")
    with own_cache(folder / "cache"):
        yield write_tiny_gguf(
            folder / "target.gguf", vocab=VOCAB, layers=LAYERS, tensor_type="Q8_0"
        )


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Matrices whose products keep their inputs' size, and norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / shape[1] ** 0.5
        if len(shape) == 2
        else 1 + torch.randn(shape, generator=generator) / 10
        for name, shape in shapes.items()
    }


def medusa_tensors(config: dict[str, Any], *, bias: bool = False) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["num_heads"]):
        for block in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{block}.weight"] = WIDTH, WIDTH
            if bias:
                shapes[f"blocks.{head}.layers.{block}.bias"] = (WIDTH,)
        if not config.get("original_lm_head") or not head:
            shapes[f"lm_heads.{head}.weight"] = config.get("truncated_vocab_size", VOCAB), WIDTH
    tensors = random_tensors(shapes)
    if "truncated_vocab_size" in config:
        tensors["token_map"] = torch.randperm(VOCAB)[: config["truncated_vocab_size"]]
    return tensors


def eagle3_tensors(*, seed: int = 0, embedding: bool = True) -> dict[str, Tensor]:
    layer = "midlayer."
    inner = 6 * 16
    kv = 2 * 16
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        f"{layer}input_layernorm.weight": (WIDTH,),
        f"{layer}hidden_norm.weight": (WIDTH,),
        f"{layer}self_attn.q_proj.weight": (inner, 2 * WIDTH),
        f"{layer}self_attn.k_proj.weight": (kv, 2 * WIDTH),
        f"{layer}self_attn.v_proj.weight": (kv, 2 * WIDTH),
        f"{layer}self_attn.o_proj.weight": (WIDTH, inner),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        f"{layer}mlp.gate_proj.weight": (96, WIDTH),
        f"{layer}mlp.up_proj.weight": (96, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, 96),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (100, WIDTH),
    }
    if embedding:
        shapes["embed_tokens.weight"] = VOCAB, WIDTH
    tensors = random_tensors(shapes, seed)
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:100].sort().values
    tensors["d2t"] = chosen - torch.arange(100)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def write_heads(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def opened(folder: Path, target: Path, num_tokens: int = 3) -> Medusa | Eagle3:
    method = "medusa" if "medusa" in (folder / "config.json").read_text() else "eagle3"
    return load_heads(folder, method, open_model(target), LAYERS, num_tokens)


def drafts(heads: Medusa | Eagle3, requests: Sequence[Request]) -> dict[str, list[int]]:
    proposed = {request.request_id: heads.propose(request, 64) for request in requests}
    return {name: found[0].token_ids for name, found in proposed.items() if found}


def assert_close(own: np.ndarray, expected: Tensor) -> None:
    error = np.abs(own - expected.numpy()).max() / expected.abs().max().item()
    assert error <= 1e-4, error


def share(
    name: str, prompt: list[int], output: list[int], start: int, count: int, **options: Any
) -> ScheduledRequest:
    """A request's tokens from `start` on; drafts are wrong ones behind them."""
    drafts = [VOCAB - 1] * options.pop("num_drafts", 0)
    token_ids = (prompt + output)[start : start + count]
    return ScheduledRequest(
        name,
        Phase.DECODE if output else Phase.PREFILL,
        token_ids + drafts,
        start,
        [],
        start + count == len(prompt + output),
        SamplingParams(),
        prompt,
        list(output),
        num_drafts=len(drafts),
    )


def request(name: str, prompt: list[int], output: list[int]) -> Request:
    return Request(name, prompt, SamplingParams(), output_token_ids=list(output))


class TestMedusa:
    @staticmethod
    def by_torch(tensors: dict[str, Tensor], hidden: Tensor) -> Tensor:
        """Equation 1 of the paper, with any number of residual blocks: [heads, rows, tokens]."""
        logits = []
        for head in range(3):
            x = hidden
            for block in range(2):
                name = f"blocks.{head}.layers.{block}"
                x = x + functional.silu(
                    functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
                )
            lm_head = tensors.get(f"lm_heads.{head}.weight", tensors["lm_heads.0.weight"])
            logits.append(x @ lm_head.T)
        return torch.stack(logits)

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(
        "options", [{}, {"truncated_vocab_size": 50}, {"original_lm_head": True}], ids=str
    )
    def test_logits(self, tmp_path, target, options, bias):
        tensors = medusa_tensors(MEDUSA | options, bias=bias)
        heads = opened(write_heads(tmp_path, MEDUSA | options, tensors), target)
        hidden = torch.randn(5, WIDTH)
        assert_close(heads.logits(hidden.numpy()), self.by_torch(tensors, hidden))

    def test_drafts_follow_the_last_row_that_was_right(self, tmp_path, target):
        config = MEDUSA | {"truncated_vocab_size": 50}
        tensors = medusa_tensors(config)
        heads = opened(write_heads(tmp_path, config, tensors), target, 2)
        batch = Batch(
            [share("a", [1, 2], [3], 2, 1, num_drafts=3), share("b", [1], [2, 3], 2, 1)],
            [share("c", [1, 2, 3, 4], [], 0, 3)],
        )
        hidden = torch.randn(5, WIDTH)
        output = StepOutput(token_ids={"a": [7, 8], "b": [9]})
        heads.read(batch, output, [hidden.numpy()])
        both = [request("a", [1, 2], [3, 7, 8]), request("b", [1], [2, 3, 9])]
        best = tensors["token_map"][self.by_torch(tensors, hidden[[1, 4]]).argmax(2)]
        late = request("a", [1, 2], [3, 7])
        unknown = request("c", [1, 2, 3, 4], [])
        assert drafts(heads, [*both, unknown]) == {
            "a": best[:2, 0].tolist(),
            "b": best[:2, 1].tolist(),
        }
        assert drafts(heads, [late]) == {}, "its hidden state is of another token"
        heads.forget(both[0])
        assert list(drafts(heads, both)) == ["b"]

    def test_names_as_first_published(self, tmp_path, target):
        tensors = medusa_tensors(MEDUSA, bias=True)
        parts = {name: name.split(".") for name in tensors}
        first = {
            f"{p[1]}.{p[3]}.linear.{p[4]}" if p[0] == "blocks" else f"{p[1]}.2.weight": tensors[
                name
            ]
            for name, p in parts.items()
        }
        config = {"model_type": "medusa", "medusa_num_heads": 3, "medusa_num_layers": 2}
        heads = opened(write_heads(tmp_path, config, first), target)
        hidden = torch.randn(2, WIDTH)
        assert_close(heads.logits(hidden.numpy()), self.by_torch(tensors, hidden))


def test_who_asks_at_the_same_time_is_guessed_together(tmp_path, target):
    heads = opened(write_heads(tmp_path, MEDUSA, medusa_tensors(MEDUSA)), target)
    together = []
    draft_batch = heads.draft_batch
    heads.draft_batch = lambda names: [together.append(list(names)), draft_batch(names)][1]
    output: list[int] = []
    for limits in ([1, 0, 1], [1, 1, 1], [1, 1, 0], [0, 1, 0]):
        batch = Batch([share(name, [1, *output], [2], 1 + len(output), 1) for name in "abc"], [])
        heads.read(
            batch,
            StepOutput(token_ids={name: [3] for name in "abc"}),
            [np.zeros((3, WIDTH), np.float32)],
        )
        for name, limit in zip("abc", limits, strict=True):
            found = heads.propose(request(name, [1, *output], [2, 3]), limit)
            assert len(found) == bool(limit) and all(len(draft.token_ids) == 1 for draft in found)
        together.append([])
    assert together == [["a"], ["c"], [], ["a", "c"], ["b"], [], ["a", "b", "c"], [], ["b"], []]


def test_who_is_asked_seldom_is_guessed_with_those_of_the_last_time(tmp_path, target):
    heads = opened(write_heads(tmp_path, MEDUSA, medusa_tensors(MEDUSA)), target)
    together = []
    output = [2]
    draft_batch = heads.draft_batch
    heads.draft_batch = lambda names: [together.append(list(names)), draft_batch(names)][1]
    for step in range(9):
        batch = Batch([share(name, [1], output, len(output), 1) for name in "abc"], [])
        heads.read(
            batch,
            StepOutput(token_ids={name: [3] for name in "abc"}),
            [np.zeros((3, WIDTH), np.float32)],
        )
        output.append(3)
        for name in "abc" if step % 4 == 0 else "b":
            assert heads.propose(request(name, [1], output), 1)
    found = ["".join(sorted(names)) for names in together]
    assert found == [
        "a",
        "b",
        "c",
        *2 * ["abc", "b", "b", "abc"],
    ]  # of those behind all three, not all ask again


class TestEagle3:
    @staticmethod
    def by_torch(
        tensors: dict[str, Tensor],
        token_ids: Sequence[int],
        fused: Tensor,
        num_tokens: int,
        before: bool,
    ) -> tuple[list[Tensor], list[int]]:
        """Logits and tokens of each draft, the whole sequence computed anew for each.

        Token i stands at position i + 1 beside the fused hidden state of position i.
        """
        w = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}

        def norm(x: Tensor, name: str) -> Tensor:
            return functional.rms_norm(x, (WIDTH,), w[f"{name}.weight"], 1e-5)

        def rotated(x: Tensor) -> Tensor:  # [heads, positions, 16]
            angles = torch.arange(x.shape[1])[:, None] * 5000.0 ** (-torch.arange(0, 16, 2) / 16)
            cos, sin = (torch.cat([f(angles)] * 2, dim=1) for f in (torch.cos, torch.sin))
            return x * cos + torch.cat([-x[..., 8:], x[..., :8]], dim=-1) * sin

        hidden = fused @ w["fc.weight"].T
        tokens = list(token_ids)
        all_logits = []
        for _ in range(num_tokens):
            normed = norm(hidden, "hidden_norm")
            x = torch.cat(
                [norm(w["embed_tokens.weight"][tokens], "input_layernorm"), normed], dim=1
            )
            q, k, v = (
                (x @ w[f"self_attn.{n}_proj.weight"].T).view(len(tokens), -1, 16).transpose(0, 1)
                for n in "qkv"
            )
            k, v = (part.repeat_interleave(3, dim=0) for part in (rotated(k), v))
            mixed = functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
            x = (normed if before else hidden) + mixed.transpose(0, 1).flatten(1) @ w[
                "self_attn.o_proj.weight"
            ].T
            h = norm(x, "post_attention_layernorm")
            h = functional.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
            x = x + h @ w["mlp.down_proj.weight"].T
            logits = norm(x[-1:], "norm") @ w["lm_head.weight"].T
            best = int(logits.argmax())
            all_logits.append(logits)
            tokens.append(best + int(w["d2t"][best]))
            # The target's hidden states lead up to the last token that it confirmed; behind it the
            # layer's own do.
            hidden = torch.cat([hidden, x[-1:]])
        return all_logits, tokens[-num_tokens:]

    @pytest.mark.parametrize("before", [False, True])
    def test_drafts(self, tmp_path, target, monkeypatch, before):
        """A prompt in chunks, a preemption, accepted and rejected drafts, and another request."""
        tensors = eagle3_tensors()
        heads = opened(
            write_heads(tmp_path, EAGLE3 | {"norm_before_residual": before}, tensors), target, 4
        )
        assert isinstance(heads, Eagle3) and heads.layers == (1, 2, 3)
        logits = []
        forward = heads._forward
        monkeypatch.setattr(
            heads, "_forward", lambda *args: [logits.append(forward(*args)), logits[-1]][1]
        )

        prompt = list(range(5, 305))
        output = list[int]()
        other = [250]
        states = torch.randn(400, 3 * WIDTH)  # of the three layers side by side, by position
        noise = torch.randn(400, 3 * WIDTH)

        def step(own: ScheduledRequest, new: list[int]) -> None:
            known = (
                own.num_computed_tokens + len(own.token_ids) - own.num_drafts + max(0, len(new) - 1)
            )
            rows = states[own.num_computed_tokens : known]
            rows = torch.cat(
                [noise[:1], rows, noise[: len(own.token_ids) - len(rows)]]
            )  # the other's, ours, rejected
            beside = share("other", [1] * 9, other, 8 + len(other), 1)
            batch = (
                Batch([beside, own], []) if own.phase is Phase.DECODE else Batch([beside], [own])
            )
            tokens = {"other": [len(other)]} | ({"a": new} if new else {})
            heads.read(
                batch,
                StepOutput(token_ids=tokens),
                [part.numpy() for part in rows.split(WIDTH, dim=1)],
            )
            other.append(len(other))
            output.extend(new)

        def check() -> None:
            own = request("a", prompt, output)
            known = prompt + output
            expected, tokens = self.by_torch(
                tensors, known[1:], states[: len(known) - 1], 4, before
            )
            beside = request("other", [1] * 9, other)
            assert drafts(heads, [beside, own])["a"] == tokens
            for (mine, _), by_torch in zip(logits[-4:], expected, strict=True):
                assert_close(mine[-1:], by_torch)

        for start, end in pairwise((0, 100, 101, 200)):
            step(share("a", prompt, [], start, end - start), [])
        for start, end in pairwise((0, 170, 300)):  # from the beginning: it was preempted
            step(share("a", prompt, [], start, end - start), [11] if end == 300 else [])
        check()
        step(share("a", prompt, output, 300, 1, num_drafts=4), [21])
        check()
        step(share("a", prompt, output, 301, 1, num_drafts=4), [VOCAB - 1, VOCAB - 1, 31])
        check()
        step(share("a", prompt, output, 304, 1), [41])
        check()

    def test_behind_a_prefix_hit_it_goes_on(self, tmp_path, target):
        """Positions are the target's, whatever was not computed."""
        tensors = eagle3_tensors()
        heads = opened(write_heads(tmp_path, EAGLE3, tensors), target)
        rows = [
            np.random.default_rng(i).normal(size=(4, WIDTH)).astype(np.float32) for i in range(3)
        ]
        heads.read(
            Batch([], [share("a", [1] * 20, [], 16, 4)]), StepOutput(token_ids={"a": [3]}), rows
        )
        own = request("a", [1] * 20, [3])
        assert len(drafts(heads, [own])["a"]) == 3
        assert heads._sequences["a"].positions[:4].tolist() == [16, 17, 18, 19]
        heads.forget(own)
        assert drafts(heads, [own]) == {}

    def test_the_target_embeds(self, tmp_path, target):
        heads = opened(write_heads(tmp_path, EAGLE3, eagle3_tensors(embedding=False)), target)
        steps = Steps(target, ReferenceBackend())
        steps.model.kept = (0,)
        steps.run([Piece(np.array([5, 7, 5], np.int32), 0, steps.blocks)])
        np.testing.assert_array_equal(heads._embed([5, 7, 5]), steps.backend.kept()[0])


class TestKeptRows:
    """What the backends keep for readers."""

    def test_no_bit_of_the_logits_changes(self, target):
        tokens = np.arange(40, dtype=np.int32)
        plain, kept = (Steps(target, CpuBackend(threads=2)) for _ in range(2))
        kept.model.kept = tuple(range(LAYERS + 1))
        for sizes in ([40], [7, 1, 16]):
            np.testing.assert_array_equal(kept.chunked(tokens, sizes), plain.chunked(tokens, sizes))

    def test_beside_the_reference(self, target):
        """Of a step's rows, and behind the last layer of those whose logits are wanted."""
        tokens = np.arange(40, dtype=np.int32)
        wanted = [3, 39]
        found = []
        for backend in (CpuBackend(threads=2), ReferenceBackend()):
            steps = Steps(target, backend)
            steps.model.kept = tuple(range(LAYERS + 1))
            logits = steps.run([Piece(tokens, 0, steps.blocks)], wanted)
            found.append([rows.copy() for rows in backend.kept()])
        assert [rows.shape for rows in found[0]] == [(40, WIDTH)] * LAYERS + [(2, WIDTH)]
        for own, reference in zip(*found, strict=True):
            assert np.abs(own - reference).max() <= 0.05 * np.abs(reference).max()
        np.testing.assert_allclose(found[1][-1] @ steps.model.head.T, logits, rtol=1e-5, atol=1e-5)


PROMPTS = [[(7 * i + j) % 250 + 10 for i in range(20 + 13 * j)] for j in range(6)] + [
    [17] * 40,
    [17] * 41,
]


def answers(loaded: LoadedEngine) -> tuple[list[tuple[list[int], str]], int, int]:
    """Tokens and log probabilities per prompt; numbers of drafted and accepted tokens."""
    engine = loaded.engine
    logprobs = {}
    requests = []
    drafted = 0
    accepted = 0
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=number % 3 / 2, seed=number, max_tokens=40, logprobs=2, ignore_eos=True
        )
        requests.append(Request(str(number), prompt, params))
        engine.add_request(requests[-1])
    while engine.has_work:
        step = engine.step()
        drafted += sum(share.num_drafts for share in step.batch.decodes)
        accepted += sum(
            len(step.output.token_ids[share.request_id]) - 1 for share in step.batch.decodes
        )
        for name, entries in step.output.logprobs.items():
            logprobs.setdefault(name, []).extend(entries)
    engine.scheduler.check_integrity()
    return [(r.output_token_ids, repr(logprobs[r.request_id])) for r in requests], drafted, accepted


@pytest.fixture(scope="module")
def plain(target) -> list[tuple[list[int], str]]:
    return answers(LoadedEngine(target, EngineConfig(threads=1)))[0]


class TestSameTokens:
    """Tokens and log probabilities are those of no speculation."""

    @staticmethod
    def with_heads(target: Path, heads: Medusa | Eagle3, **config: Any) -> LoadedEngine:
        loaded = LoadedEngine(target, EngineConfig(threads=2, **config))
        loaded.engine.drafter = Speculator(
            [heads], loaded.engine.cost_model, most=heads.num_tokens, always=True
        )
        loaded.engine.executor.show_hidden(heads)
        return loaded

    @pytest.mark.parametrize("kind", ["medusa", "eagle3"])
    def test_with_random_heads(self, tmp_path, target, plain, kind):
        """Few blocks: some are preempted. The second time the prompts are cached."""
        config, tensors = (
            (MEDUSA, medusa_tensors(MEDUSA))
            if kind == "medusa"
            else (EAGLE3, eagle3_tensors(embedding=False))
        )
        heads = opened(write_heads(tmp_path, config, tensors), target)
        loaded = self.with_heads(
            target, heads, num_kv_blocks=32, max_num_batched_tokens=48, max_model_len=256
        )
        for _ in range(2):
            loaded.engine.scheduler.usual_output = 0.0  # so that blocks run out
            found, drafted, _ = answers(loaded)
            assert found == plain and drafted > 100
        assert loaded.engine.scheduler.num_recomputed_tokens > 0

    def test_with_trained_heads(self, tmp_path, target, plain):
        """Heads that have learned these answers by ridge regression, and so are mostly right."""

        class Collector:
            layers = (LAYERS,)

            def __init__(self) -> None:
                self.rows: dict[str, list[np.ndarray]] = {}

            def read(self, batch: Batch, output: StepOutput, hidden: Sequence[np.ndarray]) -> None:
                sampling = [share for share in batch.scheduled if share.samples]
                for own, row in zip(sampling, hidden[0], strict=True):
                    self.rows.setdefault(own.request_id, []).append(row.copy())

        collector = Collector()
        loaded = LoadedEngine(target, EngineConfig(threads=1))
        loaded.engine.executor.show_hidden(collector)
        answers(loaded)
        tensors = medusa_tensors(MEDUSA)
        for head in range(3):
            states = [row for n, rows in collector.rows.items() for row in rows[: -1 - head]]
            labels = [token for n in collector.rows for token in plain[int(n)][0][1 + head :]]
            x = np.stack(states)
            y = np.eye(VOCAB)[labels]
            weights = np.linalg.solve(x.T @ x + 0.1 * np.eye(WIDTH), x.T @ y).T
            tensors[f"lm_heads.{head}.weight"] = torch.from_numpy(weights).float()
            for block in range(2):
                tensors[f"blocks.{head}.layers.{block}.weight"].zero_()
        heads = opened(write_heads(tmp_path, MEDUSA, tensors), target)
        found, drafted, accepted = answers(self.with_heads(target, heads))
        assert found == plain
        assert accepted > 50 and drafted - accepted > 50

    def test_by_configuration(self, tmp_path, target, plain):
        write_heads(tmp_path, EAGLE3, eagle3_tensors())
        config = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
        loaded = LoadedEngine(target, EngineConfig(threads=2, speculative_config=config))
        reader = loaded.engine.executor.reader
        assert isinstance(reader, Eagle3) and reader.num_tokens == 2
        assert answers(loaded)[0] == plain
        assert not reader._sequences, "all have ended"

    def test_a_failure_costs_no_token(self, tmp_path, target, plain, monkeypatch):
        heads = opened(write_heads(tmp_path, EAGLE3, eagle3_tensors()), target)
        update = heads.update
        calls = count()
        monkeypatch.setattr(
            heads, "update", lambda *args: update(*args) if next(calls) % 3 else 1 // 0
        )
        found, drafted, _ = answers(self.with_heads(target, heads))
        assert found == plain and drafted > 0


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


E3 = eagle3_tensors()
M = medusa_tensors(MEDUSA)
REFUSED: list[tuple[type[TwinphaseError], str, dict[str, Any], dict[str, Tensor]]] = [
    (
        UnsupportedModelError,
        "the kind LlamaForCausalLM, and the method is eagle3",
        EAGLE3 | {"architectures": ["LlamaForCausalLM"]},
        E3,
    ),
    (CheckpointError, "vocab_size 32000, the model has 320", EAGLE3 | {"vocab_size": 32000}, E3),
    (CheckpointError, "hidden_size 4096, the model has 64", MEDUSA | {"hidden_size": 4096}, M),
    (
        CheckpointError,
        "target_hidden_size 96, the model has 64",
        EAGLE3 | {"target_hidden_size": 96},
        E3,
    ),
    (
        CheckpointError,
        "no tensor midlayer|no tensor layers.0.hidden_norm.weight",
        EAGLE3,
        without(E3, "midlayer.hidden_norm.weight"),
    ),
    (
        CheckpointError,
        "no tensor blocks.2.layers.1.weight",
        MEDUSA,
        without(M, "blocks.2.layers.1.weight"),
    ),
    (
        CheckpointError,
        r"lm_heads.1.weight of shape \[319, 64\] and type float32, not \[320, 64\]",
        MEDUSA,
        M | {"lm_heads.1.weight": torch.zeros(319, 64)},
    ),
    (
        UnsupportedModelError,
        "a tensor 'extra', which has no place",
        MEDUSA,
        M | {"extra": torch.zeros(1)},
    ),
    (
        CheckpointError,
        "tokens in d2t beyond the model's 320",
        EAGLE3,
        E3 | {"d2t": torch.full((100,), 300)},
    ),
    (CheckpointError, "no tensor d2t of 100 integers", EAGLE3, without(E3, "d2t")),
    (
        CheckpointError,
        "no tensor token_map of 50 integers",
        MEDUSA | {"truncated_vocab_size": 50},
        M,
    ),
    (CheckpointError, "num_heads 'many' in their config", MEDUSA | {"num_heads": "many"}, M),
    (
        CheckpointError,
        r"layers \[2, 2, 1\] to read of the model's 4",
        without(EAGLE3, "eagle_config"),
        E3,
    ),
    (
        CheckpointError,
        "layers 'all' to read",
        EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}},
        E3,
    ),
    (
        UnsupportedModelError,
        "scale their rotations",
        EAGLE3 | {"rope_scaling": {"rope_type": "llama3"}},
        E3,
    ),
    (UnsupportedModelError, "more than one layer", EAGLE3 | {"num_hidden_layers": 2}, E3),
    (CheckpointError, "6 heads of 16 for 4 of keys", EAGLE3 | {"num_key_value_heads": 4}, E3),
    (
        UnsupportedModelError,
        "has type F64",
        MEDUSA,
        M | {"extra": torch.zeros(1, dtype=torch.float64)},
    ),
]


@pytest.mark.parametrize(
    ("error", "message", "config", "tensors"), REFUSED, ids=[row[1][:40] for row in REFUSED]
)
def test_refusals(
    tmp_path,
    target,
    error,
    message,
    config,
    tensors,
):
    with pytest.raises(error, match=message):
        opened(write_heads(tmp_path, config, tensors), target)


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_a_configuration_names_a_folder(method):
    assert speculative_config({"method": method, "model": "folder"}).num_speculative_tokens == 3
    for given in ({}, {"model": 3}, {"model": ""}):
        with pytest.raises(InvalidRequestError, match=f"{method}' without a model"):
            speculative_config({"method": method, **given})
    with pytest.raises(InvalidRequestError, match="prompt_lookup_min"):
        speculative_config({"method": method, "model": "folder", "prompt_lookup_min": 2})


def test_a_folder_without_weights(tmp_path, target):
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    with pytest.raises(ModelNotFoundError, match="has no model.safetensors"):
        opened(tmp_path, target)
    (tmp_path / "medusa_lm_head.pt").touch()
    with pytest.raises(UnsupportedModelError, match="as a pickle"):
        opened(tmp_path, target)
