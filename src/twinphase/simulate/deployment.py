"""A deployment given by the options of `simulate` and `plan`, and its simulated fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from twinphase.backends.device import open_device
from twinphase.cluster.role import Role
from twinphase.config import EngineConfig, available_cores
from twinphase.errors import InvalidRequestError
from twinphase.estimate.estimate import cost_shape
from twinphase.estimate.inputs import (
    Hardware,
    Scenario,
    datasheet_hardware,
    units_for,
    weight_bytes,
)
from twinphase.estimate.known_models import read_shape
from twinphase.estimate.shapes import DecoderShape
from twinphase.phases.cost import CostModel
from twinphase.phases.work import ModelShape
from twinphase.simulate.calibration import Calibration
from twinphase.simulate.errors import coarsest
from twinphase.simulate.estimated import CPU, GPU, Efficiency, EstimatedCost
from twinphase.simulate.spec import FleetSpec, Front, WorkerSpec
from twinphase.speculative import speculative_config

# Share of a device's memory for weights and KV, as in vLLM; the rest is for activations and the
# runtime.
MEMORY_SHARE = 0.9
# Bytes per second of KV blocks between two workers of one machine, and over a link of 200 Gbit/s.
LOCAL_KV_BYTES_PER_SECOND = 4e8
LINK_KV_BYTES_PER_SECOND = 25e9
# Seconds per request for HTTP and the first piece of text, and per token for tokenizing.
ASSUMED_FRONT = Front(request=2e-3, per_prompt_token=2e-6)
PROCESSORS = ("epyc", "xeon", "graviton")


@dataclass(frozen=True)
class Machine:
    """Hardware of one worker.

    Attributes:
        name: "this", or the name of a datasheet.
        calibration: measured step times; None if this model was not measured here.
        mfu, mbu: efficiencies that replace the defaults.
        devices: number of devices per worker; all of them share every layer.
        measured_by: "bench" or "roofline" if MFU and MBU come from such a result.
    """

    name: str
    calibration: Calibration | None = None
    mfu: float | None = None
    mbu: float | None = None
    devices: int = 1
    measured_by: str = ""

    @property
    def source(self) -> str:
        """The source of the step times, one of `ERROR_SOURCES`."""
        if self.calibration is not None:
            return self.calibration.source
        return self.measured_by or "datasheet"

    @cached_property
    def hardware(self) -> Hardware:
        return replace(datasheet_hardware(self.name), devices=self.devices)

    @property
    def efficiency(self) -> Efficiency:
        is_cpu = self.hardware.name.lower().find("xeon") >= 0 or self.name.startswith(PROCESSORS)
        usual = CPU if is_cpu else GPU
        return replace(usual, mfu=self.mfu or usual.mfu, mbu=self.mbu or usual.mbu)


@dataclass(frozen=True)
class Deployment:
    """A model, its workers and their options.

    Attributes:
        model: a known name, a file, or a model in the cache.
        machine: hardware of each worker; `decode_machine` may replace it in the decode pool.
        roles: one role per worker.
        engine: options of `EngineConfig`.
        dtype: storage type of the weights; "" as in the model's file.
        drafts, acceptance: as in `FleetSpec`.
        kv_bytes_per_second: transfer rate between two workers; None is the default rate.
    """

    model: str
    machine: Machine
    roles: Sequence[Role] = ("both",)
    engine: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    decode_machine: Machine | None = None
    drafts: int = 0
    acceptance: float = 0.0
    kv_bytes_per_second: float | None = None

    @property
    def source(self) -> str:
        """The source of the step times; with two machines, the less accurate one."""
        return coarsest(one.source for one in (self.machine, self.decode_machine) if one)

    @cached_property
    def decoder(self) -> DecoderShape:
        return read_shape(self.model)

    def scenario(self, machine: Machine) -> Scenario:
        """Precisions, KV bytes and efficiencies on a machine that was not measured."""
        b = self.decoder.blueprint
        kind = self.engine.get("kv_cache_dtype", "auto")
        each = 1 if kind == "int8" else 2
        efficiency = machine.efficiency
        units = units_for(self.dtype or self.decoder.dtype)
        known = machine.hardware.peaks
        if units.linear not in known and "bf16" not in known and "fp16" in known:
            units = units_for("fp16")
        kv = b.kv_bytes(lambda dim: 2 * dim * each) / b.kv_bytes(lambda dim: 1)
        mfu = efficiency.mfu
        return Scenario(1, 1, 1, units, self.dtype, kv, mfu=mfu, mbu=efficiency.mbu)

    @cached_property
    def shape(self) -> ModelShape:
        """The sizes for the cost formulas, with the KV bytes of the first machine."""
        machine = self.machine
        if machine.name != "this":
            return cost_shape(self.decoder, self.dtype, self.scenario(machine).kv_head_bytes)
        device = open_device("cpu")
        kind = self.engine.get("kv_cache_dtype", "auto")
        b = self.decoder.blueprint
        kv = b.kv_bytes(lambda dim: device.kv_head_bytes(dim, kind)) / b.kv_bytes(lambda dim: 1)
        return cost_shape(self.decoder, self.dtype, kv)

    def config(self, machine: Machine) -> EngineConfig:
        """The engine's configuration as a server on that machine would resolve it.

        Raises:
            InvalidRequestError: the model does not fit, or an option is not allowed.
        """
        options = {**self.engine, "speculative_config": None}
        context = self.decoder.blueprint.context_length
        shape = self.shape
        if machine.name == "this":
            return EngineConfig(**options).resolve(context, shape.kv_token_bytes)
        capacity = machine.hardware.capacity
        config = EngineConfig(**{**options, "threads": 1})
        if capacity is None:
            return config.resolve(context, shape.kv_token_bytes)
        weights = weight_bytes(self.decoder, self.dtype).total
        free = capacity * MEMORY_SHARE - weights
        blocks = int(free // (shape.kv_token_bytes * config.block_size))
        if blocks < 1:
            raise InvalidRequestError(
                f"{self.model} takes {weights / 1e9:,.1f} GB, which does not fit "
                f"{capacity * MEMORY_SHARE / 1e9:,.1f} GB of {machine.hardware.name}.",
                "Use a higher --tensor-parallel-size, a smaller --dtype, or other hardware.",
            )
        length = min(config.max_model_len or context, context, blocks * config.block_size)
        blocks = config.num_kv_blocks or blocks
        return replace(config, num_kv_blocks=blocks, max_model_len=length).resolve(context)

    def worker(self, role: Role) -> WorkerSpec:
        """A worker of the pool with role `role`."""
        machine = (self.decode_machine if role == "decode" else None) or self.machine
        config = self.config(machine)
        if machine.calibration is not None:
            return machine.calibration.worker(role, config)
        return WorkerSpec(role, self.times(machine), config)

    def times(self, machine: Machine) -> CostModel:
        """Step times on a machine that was not measured with this model.

        Raises:
            InvalidRequestError: a peak or the bandwidth of the hardware is unknown.
        """
        scenario = self.scenario(machine)
        try:
            step = machine.efficiency.step_seconds
            return EstimatedCost(self.shape, machine.hardware, scenario, step)
        except ValueError:
            missing = ", ".join(scenario.precisions)
            raise InvalidRequestError(
                f"The peak in {missing} or the bandwidth of {machine.hardware.name} is unknown.",
                "Choose other hardware of `estimate --list-hardware`, or another --dtype.",
            ) from None

    def fleet(self, seed: int = 0, *, ledgers: bool = True) -> FleetSpec:
        """The fleet to simulate; raises the errors of `config` and `times`."""
        here = self.machine.name == "this"
        by_role = {role: self.worker(role) for role in dict.fromkeys(self.roles)}
        workers = [by_role[role] for role in self.roles]
        rate = LOCAL_KV_BYTES_PER_SECOND if here else LINK_KV_BYTES_PER_SECOND
        calibration = self.machine.calibration
        return FleetSpec(
            workers,
            block_bytes=workers[0].config.block_size * self.shape.kv_token_bytes,
            bytes_per_second=self.kv_bytes_per_second or rate,
            front=calibration.front if calibration is not None else ASSUMED_FRONT,
            shape=self.shape if ledgers else None,
            drafts=self.drafts,
            acceptance=self.acceptance,
            seed=seed,
        )

    @property
    def title(self) -> str:
        """A description of the workers: "2 x h100-sxm", or "1P1D on this machine"."""
        names = {"this": "this machine"}
        machine = names.get(self.machine.name, self.machine.name)
        ranks = f", {self.machine.devices} devices each" if self.machine.devices > 1 else ""
        if "prefill" not in self.roles:
            return f"{len(self.roles)} x {machine}{ranks}"
        counts = f"{self.roles.count('prefill')}P{self.roles.count('decode')}D"
        other = self.decode_machine
        decoding = "" if other is None else f" and {names.get(other.name, other.name)}"
        return f"{counts} on {machine}{decoding}{ranks}"


def roles_of(replicas: int | None, prefill: int | None, decode: int | None) -> tuple[Role, ...]:
    """The workers' roles for these numbers of workers, as in `serve`."""
    if prefill and decode:
        readers: list[Role] = ["prefill"] * prefill
        decoders: list[Role] = ["decode"] * decode
        return (*readers, *decoders)
    workers: list[Role] = ["both"] * (replicas or 1)
    return tuple(workers)


def threads_of_each(num_workers: int) -> int:
    """Compute threads of each worker on this machine, as `serve` divides its cores."""
    return max(1, available_cores() // num_workers)


def drafted(speculation: str) -> int:
    """Maximum tokens that a method drafts per request; errors as of `speculative_config`."""
    return speculative_config(speculation).num_speculative_tokens
