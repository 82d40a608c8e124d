"""Prints the facts about a model for `twinphase show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from twinphase.commands.estimate_view import grid, print_notes, scaled, time_text
from twinphase.commands.search import catalogue_lines
from twinphase.terminal import answers

KINDS = {"byte-level": "byte-level BPE", "sentencepiece": "SentencePiece", "wordpiece": "WordPiece"}


def show_facts(facts: dict[str, Any]) -> None:
    """Print the result of `model_facts`."""
    console = answers()
    console.print(
        Text(f"{facts['name']}: {facts['architecture']}, {facts['quantization']}", "bold")
    )
    console.print(Text(f"  {facts['path']}", "dim"), soft_wrap=True)
    encodes = "embeds" in facts or "scores" in facts
    console.print(grid(_encoder_lines(facts) if encodes else _lines(facts)))
    console.print(_formats(facts))
    if encodes:
        return
    console.print(_kv_cache(facts))
    if "ranks" in facts:
        console.print(_ranks(facts))
    here = facts["here"]
    if here:
        bound = f"A bound: {here['hardware']}; `twinphase bench` measures."
        print_notes(here["warnings"], [bound, *here["notes"]])


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from catalogue_lines(facts.get("catalogue", {}))
    layers = facts["layers"]
    parameters = facts["parameters"]
    active = f", {parameters['active']:,} active per token" if layers["experts"] else ""
    yield "parameters", f"{parameters['total']:,}{active}; {scaled(facts['bytes'], 'B')}"
    yield "context", f"{facts['context_length']:,} tokens"
    yield (
        "layers",
        f"{layers['num_layers']}, {layers['hidden_size']:,} wide; feed-forward "
        f"{layers['ffn_size']:,}",
    )
    if experts := layers["experts"]:
        first = f" but the first {experts['dense_layers']}" if experts["dense_layers"] else ""
        shared = ", and one that every token uses" if experts["shared"] else ""
        yield (
            "experts",
            f"{experts['count']} of {experts['ffn_size']:,} in each layer{first}, "
            f"{experts['used']} per token{shared}",
        )
    shape = layers["full_kv"]
    full = f"; in full layers {shape['num_heads']} of {shape['head_dim']}" if shape else ""
    yield (
        "heads",
        f"{layers['num_heads']} for queries, {layers['num_kv_heads']} for keys and values, of "
        f"{layers['head_dim']}{full}",
    )
    if layers["shared_kv_layers"]:
        yield (
            "shared KV",
            f"the last {layers['shared_kv_layers']} of {layers['num_layers']} layers read the keys "
            "and values of earlier ones",
        )
    if layers["layer_embedding_size"]:
        yield (
            "embeddings",
            f"{layers['layer_embedding_size']} numbers per layer and token, read from the file as "
            "tokens come",
        )
    if layers["recurrent_layers"]:
        both = layers["recurrent_layers"] + layers["attention_layers"] > layers["num_layers"]
        kv = "and" if both else "not"
        yield (
            "recurrence",
            f"{layers['recurrent_layers']} of {layers['num_layers']} layers keep a state, {kv} KV: "
            f"{scaled(facts['state_bytes'], 'B')} per sequence",
        )
    if layers["draft_layers"]:
        yield "drafting", "a layer of its own predicts further tokens (MTP)"
    near = layers["windowed_layers"]
    which = (
        "every layer attends"
        if near == layers["num_layers"]
        else f"{near} of {layers['num_layers']} layers attend"
    )
    yield (
        "window",
        f"{which} to {layers['window']:,} tokens at most"
        if near
        else "none: every layer attends to the whole context",
    )
    tied = "is the embedding" if layers["tied"] else "has its own weights"
    yield "head", f"{layers['vocab_size']:,} logits; it {tied}"
    yield from _tokenizer(facts)
    if "problem" not in facts:
        stand_in = facts.get("fallback_template")
        yield "chat template", f"no ({stand_in} stands in)" if stand_in else "yes"
        yield "tools", "yes" if facts["tools"] else "no"
        yield "thinking", "yes" if facts["thinking"] else "no"
    yield from _here(facts["here"])


def _encoder_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    layers = facts["layers"]
    yield "parameters", f"{facts['parameters']['total']:,}; {scaled(facts['bytes'], 'B')}"
    yield "texts", f"up to {facts['context_length']:,} tokens"
    yield (
        "layers",
        f"{layers['num_layers']}, {layers['hidden_size']:,} wide; feed-forward "
        f"{layers['ffn_size']:,}",
    )
    yield "heads", f"{layers['num_heads']}, and every token attends to every other"
    if "scores" in facts:
        kind = "any number" if facts["scores"]["raw"] else "0 to 1"
        yield "scores", f"pairs of texts, {kind}; it writes no text"
    else:
        embeds = facts["embeds"]
        to = f"to {embeds['dimensions']:,} dimensions, {embeds['pooling']} pooling"
        yield "embeds", f"{to}; it writes no text"
    yield from _tokenizer(facts)


def _tokenizer(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tokenizer = facts["tokenizer"]
    yield (
        "tokenizer",
        f"{KINDS[tokenizer['kind']]}, {tokenizer['vocab_size']:,} tokens"
        if tokenizer
        else "cannot be used",
    )
    if "problem" in facts:
        yield "", facts["problem"]


def _here(here: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if here is None:
        yield "both phases here", "not measured yet: run `twinphase roofline`"
        return
    prompt = f"{here['prompt_tokens']:,}"
    yield (
        "prefill here",
        f"TTFT of {prompt} tokens at least {time_text(here['ttft_seconds'])}, "
        f"{here['ttft_bound']}-bound",
    )
    yield (
        "decode here",
        f"TPOT after {prompt} tokens at least {time_text(here['tpot_seconds'])}, "
        f"{here['tpot_bound']}-bound",
    )


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    return table


def _formats(facts: dict[str, Any]) -> Table:
    table = _table("format", "tensors", "bytes", "share")
    for one in facts["formats"]:
        table.add_row(
            one["type"],
            f"{one['tensors']:,}",
            f"{one['bytes']:,}",
            f"{100 * one['bytes'] / facts['bytes']:.1f} %",
        )
    return table


def _kv_cache(facts: dict[str, Any]) -> Table:
    table = _table(
        "KV cache",
        "per token",
        f"held for {facts['context_length']:,} tokens",
        "read by a decode step there",
    )
    for dtype, sizes in facts["kv_cache"].items():
        table.add_row(
            dtype, f"{sizes['token']:,} B", scaled(sizes["held"], "B"), scaled(sizes["read"], "B")
        )
    return table


def _ranks(facts: dict[str, Any]) -> Table:
    columns = [f"KV per token, {dtype}" for dtype in facts["kv_cache"]]
    recurrent = "state_bytes" in facts["ranks"][0]
    columns += ["state per sequence"] * recurrent
    table = _table("rank", "weights", "KV heads", *columns)
    for number, rank in enumerate(facts["ranks"]):
        sizes = [f"{nbytes:,} B" for nbytes in rank["kv_token"].values()]
        sizes += [scaled(rank["state_bytes"], "B")] if recurrent else []
        table.add_row(str(number), scaled(rank["weights"], "B"), str(rank["kv_heads"]), *sizes)
    return table
