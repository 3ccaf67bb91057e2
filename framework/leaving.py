"""How a process that has used torch ends: with everything that Python promises, but without taking torch apart.

Threads of torch may still let go of Python objects then, and Python ends a thread that comes for its lock while the
interpreter is taken apart; in C++ that is `terminate called without an active exception`: SIGABRT after the work is
done, once in some hundred runs of DDP. It also takes up to a second, which serves nobody.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process: wait for threads that aren't daemons, call what `atexit` knows, write out what was printed."""
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls at its end
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # nobody reads any more: what Python exits with then
        code = code or 120
    os._exit(code)
