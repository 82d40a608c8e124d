"""The ceilings of the device that a configuration runs on, kept or measured."""

from __future__ import annotations

from collections.abc import Callable

from twinphase.backends.base import Device, Units
from twinphase.backends.device import open_device
from twinphase.config import EngineConfig
from twinphase.phases.hardware import Ceilings, load_ceilings, processor_name, save_ceilings
from twinphase.weights.checkpoint import Checkpoint


def device_of(config: EngineConfig) -> Device:
    threads = config.rank_threads and config.rank_threads * config.tensor_parallel_size
    return open_device(config.backend, threads, config.isa, config.device, config.dtype)


def compute_units(checkpoint: Checkpoint, config: EngineConfig) -> Units:
    """Which arithmetic unit does the linear layers, and which the two products of attention."""
    layers = {
        (info.type, len(info.shape))
        for name, info in checkpoint.tensors.items()
        if name.startswith("blk.")
    }
    return device_of(config).units({(name, dims) for name, dims in layers if dims >= 2})


def measured_ceilings(config: EngineConfig) -> Ceilings | None:
    """What this machine was measured to do, if it was."""
    device = device_of(config)
    return load_ceilings(device.threads, device.ceilings) if device.ceilings else None


def measure_ceilings(
    config: EngineConfig,
    repetitions: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Ceilings]:
    """Measure what this machine can do at best (some seconds per repetition); nothing is stored.

    Raises:
        InvalidRequestError: this processor cannot run `config.isa`.
        CeilingsError: the measuring process failed.
    """
    device = device_of(config)
    if config.backend == "cpu":
        from twinphase.backends.cpu.ceilings import measure_repeatedly

        rates = measure_repeatedly(device.threads, device.isa, repetitions, progress)
    else:
        rates = [device.measure() for _ in range(repetitions)]
    processor = processor_name()
    return [Ceilings(processor, device.threads, device.ceilings, **vars(one)) for one in rates]


def learn_ceilings(config: EngineConfig) -> tuple[Ceilings, OSError | None]:
    """Measure this machine's ceilings, for some seconds; keep the best values so far.

    Returns:
        The ceilings, and why they could not be kept, if they could not.
    """
    known = measured_ceilings(config)
    [found] = measure_ceilings(config)
    best = known.merged(found) if known else found
    try:
        save_ceilings(best)
    except OSError as error:
        return best, error
    return best, None
