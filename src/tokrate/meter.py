"""Measuring: sums over a window, divided by the time of that same window.

update ──► accumulator ─┐
phase, watch ──► stopwatch ─┴─ record(step) ──► ranks ──► ThroughputRecord
"""

from __future__ import annotations

import logging
import operator
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from tokrate.accumulator import Accumulator
from tokrate.arrays import as_array, is_tensor
from tokrate.counting import (
    IGNORE_INDEX,
    Tally,
    TokenCounts,
    counts_of,
    tally_batch,
)
from tokrate.errors import CountingError, MeterError, StateError
from tokrate.ranks import RankLayout
from tokrate.record import ThroughputRecord
from tokrate.stopwatch import Lap, Stopwatch, WatchedLoader
from tokrate.window import Report, Window, combine, same_batches

log = logging.getLogger("tokrate")
Batch = TypeVar("Batch")
STATE_VERSION = 1


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
        self._ignore_index = ignore_index
        self._labels_aligned = labels_aligned
        self._pad_id = pad_id
        self._warmup_windows = warmup_windows
        self._flops_per_token = _positive("flops_per_token", flops_per_token)
        self._peak_flops = _positive("peak_flops", peak_flops)
        self._strict = strict
        self._stopwatch = Stopwatch(clock)
        self._window = Accumulator()
        self._records = 0
        self._checksum = 0
        self._said: set[str] = set()
        self._step = 0
        self._session = 1
        self._total_raw = 0
        self._total_active = 0
        self._total_elapsed_s = 0.0

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
    ) -> None:
        """Count one micro-batch; arguments as for `count_tokens`. Inside a phase, do nothing.

        Raises:
            CountingError: The batch contradicts itself (only when `strict` says so). Counts that
                lie on a device are checked by `record`.
        """
        if self._stopwatch.paused:
            return
        sources = {
            "attention_mask": attention_mask,
            "cu_seqlens": cu_seqlens,
            "pad_id": self._pad_id if pad_id is None else pad_id,
        }
        batch = {"labels": labels, "loss_mask": loss_mask, "input_ids": input_ids, "raw": raw}
        if not self._records and not self._checksum:
            self._checksum = _checksum(labels if labels is not None else loss_mask)
        tally: Tally | None
        try:
            tally = self._tally(batch, sources)
        except CountingError as error:
            if self._raises:
                raise
            self._say(
                "contradiction", f"{error} (said once; the fractions of such windows are None)"
            )
            tally = self._tally_without_padding(batch)
        if tally is None:
            self._window.lose()
        else:
            self._window.add(tally)

    def add(self, counts: TokenCounts) -> None:
        """Add a batch that was counted elsewhere (a collator, another process)."""
        if not self._stopwatch.paused:
            self._window.add(Tally(counts.raw, counts.active, counts.padded, None))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time and tokens inside belong to no window.

        Args:
            name: What it is, such as `"eval"` or `"checkpoint"`, for whoever reads the loop.
        """
        return self._stopwatch.phase()

    def watch(self, loader: Iterable[Batch]) -> WatchedLoader[Batch]:
        """Iterate over a loader and measure the time spent waiting for it (`data_wait_s`)."""
        return WatchedLoader(loader, self._stopwatch)

    def record(self, step: int) -> ThroughputRecord:
        """Close the window. With many ranks, all of them call this at the same steps.

        Args:
            step: Optimizer steps done so far.

        Raises:
            MeterError: `step` is no step, or smaller than that of the record before.
            CountingError: A device counted a contradictory batch (only when `strict` says so).
            RankError: Another rank did not call `record`.
        """
        step = self._check_step(step)
        sums = self._window.read()  # the one wait for the device, so the clock below is right
        lap = self._stopwatch.lap()
        self._check_clock(lap)
        wait_s = -1.0 if lap.data_wait_s is None else lap.data_wait_s
        reports = self.ranks.gather(
            Report(*sums, self._checksum, step, lap.elapsed_s, lap.paused_s, wait_s)
        )
        window = combine(reports, self.ranks.replicas)
        self._check_window(window, reports)
        record = self._make_record(step, window)
        self._stopwatch.restart(lap.now)
        self._window.clear()
        self._checksum = 0
        return record

    # --- restarts --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int | float]:
        """Totals up to now in plain numbers, for any checkpoint.

        With many ranks the window that is open is left out, since its sum is not known before
        the next `record`; save right after a `record` to lose nothing.
        """
        raw, active, elapsed_s = 0, 0, 0.0
        if self.ranks.size == 1:
            sums, lap = self._window.read(), self._stopwatch.lap()
            raw, active, elapsed_s = sums.raw, sums.active, max(lap.elapsed_s, 0.0)
        return {
            "version": STATE_VERSION,
            "session": self._session,
            "step": self._step,
            "total_raw_tokens": self._total_raw + raw,
            "total_active_tokens": self._total_active + active,
            "total_elapsed_s": self._total_elapsed_s + elapsed_s,
        }

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from a saved state: totals continue, rates are of this session only.

        Raises:
            StateError: The state is of a newer version or incomplete; nothing is changed then.
        """
        version = state.get("version")
        if version != STATE_VERSION:
            raise StateError(
                f"the meter state has version {version!r}: expected {STATE_VERSION}; "
                "load it with the tokrate that wrote it, or start without it"
            )
        try:
            loaded = (
                operator.index(state["session"]),  # type: ignore[arg-type]
                operator.index(state["step"]),  # type: ignore[arg-type]
                operator.index(state["total_raw_tokens"]),  # type: ignore[arg-type]
                operator.index(state["total_active_tokens"]),  # type: ignore[arg-type]
                float(state["total_elapsed_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the meter state cannot be read ({error!r}): expected what state_dict() returned"
            ) from error
        session, self._step, self._total_raw, self._total_active, self._total_elapsed_s = loaded
        self._session = session + 1
        self._records = 0
        self._window.clear()
        self._stopwatch.restart(self._stopwatch.clock())

    # --- counting with care ----------------------------------------------------------------------

    @property
    def _raises(self) -> bool:
        return self._strict if self._strict is not None else self._records == 0

    def _tally(self, batch: dict[str, Any], sources: dict[str, Any]) -> Tally:
        tally = tally_batch(
            **batch,
            **sources,
            ignore_index=self._ignore_index,
            labels_aligned=self._labels_aligned,
            check=self._raises,
        )
        if not any(is_tensor(count) for count in tally[1:]):
            counts_of(tally)
        return tally

    def _tally_without_padding(self, batch: dict[str, Any]) -> Tally | None:
        """Slots and targets of a batch whose padding contradicts them; None when even they do."""
        try:
            return self._tally(batch, {"attention_mask": None, "cu_seqlens": None, "pad_id": None})
        except CountingError:
            return None

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
        if number < self._step:
            raise MeterError(
                f"record(step={number}) after record(step={self._step}): steps never go back in a "
                "run; after a restart from a checkpoint call load_state_dict first"
            )
        return number

    def _check_clock(self, lap: Lap) -> None:
        if lap.elapsed_s < 0:
            message = (
                f"the clock ran backwards: {lap.elapsed_s:.6g} s since the window began; expected "
                "a clock that only rises, such as time.perf_counter"
            )
            if self._raises:
                raise MeterError(message)
            self._say("clock", f"{message} (said once; the rates of such windows are None)")

    def _say(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            log.warning(message)

    # --- from reports to a record ----------------------------------------------------------------

    def _check_window(self, window: Window, reports: list[Report]) -> None:
        """Say, or raise, what the ranks found together; all of them find the same."""
        if window.problem:
            if self._raises:
                raise CountingError(window.problem)
            self._say("contradiction", f"{window.problem} (said once; such fractions are None)")
        elif window.padded is None and "contradiction" not in self._said:
            self._say(
                "padding",
                "nothing tells padding from context, so padded_frac and masked_frac are left out: "
                "pass attention_mask=, cu_seqlens=, or input_ids= with pad_id= to update()",
            )
        for ranks in same_batches(reports, self.ranks.replicas):
            self._say(
                "same batch",
                f"ranks {ranks} counted the same first batch although "
                f"replicas={self.ranks.replicas}: their tokens are added up as if they were "
                "different ones. Declare RankLayout(replicas=...) or RankLayout.from_mesh(...) if "
                "they are tensor, pipeline or context parallel; else check the sampler",
            )

    def _make_record(self, step: int, window: Window) -> ThroughputRecord:
        """Take the window into the totals and divide by its time."""
        self._total_raw += window.raw
        self._total_active += window.active
        self._total_elapsed_s += max(window.elapsed_s, 0.0)
        self._records += 1
        steps, self._step = step - self._step, step
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
            total_raw_tokens=self._total_raw,
            total_active_tokens=self._total_active,
            total_elapsed_s=self._total_elapsed_s,
            session=self._session,
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
    if value is not None and not value > 0:
        raise MeterError(f"{name}={value!r}: expected a positive number, or None when unknown")
    return value


def _checksum(array: Any) -> int:
    """A number that is equal for equal batches, to find ranks that were fed the same one.

    Only CPU data is looked at: reading a device here would make training wait for it.
    """
    try:
        data = as_array("batch", array)
    except CountingError:
        return 0
    return 0 if is_tensor(data) else zlib.crc32(data.tobytes()) + 1
