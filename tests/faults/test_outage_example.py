"""`examples/outage.py` does what it says, in a shortened form."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "outage.py"


def test_the_example_of_an_outage() -> None:
    """The server dies and comes back in the middle of training, and has every point at the end."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--seconds", "4"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"MLflow has (\d+) of (\d+) points and says FINISHED", done.stdout)
    assert found, done.stdout
    assert found[1] == found[2]
    outages = [line for line in done.stderr.splitlines() if line.startswith("mlflow: ")]
    assert len(outages) == 2, done.stderr
    assert "nothing is lost" in outages[0]
    assert "works again" in outages[1]
    assert "waiting" not in done.stdout
