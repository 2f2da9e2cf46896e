"""Runs torchtitan's own `train` on the CPU: it asks torch for an accelerator, and is given the CPU.

What is put in its place, and nothing else: torch says that the CPU is the device; `torch.cpu` gets
the seven functions that torchtitan asks of a device's module and a CPU lacks; and attention is
torchtitan's own over `scaled_dot_product_attention`, since flex attention has no backward on CPUs.
"""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import torch


def stand_in() -> None:
    """Put the CPU in an accelerator's place; before anything of torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "CPU"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**30, name="CPU")
    cpu.get_device_capability = lambda *_: (0, 0)
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None

    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()


if __name__ == "__main__":
    stand_in()
    runpy.run_module("torchtitan.train", run_name="__main__")
