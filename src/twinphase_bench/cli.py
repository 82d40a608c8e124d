"""The `twinphase` script: the commands of the engine, and those that measure.

`python -m twinphase.cli` runs the engine's commands alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinphase import app, command, main
from twinphase_bench.commands.bench import bench
from twinphase_bench.commands.lab import lab
from twinphase_bench.commands.roofline import roofline


def write_explanation(found: Mapping[str, Any], folder: Path) -> Path:
    """Write the report of `explain --out`; returns the path of its page, or of its Markdown."""
    from twinphase_bench.report.explanation import explain_report
    from twinphase_bench.report.render import write_report

    written = write_report(explain_report(found), folder)
    return written.html or written.markdown


# `twinphase.commands.explain` finds it in its context.
app.info.context_settings = {**(app.info.context_settings or {}), "obj": write_explanation}
command("Measure and explain", "Measure both phases of a model or a server.")(bench)
command("Measure and explain", "Measure this machine's ceilings, and a model under them.")(roofline)
command("Measure and explain", "Try claims about prefill and decode on this machine.")(lab)

if __name__ == "__main__":
    main()
