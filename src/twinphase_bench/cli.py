"""The `twinphase` script: the commands of the engine, and those that measure.

`python -m twinphase.cli` runs the engine's commands alone.
"""

from __future__ import annotations

from twinphase import app, main
from twinphase_bench.commands.bench import bench
from twinphase_bench.commands.lab import lab
from twinphase_bench.commands.roofline import roofline

for command in (roofline, lab, bench):
    app.command()(command)

if __name__ == "__main__":
    main()
