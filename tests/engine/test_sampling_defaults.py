"""Default sampling values: the model's own, the catalogue's, or the API's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase.config import EngineConfig
from twinphase.engine.frontends.text import ModelText
from twinphase.errors import CheckpointError, InvalidRequestError
from twinphase.weights.gguf import open_gguf

USER = [{"role": "user", "content": "the world"}]
IN_GGUF = {
    "general.sampling.temp": 0.30000001192092896,  # as 32 bits have it
    "general.sampling.top_k": 20,
    "general.sampling.penalty_repeat": 1.5,
    "general.sampling.top_p": 7.0,  # no request could have it
    "general.sampling.sequence": "kt",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=64, seed=1)


@pytest.fixture(scope="module")
def checkpoint(path):
    return open_gguf(path)


def defaults(checkpoint, **fields):
    text = ModelText(checkpoint)
    text.generation = EngineConfig(**fields)
    return text.sampling_defaults


def test_a_gguf_file_may_hold_them(checkpoint):
    own = replace(checkpoint, metadata={**checkpoint.metadata, **IN_GGUF})
    found = defaults(own)
    assert found.values == {"temperature": 0.3, "top_k": 20, "repetition_penalty": 1.5}
    assert "temperature 0.3, top_p 1, top_k 20" in str(found) and "the model's file" in str(found)
    assert defaults(own, generation_config="vllm").values == {}
    assert defaults(own, generation_config="none").values == {}
    changed = defaults(own, override_generation_config={"temperature": 0})
    assert changed.values == {**found.values, "temperature": 0}
    assert "--override-generation-config" in str(changed)


def test_a_folder_has_a_file_of_them(checkpoint, tmp_path):
    own = {"temperature": 0.6, "do_sample": True, "max_new_tokens": 9, "top_p": None, "top_k": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    folder = replace(checkpoint, path=tmp_path, config={})
    assert defaults(folder).values == {"temperature": 0.6, "max_tokens": 9}
    for named in (tmp_path, tmp_path / "generation_config.json"):  # of another model
        found = defaults(checkpoint, generation_config=str(named))
        assert found.values == {"temperature": 0.6, "max_tokens": 9}
        assert str(named) in str(found)


@pytest.mark.parametrize("content", [None, "[1]", "{", "\udcff"])
def test_a_file_that_is_none_is_refused(checkpoint, tmp_path, content):
    if content is not None:
        name = tmp_path / "generation_config.json"
        name.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        defaults(checkpoint, generation_config=str(tmp_path))


def test_smollm2_has_those_of_its_makers(checkpoint):
    names = ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-1.7b-instruct-q8_0.gguf")
    for name in names:
        found = defaults(replace(checkpoint, path=Path(name)))
        assert str(found).startswith("temperature 0.2, top_p 0.9 (")
    assert str(defaults(checkpoint)) == "temperature 1, top_p 1 (from the API's defaults)"


def test_a_conversation_without_a_system_message_has_that_of_the_catalogue(path, tmp_path):
    model = shutil.copy(path, tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    user = {"role": "user", "content": "the world"}
    empty = {"role": "system", "content": ""}

    def prompt(messages, generation_config="auto"):
        text = ModelText.of_model(model)
        text.generation = EngineConfig(generation_config=generation_config)
        return text.encode_chat(messages, None, {}, None).token_ids

    assert prompt([user]) == prompt([empty, user]) == prompt([empty, user], "vllm")
    assert prompt([user], "vllm") != prompt([user])
    other = [{"role": "system", "content": "other"}, user]
    assert prompt(other) == prompt(other, "vllm")


@pytest.mark.parametrize("values", [{"temprature": 1}, {"top_k": "many"}, {"top_p": 2}])
def test_wrong_values_are_refused_at_once(values):
    with pytest.raises(InvalidRequestError):
        EngineConfig(override_generation_config=values)


def test_an_llm_uses_them_where_no_parameters_are_given(path):
    prompt = list(range(40, 60))
    llm = LLM(path, override_generation_config={"temperature": 0})
    params = SamplingParams(temperature=0)
    assert llm.get_default_sampling_params() == params
    assert llm.get_default_sampling_params(max_tokens=3).max_tokens == 3
    (given,) = llm.generate([prompt], params, use_tqdm=False)
    (left_out,) = llm.generate([prompt], use_tqdm=False)
    assert left_out.outputs[0].token_ids == given.outputs[0].token_ids
    assert len(left_out.outputs[0].token_ids) == 16
    *_, last = llm.stream(prompt)
    assert last.output.outputs[0].token_ids == given.outputs[0].token_ids


def test_a_chat_without_parameters_may_take_the_rest_of_the_context(path):
    llm = LLM(path, override_generation_config={"temperature": 0})
    (answer,) = llm.chat(USER, use_tqdm=False)
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == 64
    assert "token_ids" in repr(answer) and "timeline" not in repr(answer)
    *_, last = llm.stream(USER)
    assert last.output.outputs[0].token_ids == answer.outputs[0].token_ids
    limited = LLM(path, override_generation_config={"temperature": 0, "max_tokens": 5})
    (answer,) = limited.chat(USER, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 5
