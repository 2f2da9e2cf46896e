"""Adapters to the trackers, one module each: `base` is the seam, `registry` finds them by name."""
