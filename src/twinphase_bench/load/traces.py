"""Converts published traces (`twinphase.read_trace`) to requests for a target.

Lengths, times, shared prefixes and ShareGPT's questions come from the file; all other text is
synthetic. Lines are sorted by time if necessary, and the report says so.
"""

from __future__ import annotations

from pathlib import Path

from twinphase import BLOCK_TOKENS, Scaling, TraceLine, read_trace
from twinphase_bench.load.workload import LoadRequest, PromptMaker, Sizing, Workload
from twinphase_bench.targets.target import Prompt

WARM_UP_LENGTHS = (64, 8)


def trace_workload(
    path: Path, sizing: Sizing, scaling: Scaling | None = None, *, seed: int = 0
) -> Workload:
    """The requests of a file for a target.

    Args:
        path: path of the file; errors are those of `read_trace`.
        sizing: sizing of the target, `await target.sizing()`.
        scaling: scaling of lengths and times; None for none.
        seed: random seed of the texts.
    """
    scaling = scaling or Scaling()
    kind, unsorted = read_trace(path, scaling.num_prompts)
    lines = sorted(unsorted, key=lambda line: line.timestamp or 0.0)
    moved = sum(a is not b for a, b in zip(lines, unsorted, strict=True))
    maker = PromptMaker(sizing, seed)
    requests = tuple(_request(line, maker, scaling) for line in lines)
    warm_up = tuple(
        LoadRequest(maker.take(WARM_UP_LENGTHS[0]), WARM_UP_LENGTHS[1]) for _ in range(3)
    )
    conditions = {
        "trace": f"{path.name} ({kind})",
        "--scale-lengths": f"{scaling.lengths:g}",
        "--time-scale": f"{scaling.time:g}",
        "--num-prompts": str(len(requests)),
        "seed": str(seed),
    }
    notes = (
        [f"{moved} lines of the file are out of the order of their times: they were sorted"]
        if moved
        else []
    )
    notes += _notes(kind, sizing, scaling.lengths)
    scaled = (
        "" if scaling == Scaling() else f", lengths x {scaling.lengths:g}, times x {scaling.time:g}"
    )
    return Workload(
        requests,
        warm_up,
        f"{len(requests)} requests of {path.name}{scaled}",
        conditions,
        tuple(notes),
    )


def _notes(kind: str, sizing: Sizing, scale: float) -> list[str]:
    """The differences from the file."""
    if kind == "mooncake":
        notes = [
            f"prompts share prefixes as the trace says, in blocks of {BLOCK_TOKENS * scale:g} "
            "tokens; texts are made up"
        ]
        if scale < 1:
            notes.append(
                "a prefix cache with longer blocks than the scaled ones finds less than it would "
                "unscaled"
            )
        return notes
    if kind == "azure":
        return []
    if sizing.encode is None and sizing.vocab_size is not None:
        return [
            "words count as tokens, and random token ids stand for the questions: only their "
            "lengths are the file's"
        ]
    unit = "words" if sizing.encode is None else "tokens"
    notes = [
        "questions are as in the file, without a chat template; output lengths are the answers' "
        "tokens"
    ]
    if sizing.encode is None:
        notes = [
            "output lengths are the words of the answers times our tokens per word: an estimate"
        ]
    return notes + ([f"questions are cut to {scale:g} of their {unit}"] if scale != 1 else [])


def _request(line: TraceLine, maker: PromptMaker, scaling: Scaling) -> LoadRequest:
    if line.question:
        return _conversation(line, maker, scaling)
    timestamp = None if line.timestamp is None else line.timestamp * scaling.time
    num_prompt = scaling.length(line.num_prompt_tokens)
    num_output = scaling.length(line.num_output_tokens)
    if line.blocks:
        prompt = maker.take_shared(num_prompt, line.blocks, BLOCK_TOKENS * scaling.lengths)
    else:
        prompt = maker.take(num_prompt)
    return LoadRequest(prompt, num_output, timestamp)


def _conversation(line: TraceLine, maker: PromptMaker, scaling: Scaling) -> LoadRequest:
    """The question as text or token ids; without a tokenizer as random ids."""
    sizing = maker.sizing
    if sizing.encode is not None:
        ids = sizing.encode(line.question)
        ids = ids[: scaling.length(len(ids))]
        num_output = len(sizing.encode(line.answer))
        return LoadRequest(Prompt("", tuple(ids), len(ids)), scaling.length(num_output))
    words = line.question.split()
    kept = words[: scaling.length(len(words))]
    per_word = sizing.tokens_per_word if sizing.vocab_size is None else 1.0
    num_output = max(1, round(scaling.length(len(line.answer.split())) * per_word))
    if sizing.vocab_size is not None:
        return LoadRequest(maker.take(max(1, len(kept))), num_output)
    text = line.question if len(kept) == len(words) else " ".join(kept)
    return LoadRequest(
        Prompt(text, num_tokens=round(len(kept) * per_word + sizing.overhead)), num_output
    )
