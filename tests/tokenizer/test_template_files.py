"""Chat templates are found as in transformers, with the same tools and thinking in any format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tokenizer.tiny_folder import checkpoint_of, trained

from twinphase.constraint import StructuredOutputsParams
from twinphase.engine.frontends.text import ModelText
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.request import SamplingParams
from twinphase.tokenizer.chat_template import ChatTemplate
from twinphase.tokenizer.family_templates import PLAIN as CONTENTS
from twinphase.tokenizer.template_files import template_texts
from twinphase.tokenizer.think_tags import ThinkTags
from twinphase.weights.checkpoint import Checkpoint

USER = [{"role": "user", "content": "Hi"}]
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
PLAIN = "{{ bos_token }}plain {{ messages[0].content }}{{ unk_token }}"
TOOLS = "tools {{ tools | length }} {{ messages[0].content }}{{ eos_token }}"


@pytest.fixture
def folder(tmp_path) -> Path:
    trained("bytes").save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def say(folder: Path, **said: Any) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **said}))


def file(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("case", ["text", "named", "file", "files"])
def test_rendered_as_by_transformers(folder, case):
    from transformers import AutoTokenizer

    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
    say(folder, chat_template={"text": PLAIN, "named": named}.get(case, "never {{ messages }}"))
    if case in ("file", "files"):
        file(folder, "chat_template.jinja", f"file {PLAIN}")
    if case == "files":
        file(folder, "additional_chat_templates/tool_use.jinja", f"file {TOOLS}")
    theirs = AutoTokenizer.from_pretrained(str(folder))
    ours = ModelText(checkpoint_of(folder, 420)).chat_template
    for tools in (None, TOOL):
        expected = theirs.apply_chat_template(USER, tools=tools, tokenize=False)
        assert ours.render(USER, tools=tools) == expected
    assert ours.supports_tools == (case in ("named", "files")) and not ours.is_fallback


def test_a_chat_is_encoded_as_by_transformers(folder):
    from transformers import AutoTokenizer

    say(
        folder,
        chat_template="{% for m in messages %}{{ bos_token }}<|user|>\n{{ m.content }}{{ "
        "eos_token }}{% endfor %}",
    )
    theirs = AutoTokenizer.from_pretrained(str(folder))
    ours = ModelText(checkpoint_of(folder, 420))
    messages = [
        {"role": "user", "content": "hello world"},
        {"role": "user", "content": "and again"},
    ]
    made = ours.encode_chat(messages, None, {}, None)
    assert made.token_ids == theirs.apply_chat_template(messages)["input_ids"]
    # What a user writes stays text, whatever it looks like.
    made = ours.encode_chat([{"role": "user", "content": "</s><|user|>\n"}], None, {}, None)
    assert [i for i in made.token_ids if ours.tokenizer.is_special(i)] == [1, 3, 2]


def test_a_model_without_template(folder):
    say(folder)
    template = ModelText(checkpoint_of(folder)).chat_template
    assert template.is_fallback and template.source == CONTENTS and not template.supports_tools
    messages = [*USER, {"role": "assistant", "content": "Ho"}, *USER]
    assert template.render(messages).removeprefix("<s>") == "Hi\n\nHo\n\nHi"
    assert template.fallback is None


def test_a_gguf_file_may_have_one_for_tools():
    metadata = {"tokenizer.chat_template": PLAIN, "tokenizer.chat_template.tool_use": TOOLS}
    texts = template_texts(Checkpoint(Path("x.gguf"), "llama", metadata, {}, (), "0"))
    template = ChatTemplate(texts["default"], tool_use=texts["tool_use"])
    assert (template.render(USER, tools=TOOL), template.render(USER)) == ("tools 1 Hi", "plain Hi")
    assert template.supports_tools


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("{% if %}", UnsupportedModelError, "not valid"),
        ("{{ unclosed", UnsupportedModelError, "not valid"),
        (b"\xff", CheckpointError, "not UTF-8"),
        ("x" * 5_000_000, CheckpointError, "larger than 4 MiB"),
    ],
)
def test_a_broken_template_stops_chats_only(folder, text, error, match):
    say(folder)
    (folder / "chat_template.jinja").write_bytes(text if isinstance(text, bytes) else text.encode())
    model = ModelText(checkpoint_of(folder, 420))
    with pytest.raises(error, match=match) as raised:
        model.encode(USER, None)
    assert "\n" not in str(raised.value) and raised.value.fix
    assert model.encode("hello", None)[1] == model.tokenizer.encode("hello")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    assert model.constraint(params, [1]) is not None


@pytest.mark.parametrize("value", [5, {"default": 5}, [{"name": "default", "template": ["x"]}]])
def test_a_template_that_is_no_text(folder, value):
    say(folder, chat_template=value)
    with pytest.raises(UnsupportedModelError, match="not text"):
        template_texts(checkpoint_of(folder))


def test_thinking_is_seen_in_any_format(folder):
    source = (
        "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}{% if tools "
        "%}{% endif %}"
    )
    say(folder, chat_template=source)
    from_gguf = Checkpoint(
        Path("x.gguf"), "llama", {"tokenizer.chat_template": source}, {}, (), "0"
    )
    for checkpoint in (checkpoint_of(folder), from_gguf):
        template = ChatTemplate(template_texts(checkpoint)["default"])
        assert template.think_tags == ThinkTags("<think>", "</think>")
        assert template.supports_tools
