"""What `tokrate compare` costs on many long runs, against other readers of the same event files.

python benchmarks/bench_compare.py [RUNS] [RECORDS] [--tbparse PYTHON] [--keep DIR]

Default: 200 runs x 10,000 records (3 GB in a temporary folder). Journals and event files hold the
same records. Each contender runs in a process of its own; baselines read the first BASELINE_RUNS
runs and are scaled up, as they take the same time for each. `--tbparse` names the Python of an
environment that has tbparse, which tokrate does not depend on.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE
from tensorboard.summary.writer.record_writer import RecordWriter

from tokrate.names import MetricNames
from tokrate.record import ThroughputRecord

BASELINE_RUNS = 5
KEYS = [f"throughput/{n}" for n in ("active_tps", "raw_tps")]

COMPARE = """
from tokrate.compare import compare_runs, read_runs
found = compare_runs(read_runs([{source!r}]))
windows = sum(run.windows for run in found.runs)
"""
ACCUMULATOR = """
import numpy as np
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
windows = 0
for folder in sorted(Path({source!r}).iterdir())[:{runs}]:
    events = EventAccumulator(str(folder), size_guidance={{"scalars": 0}}).Reload()
    arrays = [np.array([e.value for e in events.Scalars(tag)]) for tag in events.Tags()["scalars"]]
    windows += len(arrays[0])
"""
TBPARSE = """
from pathlib import Path
from tbparse import SummaryReader
windows = 0
for folder in sorted(Path({source!r}).iterdir())[:{runs}]:
    windows += len(SummaryReader(str(folder), pivot=True).scalars)
"""
MEASURED = """
import json, resource, time
start = time.perf_counter()
{program}
seconds = time.perf_counter() - start
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, windows]))
"""


# --- the same records as journals and as event files ----------------------------------------------


def make_records(records: int, seed: int) -> list[ThroughputRecord]:
    """Windows of a run whose speed varies from one to the next."""
    draw = np.random.default_rng(seed)
    elapsed_s = 10 * np.exp(0.02 * draw.standard_normal(records))
    active = (2**19 * draw.uniform(0.4, 0.6, records)).astype(int)
    padded = (2**19 * draw.uniform(0.2, 0.3, records)).astype(int)
    total, total_s = active.cumsum(), elapsed_s.cumsum()
    raw = 2**19
    return [
        ThroughputRecord(
            step=10 * (i + 1),
            active_tps=active[i] / elapsed_s[i],
            raw_tps=raw / elapsed_s[i],
            padded_frac=padded[i] / raw,
            masked_frac=(raw - active[i] - padded[i]) / raw,
            active_tps_per_device=active[i] / elapsed_s[i] / 8,
            raw_tps_per_device=raw / elapsed_s[i] / 8,
            raw_tokens=raw,
            active_tokens=int(active[i]),
            padded_tokens=int(padded[i]),
            steps=10,
            elapsed_s=float(elapsed_s[i]),
            paused_s=0.0,
            data_wait_s=0.01 * float(elapsed_s[i]),
            devices=8,
            rank_imbalance=1.01,
            total_raw_tokens=raw * (i + 1),
            total_active_tokens=int(total[i]),
            total_elapsed_s=float(total_s[i]),
            session=1,
            mfu=None,
            warmup=i == 0,
            time_unix_ms=1_700_000_000_000 + int(1000 * total_s[i]),
        )
        for i in range(records)
    ]


def write_journal(folder: Path, number: int, records: list[ThroughputRecord]) -> None:
    """Lines as `Journal` writes them."""
    names = MetricNames()
    folder.mkdir(parents=True)
    with (folder / "journal.jsonl").open("w") as file:
        head = {"kind": "run", "time_unix_ms": 1_700_000_000_000, "id": str(number)}
        file.write(json.dumps({**head, "name": folder.name}, separators=(",", ":")) + "\n")
        for r in records:
            metrics = {k: float(v) for k, v in r.metrics(names).items()}
            line = {"kind": "entry", "time_unix_ms": r.time_unix_ms, "step": r.step}
            line |= {"metrics": metrics, "record": {k: plain(v) for k, v in r.to_dict().items()}}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def plain(value: object) -> object:
    """A number of numpy as JSON takes it."""
    return value.item() if isinstance(value, np.generic) else value


def write_events(folder: Path, records: list[ThroughputRecord]) -> None:
    """Events as the TensorBoard backend writes them, all values of a record in one."""
    names = MetricNames()
    folder.mkdir(parents=True)
    out = io.BytesIO()
    RecordWriter(out).write(
        Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString()
    )
    events = []
    for r in records:
        values = [Summary.Value(tag=k, simple_value=v) for k, v in r.metrics(names).items()]
        event = Event(wall_time=r.time_unix_ms / 1000, step=r.step, summary=Summary(value=values))
        events.append(event.SerializeToString())
    for data, crc in zip(events, checksums(events), strict=True):
        length = len(data).to_bytes(8, "little")
        out.write(length + length_crc(length) + data + crc)
    (folder / "events.out.tfevents.1700000000.bench").write_bytes(out.getbuffer())


def checksums(events: list[bytes]) -> list[bytes]:
    """Masked CRC-32C of each event, for all events of one length at once."""
    table, found = np.array(CRC_TABLE, np.uint32), [b""] * len(events)
    for size in {len(event) for event in events}:
        places = [i for i, event in enumerate(events) if len(event) == size]
        rows = np.frombuffer(b"".join(events[i] for i in places), np.uint8).reshape(-1, size)
        crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
        for column in rows.T:
            crc = table[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
        crc ^= np.uint32(0xFFFFFFFF)
        masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
        for place, value in zip(places, masked.astype("<u4"), strict=True):
            found[place] = value.tobytes()
    return found


LENGTHS: dict[bytes, bytes] = {}


def length_crc(length: bytes) -> bytes:
    if length not in LENGTHS:
        (LENGTHS[length],) = checksums([length])
    return LENGTHS[length]


# --- measuring ------------------------------------------------------------------------------------


def measure(program: str, python: str = sys.executable) -> tuple[float, float, int]:
    """Seconds, peak memory in MiB and windows read, in a process of its own."""
    done = subprocess.run(
        [python, "-c", MEASURED.format(program=program)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    seconds, peak_mib, windows = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak_mib, windows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="?", type=int, default=200)
    parser.add_argument("records", nargs="?", type=int, default=10_000)
    parser.add_argument("--tbparse", metavar="PYTHON")
    parser.add_argument("--keep", type=Path, help="folder to make the runs in, and leave there")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="bench-compare-"))
    try:
        if not (root / "journals").exists():
            for number in range(options.runs):
                records = make_records(options.records, number)
                write_journal(root / "journals" / f"run-{number:03}", number, records)
                write_events(root / "events" / f"run-{number:03}", records)
        report(root, options.runs, options.records, options.tbparse)
    finally:
        if options.keep is None:
            shutil.rmtree(root)


def report(root: Path, runs: int, records: int, tbparse: str | None) -> None:
    few = min(BASELINE_RUNS, runs)
    events = str(root / "events")
    contenders = {
        "compare, journals": (COMPARE.format(source=str(root / "journals")), sys.executable, runs),
        "compare, event files": (
            COMPARE.format(source=f"tensorboard:{events}"),
            sys.executable,
            runs,
        ),
        "EventAccumulator": (ACCUMULATOR.format(source=events, runs=few), sys.executable, few),
    }
    if tbparse:
        contenders["tbparse"] = (TBPARSE.format(source=events, runs=few), tbparse, few)
    print(f"{runs} runs x {records:,} records, 10 numbers each")
    print(f"{'':24}{'all runs':>10}{'a run':>11}{'peak memory':>13}{'':>10}")
    times: dict[str, float] = {}
    for name, (program, python, count) in contenders.items():
        seconds, peak_mib, windows = measure(program, python)
        assert windows == count * records, f"{name} read {windows} windows"
        times[name] = seconds / count
        scaled = "" if count == runs else f"  (from {count} runs)"
        each_s = times[name]
        times_text = f"{each_s * runs:>8.1f} s{1000 * each_s:>8.0f} ms"
        print(f"{name:24}{times_text}{peak_mib:>9.0f} MiB{scaled}")
    for ours in list(times)[:2]:
        for other in list(times)[2:]:
            print(f"{ours} is {times[other] / times[ours]:.1f} times as fast as {other}")


if __name__ == "__main__":
    main()
