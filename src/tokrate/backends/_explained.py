"""What a run's page says of its numbers, in Markdown, the same in every tracker."""

from __future__ import annotations


def explained(prefix: str) -> str:
    """What the keys mean and what holds between them.

    Args:
        prefix: What stands before the slash in the keys.
    """
    return (
        f"`{prefix}/active_tps` counts the tokens that enter the loss, `{prefix}/raw_tps` every "
        "slot that is computed. What lies between them is padding and masking, so in every record\n"
        "\n"
        "    active_tps = raw_tps * (1 - padded_frac - masked_frac)\n"
        "\n"
        f"`{prefix}/steady_*` are values of the whole run, written when it ends: the median over "
        "its windows by time, without the warm-up. Sort runs by them."
    )
