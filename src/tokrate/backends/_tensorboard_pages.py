"""What TensorBoard's pages show beside curves: TEXT, CUSTOM SCALARS and HPARAMS.

    TEXT             the run's facts, and what its numbers mean
    CUSTOM SCALARS   the charts that belong together, of all runs
    HPARAMS          one row for the run: configuration and last values

All of it by hand: TensorBoard's own helpers import TensorFlow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tokrate.backends._explained import explained
from tokrate.plain import flat
from tokrate.record import SCHEMA_VERSION
from tokrate.run import RunInfo
from tokrate.steady import STEADY

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

CHARTS: Mapping[str, Sequence[str]] = {
    "tokens per second": ("active_tps", "raw_tps"),
    "share of raw tokens": ("padded_frac", "masked_frac"),
    "share of time spent waiting for data": ("data_wait_frac",),
}
"""Title of a chart → fields of the record that share it."""

ROW_METRICS = (*STEADY, "total_active_tokens")
"""Metrics in a run's row; the page shows five without a click."""

LARGEST_EXACT = 2**53
"""HPARAMS keeps numbers as float64; whole numbers beyond this become text."""


def facts(run: RunInfo) -> Summary.Value:
    """TEXT: the run's identity, tags and configuration as a table, and what the keys mean."""
    rows = {
        "run": run.name,
        "id": run.id,
        "tags": ", ".join(run.tags),
        "tokrate": f"{version('tokrate')} (schema {SCHEMA_VERSION})",
        **flat(run.config or {}),
    }
    table = [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items()]
    text = "\n".join(["| | |", "|-|-|", *table, "", explained(run.prefix)])
    return _value("run/text_summary", "text", tensor=_text(text.encode(errors="replace"), dims=[1]))


def layout(prefix: str) -> Summary.Value:
    """CUSTOM SCALARS: what explains each other is in one chart, with all runs in it."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import (
        Category,
        Chart,
        Layout,
        MultilineChartContent,
    )

    charts = [
        Chart(title=title, multiline=MultilineChartContent(tag=[f"^{prefix}/{n}$" for n in names]))
        for title, names in CHARTS.items()
    ]
    content = Layout(category=[Category(title=prefix, chart=charts)]).SerializeToString()
    return _value("custom_scalars__config__", "custom_scalars", tensor=_text(content, dims=[]))


def row(run: RunInfo) -> list[Summary.Value]:
    """HPARAMS: the run's row, in its own event file, so that no sub-run appears.

    TensorBoard takes the columns from the first run that declares some. Without that it would
    show the first five metrics by the alphabet, and the steady values at a click each.
    """
    from tensorboard.plugins.hparams import api_pb2 as api
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    metrics = [
        api.MetricInfo(name=api.MetricName(tag=f"{run.prefix}/{name}")) for name in ROW_METRICS
    ]
    columns = api.Experiment(name=run.prefix, time_created_secs=time.time(), metric_infos=metrics)
    start = SessionStartInfo(start_time_secs=time.time())
    for key, leaf in {**flat(run.config or {}), "tokrate": version("tokrate")}.items():
        if isinstance(leaf, bool):
            start.hparams[key].bool_value, kind = leaf, api.DATA_TYPE_BOOL
        elif isinstance(leaf, (int, float)) and abs(leaf) <= LARGEST_EXACT:
            start.hparams[key].number_value, kind = leaf, api.DATA_TYPE_FLOAT64
        else:
            start.hparams[key].string_value, kind = _as_text(leaf), api.DATA_TYPE_STRING
        columns.hparam_infos.add(name=key, type=kind)
    return [
        _hparams("experiment", HParamsPluginData(experiment=columns)),
        _hparams("session_start_info", HParamsPluginData(session_start_info=start)),
    ]


def row_end() -> Summary.Value:
    """HPARAMS: the run finished.

    TensorBoard keeps the first word that it is given: a session that failed, and may be resumed,
    gives none.
    """
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    end = SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams("session_end_info", HParamsPluginData(session_end_info=end))


def _hparams(what: str, data: HParamsPluginData) -> Summary.Value:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_FLOAT

    empty = TensorShapeProto(dim=[TensorShapeProto.Dim(size=0)])
    tensor = TensorProto(dtype=DT_FLOAT, tensor_shape=empty)
    return _value(f"_hparams_/{what}", "hparams", data.SerializeToString(), tensor=tensor)


def _value(tag: str, plugin: str, content: bytes = b"", *, tensor: TensorProto) -> Summary.Value:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    plugin_data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    metadata = SummaryMetadata(plugin_data=plugin_data)
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _text(content: bytes, dims: Sequence[int]) -> TensorProto:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in dims])
    return TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=shape)


def _cell(value: Any) -> str:
    return _as_text(value).replace("|", "\\|").replace("\n", " ")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
