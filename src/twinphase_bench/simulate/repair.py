"""Finds changes that would meet a service level that a simulation missed.

Each change is one flag of `serve`. For each of them, the same load is simulated again with the same
seed, and the result is printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinphase import Deployment, Progress, roles_of, run_requests
from twinphase.phases.slo import BLAMED_PHASE, Goodput, goodput
from twinphase_bench.report.report import Status, Verdict
from twinphase_bench.simulate.report import Answer

# A load with at most this share of missed requests is not repaired.
MAX_MISSED_SHARE = 0.01
ROUNDING = 1e-9
MAX_SECONDS = 90.0


@dataclass(frozen=True)
class Change:
    """A flag as a user would write it, and the deployment with that flag."""

    flag: str
    deployment: Deployment


@dataclass(frozen=True)
class Tried:
    """A change and its simulated result."""

    change: Change
    result: Goodput

    @property
    def share(self) -> float:
        return self.result.fraction or 0.0


def changes(deployment: Deployment) -> Iterator[Change]:
    """Changes to try, the cheapest first; all except the last few are free."""
    engine = deployment.engine

    def with_option(name: str, value: int | str | bool, text: str = "") -> Change:
        flag = text or f"--{name.replace('_', '-')} {value}"
        return Change(flag, replace(deployment, engine={**engine, name: value}))

    for slo in (10, 20, 50, 100, "off"):
        if engine.get("itl_slo_ms") != slo:
            yield with_option(
                "itl_slo_ms", slo, f"--itl-slo-ms {slo if slo == 'off' else f'{slo:g}'}"
            )
    budget = engine.get("max_num_batched_tokens", 512)
    seats = engine.get("max_num_seqs", 64)
    if 2 * seats <= budget:
        yield with_option("max_num_seqs", 2 * seats)
    if seats >= 4:
        yield with_option("max_num_seqs", seats // 4)
    yield with_option("max_num_batched_tokens", 4 * budget)
    if engine.get("enable_prefix_caching") is False:
        yield with_option("enable_prefix_caching", True, "--enable-prefix-caching")
    if deployment.machine.name == "this":
        # More workers on this machine would share its cores, and only a measurement shows the
        # effect.
        return
    if engine.get("kv_cache_dtype", "auto") == "auto":
        yield with_option("kv_cache_dtype", "int8")
    number = len(deployment.roles)
    if "prefill" in deployment.roles:
        prefill, decode = (deployment.roles.count(role) for role in ("prefill", "decode"))
        yield _pools(deployment, prefill + 1, decode)
        yield _pools(deployment, prefill, decode + 1)
        return
    if number > 1:
        yield _pools(deployment, number // 2, number - number // 2)
    for more in dict.fromkeys((number + 1, 2 * number)):
        yield Change(f"--replicas {more}", replace(deployment, roles=roles_of(more, None, None)))


def _pools(deployment: Deployment, prefill: int, decode: int) -> Change:
    flag = f"--prefill-workers {prefill} --decode-workers {decode}"
    return Change(flag, replace(deployment, roles=roles_of(None, prefill, decode)))


def repairs(answer: Answer, progress: Progress) -> list[Verdict]:
    """The phase and the requests that missed a level, and the flags that help most."""
    slos = answer.slos
    if not slos.bounds:
        return []
    now = goodput(answer.done.observations, slos, answer.done.seconds)
    if now.fraction is None or 1 - now.fraction <= MAX_MISSED_SHARE + ROUNDING:
        return []
    verdicts = [Verdict(Status.INFO, _who(answer, now))]
    tried = _tried(answer, progress)
    better = [one for one in tried if one.share > now.fraction + MAX_MISSED_SHARE]
    better.sort(key=lambda one: -one.share)
    holding = [one for one in tried if 1 - one.share <= MAX_MISSED_SHARE + ROUNDING]
    chosen = holding[:1] or better[:1]
    for one in [*chosen, *(other for other in better if other not in chosen)][:3]:
        text = (
            f"With {one.change.flag} {one.share:.0%} of the requests meet {slos}, instead of "
            f"{now.fraction:.0%}."
        )
        verdicts.append(Verdict(Status.INFO, text, _rest(one.result)))
    if not chosen:
        text = f"None of {len(tried)} changes that were simulated helps; it needs more workers."
        verdicts.append(Verdict(Status.UNKNOWN, text, ", ".join(one.change.flag for one in tried)))
    return verdicts


def _tried(answer: Answer, progress: Progress) -> list[Tried]:
    found: list[Tried] = []
    began = time.process_time()
    candidates = list(changes(answer.deployment))
    for number, change in enumerate(candidates):
        progress(f"trying {change.flag}", number, len(candidates))
        if time.process_time() - began > MAX_SECONDS:
            break
        try:
            spec = change.deployment.fleet(answer.spec.seed, ledgers=False)
            done = run_requests(spec, **answer.plan.given)
        except Exception:  # A change that does not fit, or is not allowed, is not a repair.
            continue
        found.append(Tried(change, goodput(done.observations, answer.slos, done.seconds)))
    return found


def _who(answer: Answer, now: Goodput) -> str:
    """The phase that missed, and how the late requests differ from the others."""
    slos = answer.slos
    level, count = max(now.by_level.items(), key=lambda item: item[1])
    missed = [one for one in answer.done.observations if level in slos.missed(one)]
    met = [one for one in answer.done.observations if level not in slos.missed(one)]

    def mean_prompt(group: list[object]) -> float:
        lengths = [getattr(one, "num_prompt_tokens", 0) or 0 for one in group]
        return sum(lengths) / max(1, len(lengths))

    text = (
        f"{count:,} of {now.total:,} requests missed {level}: {BLAMED_PHASE.get(level, level)}. "
        f"Their prompts have {mean_prompt(list(missed)):,.0f} tokens on average"
    )
    return text + (f", the others' {mean_prompt(list(met)):,.0f}." if met else ".")


def _rest(result: Goodput) -> str:
    if not result.by_level:
        return ""
    return "still missed: " + ", ".join(f"{n:,} {name}" for name, n in result.by_level.items())
