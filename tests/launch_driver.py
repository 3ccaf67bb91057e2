"""`python launch_driver.py plan.json module:function`: what the command line does with a plan, for tests."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from framework import processes
from framework.errors import FrameworkError
from framework.launch import launch
from framework.plan import RunPlan


def main() -> int:
    """Launch, print the error or the results, return the exit code."""
    logging.basicConfig(level=logging.INFO)
    sys.path.insert(0, str(Path(__file__).parent))
    processes.PRELOAD.remove("lightning.pytorch")  # two thirds of the start-up, and nothing trains here
    own = Path(f"{sys.argv[1]}.rank_{os.environ.get('RANK')}")  # a rank that is given other settings than the rest
    file = own if own.exists() else Path(sys.argv[1])
    plan = RunPlan.from_dict(json.loads(file.read_text()))
    try:
        result = launch(plan, entry=sys.argv[2])
    except FrameworkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(result.describe(), file=sys.stderr)
    print(json.dumps({"status": result.status, "restarts": result.restarts, "results": result.results}))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
