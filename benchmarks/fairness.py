"""Fairness, simulated in token steps on the router's own code, and on a live server.

Parts: `simulated` runs the scenarios under several policies side by side; `cycles` counts requests
that are admitted, dispatched and settled in a second; `hop` times the way to Admission and back on
a real cluster; `live` overloads a server, `flood` asks it far more often than one may; `on_off`
overloads one in bursts. Each of these starts a server of its own.
Pictures need matplotlib: `pip install '.[bench]'`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import fair_cycles, fair_hop, fair_live, fair_on_off, fair_simulation
from benchmarks.report import Report, parser

PARTS = ("simulated", "cycles", "hop", "live", "flood", "on_off")


def main() -> None:
    options = parser("fairness", __doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures here")
    options.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    options.add_argument("--seconds", type=float, default=45.0, help="length of the live overloads")
    options.add_argument("--keep", action="store_true", help="keep the file's other figures")
    chosen = options.parse_args()
    report = Report("fairness")
    if chosen.keep:
        report.keep(chosen.json)
    if "simulated" in chosen.parts:
        fair_simulation.measure(report, chosen.runs, chosen.plots)
    if "cycles" in chosen.parts:
        fair_cycles.measure(report, chosen.runs)
    if "hop" in chosen.parts:
        fair_hop.measure(report, chosen.runs)
    if "live" in chosen.parts:
        fair_live.measure(report, chosen.config, chosen.seconds, chosen.runs)
    if "flood" in chosen.parts:
        fair_live.measure_flood(report, chosen.config, chosen.seconds, chosen.runs)
    if "on_off" in chosen.parts:
        fair_on_off.measure(report, chosen.runs)
    report.write(chosen.json)


if __name__ == "__main__":
    main()
