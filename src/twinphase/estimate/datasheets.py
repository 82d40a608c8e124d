"""Published peaks of hardware that is not here, each figure with the document it stands in. Not for measured ceilings.

Vendors print the best that the silicon could do; nothing reaches it. FLOP/s are dense, without 2:4 sparsity, and with
accumulation in FP32. A multiplication and an addition are two. Where a vendor publishes no figure, it is None and stays
unknown. A figure that is computed from published parts carries its formula and is called computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinphase.errors import InvalidRequestError

__all__ = ["DATASHEETS", "PRECISIONS", "Datasheet", "Source", "find_datasheet"]

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
GB, TB = 1e9, 1e12


@dataclass(frozen=True)
class Source:
    """A document, and which figures were read in it: "bandwidth", "memory" or precisions."""

    title: str
    address: str
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Datasheet:
    """One product's published peaks.

    Attributes:
        name: what `--hardware` takes.
        title: the product.
        bandwidth: bytes a second of its memory; None is unpublished.
        memory: bytes; the largest configuration where there are several; None where it is whatever is fitted.
        peaks: operations a second, dense, by precision of `PRECISIONS`; one that is not in it is unpublished.
        sources: where each figure stands.
        computed: for a figure that no document states, the formula over published parts.
        note: what a reader should know of the figures.
    """

    name: str
    title: str
    bandwidth: float | None
    memory: float | None
    peaks: Mapping[str, float]
    sources: tuple[Source, ...]
    computed: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def figures(self) -> dict[str, float]:
        """Every figure that is known, by name."""
        memory = {"bandwidth": self.bandwidth, "memory": self.memory}
        return {name: value for name, value in memory.items() if value is not None} | dict(self.peaks)


def _tera(**peaks: float) -> dict[str, float]:
    return {precision: value * 1e12 for precision, value in peaks.items()}


ALL = ("bandwidth", "memory", *PRECISIONS)
_AMPERE = Source(
    "NVIDIA A100 Tensor Core GPU datasheet",
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    ALL,
)
_AMPERE_40 = Source(
    "NVIDIA A100 Tensor Core GPU datasheet (2020, 40 GB)",
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf",
    ALL,
)
_A100 = _tera(fp32=19.5, tf32=156, fp16=312, bf16=312, int8=624)
_HOPPER_PEAKS = Source(
    "NVIDIA H100 Tensor Core GPU Architecture (whitepaper), table of peak rates, dense and sparse",
    "https://resources.nvidia.com/en-us-tensor-core",
    PRECISIONS,
)
_HOPPER_SHEET = Source(
    "NVIDIA H100 Tensor Core GPU datasheet",
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
    ("bandwidth", "memory"),
)
_H100_SXM = _tera(fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9, int8=1978.9)

_NVIDIA = (
    Datasheet("a100-40gb-pcie", "NVIDIA A100 40GB PCIe", 1555 * GB, 40 * GB, _A100, (_AMPERE_40,)),
    Datasheet("a100-40gb-sxm", "NVIDIA A100 40GB SXM", 1555 * GB, 40 * GB, _A100, (_AMPERE_40,)),
    Datasheet("a100-80gb-pcie", "NVIDIA A100 80GB PCIe", 1935 * GB, 80 * GB, _A100, (_AMPERE,)),
    Datasheet("a100-80gb-sxm", "NVIDIA A100 80GB SXM", 2039 * GB, 80 * GB, _A100, (_AMPERE,)),
    Datasheet(
        "h100-pcie",
        "NVIDIA H100 80GB PCIe",
        2.0 * TB,
        80 * GB,
        _tera(fp32=51.2, tf32=378, fp16=756, bf16=756, fp8=1513, int8=1513),
        (_HOPPER_PEAKS, _HOPPER_SHEET),
    ),
    Datasheet("h100-sxm", "NVIDIA H100 80GB SXM", 3.35 * TB, 80 * GB, _H100_SXM, (_HOPPER_PEAKS, _HOPPER_SHEET)),
    Datasheet(
        "h200-sxm",
        "NVIDIA H200 141GB SXM",
        4.8 * TB,
        141 * GB,
        _H100_SXM,
        (
            Source(
                "NVIDIA H200 product page", "https://www.nvidia.com/en-us/data-center/h200/", ("bandwidth", "memory")
            ),
            _HOPPER_PEAKS,
        ),
        note="The H200 page prints only figures with sparsity, the same as the H100's: the dense ones are the H100's.",
    ),
    Datasheet(
        "b200",
        "NVIDIA B200 180GB (HGX and DGX B200, 1,000 W)",
        8.0 * TB,
        180 * GB,
        _tera(tf32=1100, fp16=2250, bf16=2250, fp8=4500, int8=4500),
        (
            Source(
                "NVIDIA Blackwell Architecture Technical Brief, HGX B200, dense",
                "https://resources.nvidia.com/en-us-blackwell-architecture",
                PRECISIONS,
            ),
            Source(
                "NVIDIA DGX B200 datasheet: 1,440 GB and 64 TB/s in all, of eight GPUs",
                "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet",
                ("bandwidth", "memory"),
            ),
        ),
        note="Dense FP32 is left unknown: NVIDIA's documents give different figures.",
    ),
    Datasheet(
        "l40s",
        "NVIDIA L40S",
        864 * GB,
        48 * GB,
        _tera(fp32=91.6, tf32=183, fp16=362.05, bf16=362.05, fp8=733, int8=733),
        (Source("NVIDIA L40S datasheet", "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413", ALL),),
    ),
    Datasheet(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090",
        1008 * GB,
        24 * GB,
        _tera(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3, int8=660.6),
        (
            Source(
                "NVIDIA Ada GPU Architecture (whitepaper), appendix A",
                "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
                ALL,
            ),
        ),
        note="FP16 and FP8 with FP32 accumulation; with FP16 accumulation NVIDIA gives twice as much.",
    ),
)

_AMD_GPUS = (
    Datasheet(
        "mi300x",
        "AMD Instinct MI300X",
        5.3 * TB,
        192 * GB,
        _tera(fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9, int8=2614.9),
        (
            Source(
                "AMD Instinct MI300X Accelerator data sheet",
                "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
                ALL,
            ),
        ),
    ),
)


def _apple(name: str, bandwidth: float | None, memory: float, title: str, path: str, **more: str) -> Datasheet:
    """A chip of Apple's, which publishes bandwidth and capacity, but FP16 rates of none and FP32 of few."""
    address = path if path.startswith("https:") else f"https://www.apple.com/{path}"
    source = Source(title, address, ("bandwidth", "memory", "fp32"))
    peaks = _tera(fp32=2.6) if name == "m1" else {}
    note = more.get("note", "Apple publishes no arithmetic peak of this GPU: what is bound by compute is unknown.")
    label = more.get("label", name.replace("-", " ").title())
    return Datasheet(f"apple-{name}", f"Apple {label}", bandwidth, memory, peaks, (source,), note=note)


_M1_PRO = "newsroom/2021/10/introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built/"
_M1_ULTRA = "newsroom/2022/03/apple-unveils-m1-ultra-the-worlds-most-powerful-chip-for-a-personal-computer/"
_M2 = "newsroom/2022/06/apple-unveils-m2-with-breakthrough-performance-and-capabilities/"
_M2_PRO = "newsroom/2023/01/apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows/"
_M3_SPECS, _M3_MAX_SPECS = "https://support.apple.com/en-us/117735", "https://support.apple.com/en-us/117736"
_M4_PRO = "newsroom/2024/10/apple-introduces-m4-pro-and-m4-max/"
_M3_TITLE = "MacBook Pro (14-inch, November 2023) Technical Specifications"
_APPLE = (
    _apple(
        "m1",
        None,
        16 * GB,
        "Apple unleashes M1",
        "newsroom/2020/11/apple-unleashes-m1/",
        note="Apple published no memory bandwidth of the M1, only that the M2's 100 GB/s are 50 percent more.",
    ),
    _apple("m1-pro", 200 * GB, 32 * GB, "Introducing M1 Pro and M1 Max", _M1_PRO),
    _apple("m1-max", 400 * GB, 64 * GB, "Introducing M1 Pro and M1 Max", _M1_PRO),
    _apple("m1-ultra", 800 * GB, 128 * GB, "Apple unveils M1 Ultra", _M1_ULTRA),
    _apple("m2", 100 * GB, 24 * GB, "Apple unveils M2", _M2),
    _apple("m2-pro", 200 * GB, 32 * GB, "Apple unveils M2 Pro and M2 Max", _M2_PRO),
    _apple("m2-max", 400 * GB, 96 * GB, "Apple unveils M2 Pro and M2 Max", _M2_PRO),
    _apple("m2-ultra", 800 * GB, 192 * GB, "Apple introduces M2 Ultra", "newsroom/2023/06/apple-introduces-m2-ultra/"),
    _apple("m3", 100 * GB, 24 * GB, _M3_TITLE, _M3_SPECS),
    _apple("m3-pro", 150 * GB, 36 * GB, _M3_TITLE, _M3_MAX_SPECS),
    _apple("m3-max-30-gpu", 300 * GB, 96 * GB, _M3_TITLE, _M3_MAX_SPECS, label="M3 Max, 30-core GPU"),
    _apple("m3-max-40-gpu", 400 * GB, 128 * GB, _M3_TITLE, _M3_MAX_SPECS, label="M3 Max, 40-core GPU"),
    _apple("m3-ultra", 819 * GB, 512 * GB, "Mac Studio (2025) Technical Specifications", "mac-studio/specs/"),
    _apple("m4", 120 * GB, 32 * GB, "Apple introduces M4 Pro and M4 Max", _M4_PRO),
    _apple("m4-pro", 273 * GB, 64 * GB, "Apple introduces M4 Pro and M4 Max", _M4_PRO),
    _apple(
        "m4-max-32-gpu",
        410 * GB,
        36 * GB,
        "Mac Studio (2025) Technical Specifications",
        "mac-studio/specs/",
        label="M4 Max, 32-core GPU",
    ),
    _apple(
        "m4-max-40-gpu", 546 * GB, 128 * GB, "Apple introduces M4 Pro and M4 Max", _M4_PRO, label="M4 Max, 40-core GPU"
    ),
)


def _server(
    name: str,
    title: str,
    *,
    channels: int,
    rate: int,
    cores: int,
    clock: float,
    per_cycle: Mapping[str, int],
    sources: tuple[Source, ...],
    note: str = "",
) -> Datasheet:
    """One socket of a server processor: figures computed from published parts, by formulas that are kept.

    Args:
        name: as in `Datasheet`.
        title: as in `Datasheet`.
        channels: of memory, 8 bytes wide.
        rate: millions of transfers a second on each.
        cores: of the socket.
        clock: published base clock in GHz.
        per_cycle: operations a cycle of one core, by precision.
        sources: as in `Datasheet`.
        note: as in `Datasheet`.
    """
    formulas = {"bandwidth": f"{channels} channels x {rate} MT/s x 8 bytes"}
    peaks = {precision: cores * clock * 1e9 * operations for precision, operations in per_cycle.items()}
    formulas |= {
        precision: f"{cores} cores x {clock} GHz base clock x {operations} operations a cycle"
        for precision, operations in per_cycle.items()
    }
    fitted = "Memory is whatever is fitted: give --memory. " + note
    return Datasheet(name, title, channels * rate * 8e6, None, peaks, sources, formulas, fitted.strip())


_AMX = Source(
    "Intel: Accelerate Artificial Intelligence Workloads with Intel AMX (2,048 INT8 or 1,024 BF16 operations a cycle)",
    "https://www.intel.com/content/www/us/en/products/docs/accelerator-engines/advanced-matrix-extensions/ai-solution-brief.html",
    ("bf16", "int8"),
)
_INTEL_CYCLE = {"fp32": 64, "bf16": 1024, "int8": 2048}  # 2 AVX-512 FMA units of 16 lanes; AMX
_AVX_CLOCK = "Under AVX-512 and AMX the clock differs from the base clock, either way."


def _ark(name: str, path: str) -> tuple[Source, ...]:
    address = f"https://www.intel.com/content/www/us/en/products/sku/{path}/specifications.html"
    return (Source(f"Intel ARK: {name} (cores, base clock, channels, FMA units)", address, ("bandwidth", "fp32")), _AMX)


def _epyc(model: str, path: str, guide: str, number: str) -> tuple[Source, ...]:
    address = f"https://www.amd.com/en/products/processors/server/epyc/{path}/amd-epyc-{model}.html"
    return (
        Source(f"AMD EPYC {model} product page (cores, base clock, channels)", address, ("bandwidth",)),
        Source(f"{guide}, publication {number}: two FMA units", "https://docs.amd.com/", ("fp32",)),
    )


_CPUS = (
    _server(
        "epyc-9654",
        "AMD EPYC 9654 (Genoa), one socket",
        channels=12,
        rate=4800,
        cores=96,
        clock=2.4,
        per_cycle={"fp32": 32},  # 2 FMA units of 256 bits
        sources=_epyc("9654", "4th-generation-9004-and-8004-series", "Software Optimization Guide for Zen 4", "57647"),
        note="Boost clocks give more than the computed peak.",
    ),
    _server(
        "epyc-9755",
        "AMD EPYC 9755 (Turin), one socket",
        channels=12,
        rate=6000,
        cores=128,
        clock=2.7,
        per_cycle={"fp32": 64},  # 2 FMA units of 512 bits
        sources=_epyc("9755", "9005-series", "Software Optimization Guide for Zen 5", "58455"),
        note="AMD also names DDR5-6400 for chosen platforms. Boost clocks give more than the computed peak.",
    ),
    _server(
        "xeon-8480+",
        "Intel Xeon Platinum 8480+ (Sapphire Rapids), one socket",
        channels=8,
        rate=4800,
        cores=56,
        clock=2.0,
        per_cycle=_INTEL_CYCLE,
        sources=_ark("Xeon Platinum 8480+", "231746/intel-xeon-platinum-8480-processor-105m-cache-2-00-ghz"),
        note=_AVX_CLOCK,
    ),
    _server(
        "xeon-8592+",
        "Intel Xeon Platinum 8592+ (Emerald Rapids), one socket",
        channels=8,
        rate=5600,
        cores=64,
        clock=1.9,
        per_cycle=_INTEL_CYCLE,
        sources=_ark("Xeon Platinum 8592+", "237261/intel-xeon-platinum-8592-processor-320m-cache-1-90-ghz"),
        note=_AVX_CLOCK,
    ),
    _server(
        "xeon-6980p",
        "Intel Xeon 6980P (Granite Rapids), one socket, DDR5-6400",
        channels=12,
        rate=6400,
        cores=128,
        clock=2.0,
        per_cycle=_INTEL_CYCLE,
        sources=_ark("Xeon 6980P", "240777/intel-xeon-6980p-processor-504m-cache-2-00-ghz"),
        note="MRDIMMs at 8,800 MT/s have 844.8 GB/s: give --bandwidth. " + _AVX_CLOCK,
    ),
    _server(
        "graviton4",
        "AWS Graviton4, one socket",
        channels=12,
        rate=5600,
        cores=96,
        clock=2.8,
        per_cycle={"fp32": 32},  # 4 vector units of 128 bits
        sources=(
            Source(
                "AWS Graviton Technical Guide (cores, clock without turbo, vector units, 12 channels of DDR5)",
                "https://github.com/aws/aws-graviton-getting-started",
                ("bandwidth", "fp32"),
            ),
            Source(
                "AWS unveils next generation AWS-designed chips (96 cores, DDR5-5600)",
                "https://press.aboutamazon.com/2023/11/aws-unveils-next-generation-aws-designed-chips",
                ("bandwidth",),
            ),
        ),
        note="2.7 GHz in the instances of two sockets.",
    ),
)

DATASHEETS: Mapping[str, Datasheet] = {sheet.name: sheet for sheet in (*_NVIDIA, *_AMD_GPUS, *_APPLE, *_CPUS)}


def find_datasheet(name: str, instead: str = "") -> Datasheet:
    """The datasheet of that name, or the only one whose name begins with it.

    Args:
        name: of a product; case does not matter.
        instead: what else can be done, as the beginning of "... one of: NAMES".

    Raises:
        InvalidRequestError: none, or several; the message names them.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in DATASHEETS:
        return DATASHEETS[wanted]
    found = [known for known in DATASHEETS if wanted and known.startswith(wanted)]
    if len(found) == 1:
        return DATASHEETS[found[0]]
    if found:
        raise InvalidRequestError(f"--hardware {name!r} is {len(found)} products.", f"Use one of: {', '.join(found)}.")
    raise InvalidRequestError(
        f"There is no datasheet of {name[:100]!r}.",
        f"{instead or 'Use'} one of: {', '.join(DATASHEETS)}.",
    )
