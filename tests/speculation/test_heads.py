"""Medusa and EAGLE-3 heads, compared with plain torch after the papers; answers stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.speculation.answering import answers
from tests.speculation.tiny_heads import (
    EAGLE3,
    LAYERS,
    MEDUSA,
    VOCAB,
    WIDTH,
    eagle3_tensors,
    medusa_tensors,
    opened,
    write_heads,
)
from torch import Tensor
from torch.nn import functional

from steps import Piece, Steps
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.reference import ReferenceBackend
from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.runner import Runner
from twinphase.request import Request, SamplingParams
from twinphase.speculation.eagle3 import Eagle3
from twinphase.speculation.medusa import Medusa
from twinphase.speculation.speculator import Speculator


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


@pytest.mark.parametrize(
    ("asking", "wanted_by_others", "together"),
    [
        (["ac", "abc", "ab", "b"], 0, [["a", "c"], ["ac", "b"], ["abc"], ["b"]]),
        # Of those after all three, not all ask again.
        (
            ["abc", "b", "b", "b"] * 2 + ["abc"],
            None,
            [["a", "b", "c"], *[["abc"], ["b"], ["b"], ["abc"]] * 2],
        ),
    ],
)
def test_requests_that_ask_in_the_same_steps_are_drafted_together(
    tmp_path, target, monkeypatch, asking, wanted_by_others, together
):
    """Others either ask for no tokens, or do not ask at all."""
    heads = opened(write_heads(tmp_path, MEDUSA, medusa_tensors(MEDUSA)), target)
    found: list[list[str]] = []
    draft_batch = heads.draft_batch

    def recorded(names: Sequence[str]) -> list[list[int]]:
        found[-1].append("".join(sorted(names)))
        return draft_batch(names)

    monkeypatch.setattr(heads, "draft_batch", recorded)
    output = [2]
    for names in asking:
        batch = Batch([share(name, [1], output, len(output), 1) for name in "abc"], [])
        said = StepOutput(token_ids={name: [3] for name in "abc"})
        heads.read(batch, said, [np.zeros((3, WIDTH), np.float32)])
        output.append(3)
        found.append([])
        for name in "abc":
            if name in names:
                (draft,) = heads.propose(request(name, [1], output), 1)
                assert len(draft.token_ids) == 1
            elif wanted_by_others is not None:
                assert not heads.propose(request(name, [1], output), wanted_by_others)
    assert found == together


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
        """Positions are the target's, even if earlier tokens were not computed."""
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
    """Hidden states that backends keep for readers."""

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


@pytest.fixture(scope="module")
def plain(target) -> list[tuple[list[int], str]]:
    return answers(LoadedEngine(target, EngineConfig(threads=1)))[0]


def before_its_first_step(model: Path, config: EngineConfig) -> LoadedEngine:
    """A loaded model that may still be asked to keep hidden states."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "first_step", lambda self: None)
        return LoadedEngine(model, config)


class TestSameTokens:
    """Tokens and log probabilities are those of no speculation."""

    @staticmethod
    def with_heads(target: Path, heads: Medusa | Eagle3, **config: Any) -> LoadedEngine:
        loaded = before_its_first_step(target, EngineConfig(threads=2, **config))
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
        loaded = before_its_first_step(target, EngineConfig(threads=1))
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
