"""Measuring: sums over a window, divided by the time of that same window.

update ──► accumulator ─┐
phase, watch ──► stopwatch ─┴─ record(step) ──► ranks ──► ThroughputRecord
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from tokrate.accumulator import Accumulator
from tokrate.arrays import check_token
from tokrate.collate import CountedBatch
from tokrate.counting import IGNORE_INDEX, Tally, TokenCounts
from tokrate.errors import CountingError, MeterError
from tokrate.finding import CountingRules, Finding
from tokrate.ranks import RankLayout
from tokrate.record import ThroughputRecord
from tokrate.stopwatch import Stopwatch, WatchedLoader
from tokrate.totals import Totals
from tokrate.window import Report, Window, combine

log = logging.getLogger("tokrate")
Batch = TypeVar("Batch")


class ThroughputMeter:
    """Turns the batches of a training loop into records.

    `update` costs microseconds and never waits for a device; `record` waits once.

    Args:
        clock: Returns seconds. Tests pass their own.
        ranks: Which ranks are summed.
        ignore_index: Label of slots that the loss leaves out.
        labels_aligned: Whether labels stand where the loss reads them; see `count_tokens`.
        pad_id: Padding token, used with `input_ids` when no mask tells padding.
        warmup_windows: How many records of each session are marked as warm-up.
        flops_per_token: Training FLOPs of the model for one token, forward and backward; about
            6 x parameters (Kaplan et al., arXiv:2001.08361, section 2.1).
        peak_flops: Peak FLOP/s of one device, from its data sheet, for the precision in use.
        strict: What a contradictory batch does. None: it raises in the first window, when training
            has just begun; later it is said once and the window's fractions become None.
            True: it always raises. False: never.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        ranks: RankLayout | None = None,
        ignore_index: int = IGNORE_INDEX,
        labels_aligned: bool = False,
        pad_id: int | None = None,
        warmup_windows: int = 1,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        strict: bool | None = None,
    ) -> None:
        self.ranks = ranks or RankLayout()
        self.ranks.check()
        self._rules = CountingRules(
            ignore_index=check_token("ignore_index", ignore_index),
            labels_aligned=labels_aligned,
            pad_id=None if pad_id is None else check_token("pad_id", pad_id),
        )
        if isinstance(warmup_windows, bool) or operator.index(warmup_windows) < 0:
            raise MeterError(f"warmup_windows={warmup_windows!r}: expected 0, 1, 2 and so on")
        self._warmup_windows = warmup_windows
        self._flops_per_token = _positive("flops_per_token", flops_per_token)
        self._peak_flops = _positive("peak_flops", peak_flops)
        self._strict = strict
        self._stopwatch = Stopwatch(clock)
        self._window = Accumulator()
        self._records = 0
        self._signed = False
        self._said: set[str] = set()
        self._totals = Totals()

    @property
    def pad_id(self) -> int | None:
        """Padding token, where one was given."""
        return self._rules.pad_id

    @property
    def last_step(self) -> int:
        """Step of the last record, restarts included; 0 before the first."""
        return self._totals.step

    @property
    def paused(self) -> bool:
        """Whether a phase is open."""
        return self._stopwatch.paused

    # --- what a loop calls -----------------------------------------------------------------------

    def update(
        self,
        labels: Any = None,
        *,
        loss_mask: Any = None,
        attention_mask: Any = None,
        input_ids: Any = None,
        pad_id: int | None = None,
        cu_seqlens: Any = None,
        raw: int | None = None,
        labels_aligned: bool | None = None,
    ) -> None:
        """Count one micro-batch; arguments as for `count_tokens`. Inside a phase, do nothing.

        Args that are None are those of the meter.

        Raises:
            CountingError: The batch contradicts itself (only when `strict` says so). Counts that
                lie on a device are checked by `record`.
        """
        if self._stopwatch.paused:
            return
        finding = self._rules.find(
            labels,
            loss_mask,
            attention_mask,
            input_ids,
            pad_id,
            cu_seqlens,
            raw,
            labels_aligned,
            check=bool(self._strict) or not self._records,
            sign=not self._records and not self._signed,
        )
        self._take(finding)

    def add(self, counts: TokenCounts | Finding) -> None:
        """Add a batch that was counted elsewhere (a `CountingCollator`, another process).

        Raises:
            CountingError: A collator found that the batch contradicts itself; as for `update`.
        """
        if self._stopwatch.paused:
            return
        if isinstance(counts, TokenCounts):
            counts = Finding(Tally(counts.raw, counts.active, counts.padded, None))
        if not isinstance(counts, Finding):
            raise CountingError(
                f"add({counts!r:.80}): expected TokenCounts(raw, active, padded), as count_tokens "
                "returns it, or the counts of a CountingCollator's batch"
            )
        self._take(counts)

    def lose(self, reason: str) -> None:
        """Note a batch that nobody could count: the window has no rates, and the reason is said."""
        if not self._stopwatch.paused:
            self._window.lose()
            self._say("lost", f"{reason} (said once; such windows have no rates)")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time and tokens inside belong to no window.

        Args:
            name: What it is, such as `"eval"` or `"checkpoint"`, for whoever reads the loop.
        """
        return self._stopwatch.phase()

    def watch(self, loader: Iterable[Batch]) -> WatchedLoader[Batch]:
        """Iterate over a loader and measure the time spent waiting for it (`data_wait_s`).

        Batches that a `CountingCollator` counted are added, and handed on as they were without.
        """
        return WatchedLoader(loader, self._stopwatch, self._receive)

    def waiting(self) -> AbstractContextManager[None]:
        """Time inside is spent waiting for data: for loops that `watch` cannot iterate for."""
        return self._stopwatch.waiting()

    def record(self, step: int) -> ThroughputRecord:
        """Close the window. With many ranks, all of them call this at the same steps.

        Args:
            step: Optimizer steps done so far.

        Raises:
            MeterError: `step` is no step, or smaller than that of the record before.
            CountingError: A device counted a contradictory batch (only when `strict` says so).
            RankError: Another rank did not call `record`, or called it with another step.
        """
        step = self._check_step(step)
        sums = self._window.read()  # the one wait for the device, so the clock below is right
        lap = self._stopwatch.lap()
        wait_s = -1.0 if lap.data_wait_s is None else lap.data_wait_s
        reports = self.ranks.gather(Report(*sums, step, lap.elapsed_s, lap.paused_s, wait_s))
        # From here on all ranks know the same, so that either all of them raise or none.
        window = combine(reports, self.ranks.replicas)
        self._check_clock(window)
        self._check_counts(window)
        for about, doubt in self.ranks.doubts(reports.checksum):
            self._say_for_all(about, doubt)
        record = self._make_record(step, window)
        self._stopwatch.restart(lap.now)
        self._window.clear()
        return record

    # --- restarts --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int | float]:
        """Totals up to now in plain numbers, for any checkpoint.

        With many ranks the window that is open is left out, since its sum is not known before
        the next `record`; save right after a `record` to lose nothing.
        """
        totals = replace(self._totals)
        if self.ranks.size == 1:
            sums, lap = self._window.read(), self._stopwatch.lap()
            totals.raw += sums.raw
            totals.active += sums.active
            totals.elapsed_s += max(lap.elapsed_s, 0.0)
        return totals.to_state()

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from a saved state: totals continue, rates are of this session only.

        Raises:
            StateError: The state is of a newer version or incomplete; nothing is changed then.
        """
        totals = Totals.from_state(state)
        totals.session += 1
        self._totals = totals
        self._records = 0
        self._signed = False
        self._window.clear()
        self._stopwatch.restart(self._stopwatch.clock())

    # --- counting with care ----------------------------------------------------------------------

    @property
    def _raises(self) -> bool:
        return self._strict if self._strict is not None else self._records == 0

    def _take(self, finding: Finding) -> None:
        """Add a batch to the window, or raise what is wrong with it."""
        if finding.problem is not None:
            if self._raises:
                raise finding.problem
            self._say(
                "contradiction",
                f"{finding.problem} (said once; the fractions of such windows are None)",
            )
        if finding.tally is None:
            self._window.lose()
        else:
            self._window.add(finding.tally)
        if not self._records and not self._signed:
            self._window.mark(finding.checksum)
            self._signed = True

    def _receive(self, batch: Any) -> Any:
        if not isinstance(batch, CountedBatch):
            return batch
        self.add(batch.counts)
        return batch.batch

    def _check_step(self, step: int) -> int:
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if isinstance(step, bool) or number < 0:
            raise MeterError(
                f"record(step={step!r}): expected the number of optimizer steps done so far, "
                "a whole number of at least 0"
            )
        if number < (last := self._totals.step):
            raise MeterError(
                f"record(step={number}) after record(step={last}): steps never go back in a run; "
                "after a restart from a checkpoint call load_state_dict first"
            )
        return number

    def _say(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            log.warning(message)

    def _say_for_all(self, about: str, message: str) -> None:
        """Say what all ranks found together: once, not once on each."""
        if self.ranks.is_writer:
            self._say(about, message)

    # --- from reports to a record ----------------------------------------------------------------

    def _check_clock(self, window: Window) -> None:
        if window.elapsed_s >= 0:
            return
        message = (
            f"the clock ran backwards: {window.elapsed_s:.6g} s since the window began; expected "
            "a clock that only rises, such as time.perf_counter"
        )
        if self._raises:
            raise MeterError(message)
        self._say_for_all("clock", f"{message} (said once; the rates of such windows are None)")

    def _check_counts(self, window: Window) -> None:
        if window.problem:
            if self._raises:
                raise CountingError(window.problem)
            self._say_for_all(
                "contradiction", f"{window.problem} (said once; such fractions are None)"
            )
        elif window.padded is None and not window.lost and "contradiction" not in self._said:
            self._say_for_all(
                "padding",
                "nothing tells padding from context, so padded_frac and masked_frac are left out: "
                "pass attention_mask=, cu_seqlens=, or input_ids= with pad_id= to update()",
            )

    def _make_record(self, step: int, window: Window) -> ThroughputRecord:
        """Take the window into the totals and divide by its time."""
        steps = step - self._totals.step
        self._totals.add(window, step)
        self._records += 1
        devices = self.ranks.device_count
        raw_tps, active_tps = window.rate(window.raw), window.rate(window.active)
        return ThroughputRecord(
            step=step,
            active_tps=active_tps,
            raw_tps=raw_tps,
            padded_frac=window.padded_frac,
            masked_frac=window.masked_frac,
            active_tps_per_device=None if active_tps is None else active_tps / devices,
            raw_tps_per_device=None if raw_tps is None else raw_tps / devices,
            raw_tokens=window.raw,
            active_tokens=window.active,
            padded_tokens=window.padded,
            steps=steps,
            elapsed_s=window.elapsed_s,
            paused_s=window.paused_s,
            data_wait_s=window.data_wait_s,
            devices=devices,
            rank_imbalance=window.rank_imbalance,
            total_raw_tokens=self._totals.raw,
            total_active_tokens=self._totals.active,
            total_elapsed_s=self._totals.elapsed_s,
            session=self._totals.session,
            mfu=self._mfu(window, devices),
            warmup=self._records <= self._warmup_windows,
            time_unix_ms=time.time_ns() // 1_000_000,
        )

    def _mfu(self, window: Window, devices: int) -> float | None:
        if window.padded is None or self._flops_per_token is None or self._peak_flops is None:
            return None
        real_tps = window.rate(window.raw - window.padded)
        if real_tps is None:
            return None
        return real_tps * self._flops_per_token / (self._peak_flops * devices)


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise MeterError(f"{name}={value!r}: expected a positive number, or None when unknown")
    return value
