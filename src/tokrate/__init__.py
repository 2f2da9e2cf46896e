"""How fast you really train: one honest tokens-per-second record for every tracker."""

from tokrate.collate import CountingCollator
from tokrate.counting import TokenCounts, count_tokens
from tokrate.errors import TokrateError
from tokrate.logger import Logger, LoggerStats
from tokrate.meter import ThroughputMeter
from tokrate.opening import open_logger
from tokrate.ranks import RankLayout
from tokrate.record import ThroughputRecord
from tokrate.run import Outcome, RunInfo
from tokrate.watching import ModelWatch, watch_model

__version__ = "0.1.0"
__all__ = [
    "CountingCollator",
    "Logger",
    "LoggerStats",
    "ModelWatch",
    "Outcome",
    "RankLayout",
    "RunInfo",
    "ThroughputMeter",
    "ThroughputRecord",
    "TokenCounts",
    "TokrateError",
    "count_tokens",
    "open_logger",
    "watch_model",
]
