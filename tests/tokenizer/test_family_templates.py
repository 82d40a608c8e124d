"""Templates for models without one, compared with the formats in the model cards."""

from __future__ import annotations

import pytest

from twinphase.tokenizer.chat_template import ChatTemplate
from twinphase.tokenizer.family_templates import PLAIN, family_template

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
]
EXPECTED = {
    "ChatML": (
        ["<|im_start|>", "<|im_end|>"],
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "Gemma": (
        ["<start_of_turn>", "<end_of_turn>"],
        "<s><start_of_turn>user\nS\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
        "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n",
    ),
    "Gemma 4": (
        ["<|turn>", "<turn|>"],
        "<s><|turn>system\nS<turn|>\n<|turn>user\nA<turn|>\n<|turn>model\nB<turn|>\n"
        "<|turn>user\nC<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    ),
    "Llama 3": (
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Granite": (
        ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>A<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>B<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>C<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "Phi-3": (
        ["<|user|>", "<|assistant|>", "<|end|>"],
        "<|system|>\nS<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n"
        "<|user|>\nC<|end|>\n<|assistant|>\n",
    ),
    "Mistral": (["[INST]", "[/INST]"], "<s>[INST]S\n\nA[/INST]B</s>[INST]C[/INST]"),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_a_familys_format_is_found_by_its_control_tokens(family):
    tokens, expected = EXPECTED[family]
    source, name = family_template({"<s>", "</s>", *tokens}.__contains__)
    assert name == family
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render(CHAT) == expected
    assert family_template(set(tokens[1:]).__contains__) == (PLAIN, None)


def test_without_a_family_the_contents_alone_are_the_prompt():
    assert ChatTemplate(PLAIN, bos_token="<s>").render(CHAT[1:]) == "<s>A\n\nB\n\nC"
