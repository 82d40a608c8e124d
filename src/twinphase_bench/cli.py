"""The `twinphase` script: the commands of the engine, and those that measure.

`python -m twinphase.cli` runs the engine's commands alone.
"""

from __future__ import annotations

from twinphase import command, main
from twinphase_bench.commands.bench import bench
from twinphase_bench.commands.lab import lab
from twinphase_bench.commands.plan import plan
from twinphase_bench.commands.roofline import roofline
from twinphase_bench.commands.simulate import simulate

command("Measure and explain", "Measure both phases of a model or a server.")(bench)
command("Measure and explain", "Measure this machine's ceilings, and a model under them.")(roofline)
command("Measure and explain", "Simulate a load on any deployment and hardware.")(simulate)
command("Measure and explain", "Find the cheapest fleet that keeps service levels.")(plan)
command("Measure and explain", "Try claims about prefill and decode on this machine.")(lab)

if __name__ == "__main__":
    main()
