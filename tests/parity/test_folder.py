"""A whole Hugging Face folder (weights, tokenizer, template) answers as transformers does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.tokenizer.tiny_folder import save_folder, trained
from tiny_families import COMMON, make_model

from twinphase.engine.frontends.llm import LLM
from twinphase.errors import TwinphaseError
from twinphase.request import SamplingParams

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>assistant:"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_folder(
        path,
        trained("bytes"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
    make_model("qwen3").save_pretrained(path)
    return path


def test_it_continues_and_chats_as_transformers(folder):
    llm = LLM(folder, backend="reference")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    messages = [{"role": "user", "content": "hello world"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    for output, ids in (
        (llm.generate(["hello world"], GREEDY)[0], tokenizer("hello world")["input_ids"]),
        (llm.chat([messages], GREEDY)[0], chat),
    ):
        assert output.prompt_token_ids == list(ids)
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert output.outputs[0].token_ids == expected[0, len(ids) :].tolist()


def test_it_is_quantized_while_it_loads(folder):
    plain = LLM(folder, backend="reference")
    eight = LLM(folder, backend="reference", quantization="q8_0")
    assert {info.type for info in eight.checkpoint.tensors.values()} == {"Q8_0", "F32"}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    first, second = (
        llm.generate(["hello world"], params)[0].outputs[0].logprobs for llm in (plain, eight)
    )
    assert first and second
    best = next(iter(first[0]))
    np.testing.assert_allclose(first[0][best].logprob, second[0][best].logprob, atol=0.1)
    with pytest.raises(TwinphaseError, match="quantization"):
        LLM(folder, backend="reference", quantization="q3")


def test_a_folder_of_another_architecture_is_refused_by_name(folder, tmp_path):
    config = transformers.BloomConfig(**{k: COMMON[k] for k in ("vocab_size", "hidden_size")})
    config.save_pretrained(tmp_path)
    with pytest.raises(TwinphaseError, match=r"'bloom'.*qwen3"):
        LLM(tmp_path, backend="reference")
