"""aider, a coding agent: asked to add a function to a file, it gets an answer and exits with 0."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from served import KEY, MODEL, URL, works

for prefix, base in (("openai", f"{URL}/v1"), ("anthropic", URL), ("ollama_chat", URL)):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sums.py")
        file.write_text("def add(a, b):\n    return a + b\n")
        names = {"openai": "OPENAI", "anthropic": "ANTHROPIC", "ollama_chat": "OLLAMA"}
        keys = {f"{names[prefix]}_API_BASE": base, f"{names[prefix]}_API_KEY": KEY}
        command = [
            Path(sys.executable).with_name("aider"),
            "--model",
            f"{prefix}/{MODEL}",
            "--message",
            "Add a function subtract(a, b) that returns a - b.",
            "--no-git",
            "--yes-always",
            "--no-check-update",
            "--analytics-disable",
            "--no-show-model-warnings",
            "--edit-format",
            "whole",
            "--map-tokens",
            "0",
            file.name,
        ]
        run = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | keys | {"HOME": folder, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0 and "Tokens:" in run.stdout and "litellm." not in run.stdout, (
            run.stdout + run.stderr
        )
        edited = (
            "the file was edited" if "subtract" in file.read_text() else "the model made no edit"
        )
        works(f"{prefix}: {edited}")
