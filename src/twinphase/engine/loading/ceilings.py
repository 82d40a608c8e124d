"""Finds the ceilings of a configuration's device, from the cache folder or by measuring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from twinphase.backends.base import Device, Units
from twinphase.backends.device import open_device
from twinphase.config import EngineConfig, available_cores, cores_of_each_engine
from twinphase.errors import TwinphaseError
from twinphase.phases.hardware import (
    Ceilings,
    load_ceilings,
    must_measure,
    processor_name,
    save_ceilings,
)
from twinphase.weights.checkpoint import Checkpoint

# The owner must be idle this long before the first measurement; it is also the longest wait before
# later ones.
IDLE_SECONDS = 3.0
LONGEST_IDLE_SECONDS = 3600.0


def device_of(config: EngineConfig) -> Device:
    threads = config.rank_threads and config.rank_threads * config.tensor_parallel_size
    return open_device(config.backend, threads, config.isa, config.device, config.dtype)


def compute_units(checkpoint: Checkpoint, config: EngineConfig) -> Units:
    """The arithmetic units of the linear layers, and of the two products of attention."""
    layers = {
        (info.type, len(info.shape))
        for name, info in checkpoint.tensors.items()
        if name.startswith("blk.")
    }
    return device_of(config).units({(name, dims) for name, dims in layers if dims >= 2})


def measured_ceilings(config: EngineConfig) -> Ceilings | None:
    """The stored ceilings of this machine; None if they were not measured yet."""
    device = device_of(config)
    return load_ceilings(device.threads, device.ceilings) if device.ceilings else None


def measure_ceilings(
    config: EngineConfig,
    repetitions: int = 1,
    progress: Callable[[float, int], None] = lambda done, total: None,
    started: Callable[[Callable[[], None]], None] = lambda end: None,
) -> list[Ceilings]:
    """Measure the ceilings of this machine, which takes some seconds per repetition.

    Nothing is stored. With the cpu backend, `started` is called with a function that ends the
    measurement at once.

    Raises:
        InvalidRequestError: this processor cannot run `config.isa`.
        CeilingsError: the measuring process failed, or was ended.
    """
    device = device_of(config)
    if config.backend == "cpu":
        from twinphase.backends.cpu.ceilings import measure_repeatedly

        rates = measure_repeatedly(device.threads, device.isa, repetitions, progress, started)
    else:
        rates = [device.measure() for _ in range(repetitions)]
    processor = processor_name()
    return [Ceilings(processor, device.threads, device.ceilings, **vars(one)) for one in rates]


def keep_ceilings(known: Ceilings | None, found: Ceilings) -> Ceilings | None:
    """Store and return the better of two ceilings, unless the new measurement was disturbed.

    Raises:
        OSError: the file could not be written.
    """
    if found.provisional:
        return known
    best = known.merged(found) if known else found
    save_ceilings(best)
    return best


class IdleMeasurement:
    """Measures this machine's ceilings in the background while its owner is idle.

    A measurement begins after some idle seconds, and ends at once when the owner gets work. An
    interrupted or disturbed measurement is discarded, and the next one waits longer.
    """

    def __init__(
        self,
        config: EngineConfig,
        measure: Callable[..., list[Ceilings]] = measure_ceilings,
        patience: float = IDLE_SECONDS,
    ) -> None:
        self._config = config
        self._measure = measure
        self._patience = patience
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether ceilings are missing or doubted, and a measurement would disturb no other engine.

        Only measurements of the cpu backend can be interrupted.
        """
        return (
            self._config.backend == "cpu"
            and cores_of_each_engine() == available_cores()
            and must_measure(measured_ceilings(self._config))
        )

    def begin(self) -> None:
        """Note that the owner is idle from now on."""
        self.interrupt()
        if self.is_due:
            self._stop = threading.Event()
            threading.Thread(target=self._run, args=(self._stop,), daemon=True).start()

    def interrupt(self) -> None:
        """End the measurement because the owner has work; the cores are free on return."""
        self._stop.set()
        with self._lock:
            if self._end is not None:
                self._end()

    def __enter__(self) -> IdleMeasurement:
        self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.interrupt()

    def _run(self, stop: threading.Event) -> None:
        if stop.wait(self._patience):
            return
        self._patience = min(LONGEST_IDLE_SECONDS, 4 * self._patience)

        def started(end: Callable[[], None]) -> None:
            with self._lock:
                self._end = end
            if stop.is_set():
                end()

        try:
            with suppress(TwinphaseError, OSError):
                [found] = self._measure(self._config, 1, started=started)
                keep_ceilings(measured_ceilings(self._config), found)
        finally:
            with self._lock:
                self._end = None
