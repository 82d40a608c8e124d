"""Which tenant is served next: start-time fair queueing by seconds of work.

Each tenant has a virtual time: the seconds of work done for it, divided by its weight. The tenant
with the smallest one is served first. A tenant that was idle for a while begins at the system's
virtual time, the smallest among tenants with requests: unused time is no credit, and time that it
used while no other tenant needed it is no debt.

Goyal, Vin and Cheng, "Start-time Fair Queuing" (SIGCOMM 1996). Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024) count tokens in the same way; here it is the cost model's
seconds, for prefill and decode. `scheduler.py` decides how much of a step each tenant gets.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence

from twinphase.batch import Batch, Phase, StepWork
from twinphase.request import Request
from twinphase.scheduler.chunk import StepCost
from twinphase.scheduler.phase import phase_of
from twinphase.scheduler.policy import Key

# A tenant without a seat takes the next one if its virtual time is ahead by at most this.
MAX_LEAD_SECONDS = 0.1


class FairQueue:
    """The waiting requests, a line for each tenant.

    Attributes:
        lines: waiting requests of each tenant that has any, in the policy's order.
        now: the system's virtual time, seconds.
        seats: running requests by tenant.
        has_several: whether there have been requests of more than one tenant.
    """

    def __init__(self, key: Key) -> None:
        """`key` is the policy's order within a tenant."""
        self.lines: dict[str, list[Request]] = {}
        self.now = 0.0
        self.seats: Counter[str] = Counter()
        self.has_several = False
        self._first_tenant: str | None = None
        self._policy_key = key
        self._times: dict[
            str, float
        ] = {}  # virtual; of tenants that have requests, or had more than others of late
        self._weights: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one tenant to choose from."""
        return len(self._times) > 1

    @property
    def waiting(self) -> list[Request]:
        """All waiting requests, tenant by tenant in the order of their turns."""
        tenants = sorted(self.lines, key=lambda tenant: self._turn(self.lines[tenant][0]))
        return [request for tenant in tenants for request in self.lines[tenant]]

    def key(self, request: Request) -> tuple[float, int, int]:
        """The order of requests for chunks; preemption takes the reverse order."""
        return (self._times[request.tenant], *self._policy_key(request))

    def add(self, request: Request) -> None:
        """Put a new or preempted request into its tenant's line."""
        tenant = request.tenant
        self._first_tenant = tenant if self._first_tenant is None else self._first_tenant
        self.has_several |= tenant != self._first_tenant
        self._times[tenant] = max(self._times.get(tenant, self.now), self.now)
        self._weights[tenant] = request.weight
        insort(self.lines.setdefault(tenant, []), request, key=self._policy_key)

    def remove(self, request: Request) -> None:
        line = self.lines[request.tenant]
        line.remove(request)
        if not line:
            del self.lines[request.tenant]

    def first(self) -> Request | None:
        """The request to admit next: of tenants without a seat first, then by virtual time."""
        return min((line[0] for line in self.lines.values()), key=self._turn, default=None)

    def begin_step(self, running: Sequence[Request]) -> None:
        """Advance the virtual time to the smallest one among tenants with pending prefill.

        A tenant that only decodes is not waiting for anything.
        """
        times = self._times
        if len(times) < 2:
            self.now = max(times.values(), default=self.now)
            return
        wanting = self.lines.keys() | {
            one.tenant for one in running if phase_of(one) is Phase.PREFILL
        }
        least = min(times[tenant] for tenant in wanting) if wanting else max(times.values())
        self.now = max(self.now, least)
        for tenant in [
            one for one, time in times.items() if time <= self.now and not self._is_here(one)
        ]:
            del times[tenant], self._weights[tenant]

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for work, in predicted seconds."""
        if tenant in self._times:
            self._times[tenant] += seconds / self._weights[tenant]

    def excess(self, tenant: str, num_seats: int) -> float:
        """Seats that a tenant holds beyond its share, per weight; at most 0 with a single seat."""
        here = [one for one in self._times if self._is_here(one)]
        due = num_seats * self._weights[tenant] / sum(self._weights[one] for one in here)
        held = self.seats[tenant]
        return (held - due) / self._weights[tenant] if held > 1 else 0.0

    def _is_here(self, tenant: str) -> bool:
        return tenant in self.lines or self.seats[tenant] > 0

    def _turn(self, first: Request) -> tuple[bool, float, int, int]:
        tenant = first.tenant
        return (
            self.seats[tenant] > 0 or self._times[tenant] > self.now + MAX_LEAD_SECONDS,
            *self.key(first),
        )


def work_by_tenant(batch: Batch, times: StepCost) -> dict[str, float]:
    """A step's predicted seconds, divided by what each tenant's tokens add to an empty step.

    Tokens that are computed again after a preemption are charged to no tenant.
    """
    seconds = times.seconds(batch.work)
    tenants = sorted({share.tenant for share in batch.scheduled})
    empty = times.seconds(StepWork())
    again = dict.fromkeys(tenants, 0.0)
    for share in batch.prefills:
        start = share.num_computed_tokens
        lost = share.most_computed_tokens - share.num_computed_tokens
        if lost > 0:
            work = StepWork.of_chunk(start, min(lost, len(share.token_ids)), False, batch.window)
            again[share.tenant] += times.seconds(work) - empty
    if len(tenants) == 1 and not any(again.values()):
        return dict.fromkeys(tenants, seconds)
    added = {tenant: times.seconds(batch.of_tenant(tenant).work) - empty for tenant in tenants}
    whole = sum(added.values()) or 1.0
    return {tenant: seconds * max(0.0, added[tenant] - again[tenant]) / whole for tenant in tenants}
