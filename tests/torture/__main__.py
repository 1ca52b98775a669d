"""``python -m tests.torture --seconds N --seed S``: random verbs, kills, stops; prints numbers."""

from __future__ import annotations

import argparse
import json
import os
import sys

from tests.torture.conductor import Conductor, Plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices")
    parser.add_argument("--workers", type=int, default=Plan.num_workers, help="client processes at a time")
    parser.add_argument("--kills", type=int, default=0, help="go on until so many workers were killed")
    parser.add_argument("--restarts", type=int, default=0, help="go on until the server was killed so often")
    parser.add_argument("--max-seconds", type=float, default=0, help="... but for no longer than this")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    args = parser.parse_args()
    name = f"/t-torture-{os.getpid()}"
    plan = Plan(name, args.seconds, args.seed, args.kills, args.restarts, args.max_seconds, args.workers)
    report = Conductor(plan).run().as_dict()
    if args.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:>24}  {value}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
