"""A target that runs Hugging Face transformers on PyTorch in this process, as a common baseline.

The model is called directly with a KV cache, because `generate()` adds its own work to every step.
The model is not compiled, so PyTorch could be faster.
"""

from __future__ import annotations

import inspect
import time
from pathlib import Path

from twinphase import ModelNotFoundError, UnsupportedModelError, available_cores
from twinphase_bench.extras import require
from twinphase_bench.targets.static_batch import Generated
from twinphase_bench.targets.target import TargetFacts

INSTALL = "transformers torch"
PREFILL = (
    "One call of the model with the whole prompt and an empty KV cache, logits of the last "
    "position, argmax of them."
)
DECODE = (
    "One call of the model with one token for each sequence (a static batch of equal lengths) and "
    "argmax."
)


class Transformers:
    """A model in a folder, loaded by transformers in eager mode with its default attention."""

    def __init__(self, path: str, *, threads: int | None = None) -> None:
        """Load from a folder; nothing is fetched.

        Raises:
            MissingExtraError: torch or transformers is not installed.
            ModelNotFoundError: there is no such folder.
            UnsupportedModelError: transformers cannot load the model.
        """
        folder = Path(path).expanduser()
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path!r} is not the folder of a transformers model: it has no config.json.",
                "Give transformers:FOLDER with config.json and the weights in it.",
            )
        self._torch = require("torch", INSTALL)
        transformers = require("transformers", INSTALL)
        transformers.utils.logging.disable_progress_bar()
        threads = threads or available_cores()
        self._torch.set_num_threads(threads)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", local_files_only=True
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedModelError(
                f"transformers cannot load {path}: {reason}", "Try it in Python."
            ) from None
        self._model = model.eval()
        self._new_cache = transformers.DynamicCache
        # transformers 5.24 calls it `cache`, and warns about the old name.
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        text = model.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        dtype = str(model.dtype).removeprefix("torch.")
        self.facts = TargetFacts(
            name=f"transformers:{path}",
            kind="transformers",
            engine=f"transformers {transformers.__version__}, torch {self._torch.__version__}",
            model=folder.resolve().name,
            precision=f"{dtype} weights and KV cache",
            context_length=getattr(text, "max_position_embeddings", None),
            prefill_definition=PREFILL,
            decode_definition=DECODE,
            details={
                "threads": str(threads),
                "attention": str(getattr(model.config, "_attn_implementation", "unknown")),
            },
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generated:
        """Prefill all prompts in one call of the model, then decode one token of each per call."""
        tokens = self._torch.tensor(prompts)
        step_ends = []
        began = time.perf_counter()
        with self._torch.inference_mode():
            cache = self._new_cache()
            for _ in range(num_tokens):
                output = self._model(
                    input_ids=tokens, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}
                )
                # The shape is [sequences, 1].
                tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
                last = tokens[
                    :, 0
                    # On a GPU, the step is over only when its tokens are on the host.
                ].tolist()
                step_ends.append(time.perf_counter())
        return Generated(began, step_ends, last)

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""
