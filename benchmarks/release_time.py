"""Times two releases of the same source into a new store: the first does everything, the second reuses it.

    python benchmarks/release_time.py models/SmolLM2-135M-Instruct

Prints the wall seconds of each run up to serving (imports, Prefect's and MLflow's start included), and whether the
digests are equal. The PyPTO program cache of the user is left as it is; `--cold` uses an empty one for the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serving.bench import describe_machine


def main() -> None:
    """Run both releases and print their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--cold", action="store_true", help="start without cached programs and native code")
    options = parser.parse_args()
    print(json.dumps(describe_machine()))
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if options.cold:
            environment |= {"PYPTO_DEPLOY_CACHE": f"{folder}/cache", "XDG_CACHE_HOME": f"{folder}/xdg"}
        command = [sys.executable, "-m", "flows.cli", "release", str(options.source), "--store", f"{folder}/store"]
        digests = []
        for run in ("first", "second"):
            started = time.perf_counter()
            done = subprocess.run(
                [*command, "--name", "timed", "--json"], env=environment, capture_output=True, text=True, check=True
            )
            digests.append(json.loads(done.stdout)["digest"])
            print(f"{run} run: {time.perf_counter() - started:.1f} s, digest {digests[-1][:12]}")
        print(f"digests equal: {digests[0] == digests[1]}")


if __name__ == "__main__":
    main()
