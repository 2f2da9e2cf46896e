"""One write to a file that keeps Python's lock (the GIL).

`os.write` lets the lock go. A thread that waits for it, such as a delivery thread, then has it for
up to 5 ms, and the loop waits to come back: that was the 99th percentile of `Logger.log`. The line
itself is with the system within microseconds, before the lock could have changed hands.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

Write = Callable[[int, bytes], int]
"""Takes a file's number and bytes, returns how many were written, raises OSError; as `os.write`."""


def keeping_write() -> Write:
    """An `os.write` that keeps the lock; `os.write` itself where C's cannot be called."""
    try:
        import ctypes  # not at import: `import tokrate` stays light

        write = ctypes.PyDLL(None, use_errno=True).write
        write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        write.restype = ctypes.c_ssize_t
    except (ImportError, OSError, AttributeError, TypeError):  # no ctypes, or not POSIX
        return os.write

    def keep_and_write(file: int, data: bytes) -> int:
        while (written := write(file, data, len(data))) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:  # a signal came: its handler runs, and the write again
                raise OSError(number, os.strerror(number))
        return int(written)

    return keep_and_write
