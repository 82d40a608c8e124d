"""Templates render as their models expect, and cannot run away."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from tests.tiny_gguf import write_tiny_gguf

from twinphase.errors import InvalidRequestError, TwinphaseError, UnsupportedModelError
from twinphase.tokenizer.chat_template import ChatTemplate
from twinphase.tokenizer.family_templates import CHATML
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import resolve_model

# A value twice as large after each iteration, shared so that it takes no memory, and what is done
# with it.
DOUBLING = (
    "{%% set t = namespace(x=1, y=1) %%}"
    "{%% for i in range(60) %%}{%% set t.y = t.x %%}{%% set t.x = %s %%}{%% endfor %%}{{ %s }}"
)
USER = [{"role": "user", "content": 'Hi <é> & "q"'}]


def render(
    source: str, messages: list[dict[str, object]] | None = None, **variables: object
) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(
        messages or USER, **variables
    )


@pytest.mark.model
def test_the_default_model():
    checkpoint = open_gguf(resolve_model())
    template = ChatTemplate.from_checkpoint(checkpoint, Tokenizer.from_checkpoint(checkpoint))
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([{"role": "system", "content": "S"}], add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n"
    )
    assert not template.is_fallback


def test_a_file_without_template_gets_chatml(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "cache"))
    checkpoint = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    metadata = {k: v for k, v in checkpoint.metadata.items() if k != "tokenizer.chat_template"}
    template = ChatTemplate.from_checkpoint(replace(checkpoint, metadata=metadata), tokenizer)
    assert template.is_fallback and template.source == CHATML
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_conventions_of_hugging_face():
    # Blocks leave no blank lines; tojson keeps characters and does not escape for HTML.
    assert render("{% if true %}\nx\n    {% endif %}\ny") == "x\ny"
    assert json.loads(render("{{ messages | tojson }}")) == USER
    assert "<é> &" in render("{{ messages | tojson(indent=2) }}")
    assert (
        render("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}")
        == "<s></s>TrueTrue"
    )
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    loop = (
        "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length "
        "}}{{ loop.revindex }}"
    )
    assert render(loop + "{% endfor %}", USER * 2) == "1TrueFalse222FalseTrue21"
    assert render("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}") == "none"
    assert (
        render("{{ 'a-%s-{}' % 'b' }}{{ '{}'.format(3) }}{{ '%d' | format(4) }}{{ 'a' ~ 1 }}")
        == "a-b-{}34a1"
    )
    assert render("{{ messages | map(attribute='role') | join(', ') }}") == "user"


def test_contents_in_several_texts_and_none():
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "part": "doc"}]
    show = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    absent: list[dict[str, object]] = [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
    ]
    assert (
        render(show, [{"role": "user", "content": texts}, {"role": "user", "content": []}, *absent])
        == "[a\nb][][][]"
    )
    asks = "{% for m in messages %}{{ m['content'] is not none }}{% endfor %}"
    assert render(asks, [*absent, *USER]) == "FalseFalseTrue"
    other = (
        "{% for m in messages %}{{ m.reasoning_content is none }}{{ '</think>' in m.content "
        "}}{% endfor %}"
    )
    assert render(other, absent[:1]) == "FalseFalse"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ({"content": 5}, "messages[1].content is of type int."),
        ("Hi", "messages[1] is of type str."),
        (
            {"content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content[0] is of type 'image_url'.",
        ),
        ({"content": ["Hi"]}, "messages[1].content[0] is of type 'str'."),
        ({"content": [{"type": "text"}]}, "messages[1].content[0].text is of type NoneType."),
        (
            {"content": [{"type": "text", "text": "", "part": ""}]},
            "messages[1].content[0].part is not a valid name.",
        ),
    ],
)
def test_contents_that_are_no_text_are_named(message, cause):
    with pytest.raises(InvalidRequestError) as raised:
        render(CHATML, [*USER, message])  # type: ignore[list-item]
    assert raised.value.cause == cause


def test_a_template_may_refuse_messages():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="template fails"):
        render("{{ messages[0]['content'] + 1 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(500) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) "
        "}}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set t = namespace(x='x') %}{% for i in range(60) %}{% set t.x = t.x ~ t.x %}{% "
        "endfor %}",
        "{% set t = namespace(x='x') %}{% for i in range(60) %}{% set t.x = t.x + t.x %}{% "
        "endfor %}",
        "{% set t = namespace(x=[1]) %}{% for i in range(60) %}{% set t.x = t.x + t.x %}{% "
        "endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}",
        "{{ 'x' * 10 ** 40 }}",
        "{{ 10 ** 10 ** 10 ** 64 ** 64 }}",
        "{% set t = namespace(x=3) %}{% for i in range(60) %}{% set t.x = t.x * t.x %}{% endfor %}",
        "{% set t = namespace(x=1) %}{% for i in range(60) %}{% set t.x = [t.x, t.x] %}{% endfor "
        "%}{{ t.x }}",
        "{% set t = namespace(x=1) %}{% for i in range(60) %}{% set t.x = [t.x, t.x] %}{% endfor "
        "%}{{ t.x | tojson }}",
        "{% set t = namespace(x=1, y=1) %}{% for i in range(60) %}{% set t.x = [t.x, t.x] %}{% "
        "set t.y = [t.y, t.y] %}"
        "{% endfor %}{{ t.x == t.y }}",
        "{% set b = 'x' * 1000000 %}{% set x %}{% for i in range(99999) %}{{ b[1:] }}{% endfor "
        "%}{% endset %}",
        "{% set b = 'x' * 1000000 %}{% set x %}{% for i in range(99999) %}{{ b | upper }}{% "
        "endfor %}{% endset %}",
        "{{ 'x' | center(10 ** 12) }}",
        "{{ 'x'.ljust(10 ** 12) }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%*d' % (999999999999, 1) }}",
        "{{ '{:>999999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 999999999999) }}",
        "{{ 'a'.replace('a', 'b' * 9999).replace('b', 'c' * 9999) }}",
        "{{ 'a' | replace('a', 'b' * 9999) | replace('b', 'c' * 9999) }}",
        "{{ ('x' * 9999).join(range(9999) | map('string') | list) }}",
        "{{ range(9999) | join('x' * 9999) }}",
        "{{ 'x\n' | indent(10 ** 12) }}",
        "{{ 'x\n' | indent(width=10 ** 12) }}",
        "{{ 'a' | replace(old='a', new='b' * 9999) | replace(old='b', new='c' * 9999) }}",
        "{{ range(99999) | join('x' * 3000000) }}",
        "{{ ('{0}' * 10000).format('x' * 3000000) }}",
        "{{ ('%(a)s' * 10000) % {'a': 'x' * 3000000} }}",
        "{% set b = 'x' * 3000000 %}{% for i in range(99999) %}{{ 'xy' in b }}{% endfor %}",
        "{% set b = 'x' * 3000000 %}{% for i in range(99999) %}{{ b.count('xy') }}{% endfor %}",
        "{% set b = ' ' * 3000000 %}{% for i in range(99999) %}{{ b | trim }}{% endfor %}",
        "{% set b = 'x ' * 999999 %}{% for i in range(99999) %}{{ b | wordcount }}{% endfor %}",
        DOUBLING % ("namespace(a=t.x, b=t.x)", "t.x"),
        DOUBLING % ("(t.x, t.x)", "{t.x: 1}"),
        DOUBLING % ("[t.x, t.x]", "[{'a': t.x}, {'a': t.y}] | groupby('a') | list"),
        DOUBLING % ("[t.x, t.x]", "[t.x] | select('equalto', t.y) | list"),
        DOUBLING % ("[t.x, t.x]", "[t.x].count(t.y)"),
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% if %}",
        "{{ unclosed",
        "{% include 'x' %}",
    ],
)
def test_hostile_templates_end_in_an_error(source):
    start = time.thread_time()  # of the processor, whatever else the machine does
    with pytest.raises(TwinphaseError) as raised:
        render(source)
    assert time.thread_time() - start < 20
    assert isinstance(raised.value, (InvalidRequestError, UnsupportedModelError))
    assert "\n" not in raised.value.cause


def test_long_messages_are_no_attack():
    messages = [{"role": "user", "content": "x" * 10_000_000}]
    assert len(ChatTemplate(None).render(messages)) > 10_000_000
    calls = (
        "{% for m in messages %}{{ m.content.strip().lstrip() if m.content.startswith('H') "
        "}}{% endfor %}"
    )
    assert len(render(calls, USER * 10_000)) > 100_000
