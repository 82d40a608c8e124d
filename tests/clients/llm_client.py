"""The `llm` command: a prompt over OpenAI's API, and over Ollama's with its plugin."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from served import KEY, MODEL, QUESTION, URL, works

with tempfile.TemporaryDirectory() as home:
    named = {
        "model_id": "served",
        "model_name": MODEL,
        "api_base": f"{URL}/v1",
        "api_key_name": "openai",
        "supports_tools": True,
        "supports_schema": True,
    }
    Path(home, "extra-openai-models.yaml").write_text(json.dumps([named]))  # JSON is YAML
    keys = {"OPENAI_API_KEY": KEY, "OLLAMA_API_KEY": KEY, "OLLAMA_HOST": URL}
    environment = os.environ | keys | {"LLM_USER_PATH": home}

    def llm(*arguments: str) -> str:
        command = [Path(sys.executable).with_name("llm"), *arguments, "--key", KEY]
        return subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    assert "Paris" in llm("-m", "served", QUESTION, "-o", "temperature", "0")
    assert "Paris" in llm("-m", "served", QUESTION, "--no-stream")
    works("prompt, streamed and not")
    assert json.loads(llm("-m", "served", "--schema", "name, age int", "Ann is 31 years old."))[
        "age"
    ]
    works("schema")
    assert "Paris" in llm("-m", f"ollama/{MODEL}", QUESTION, "-o", "temperature", "0")
    works("ollama: prompt")
