"""`python -m framework`: see `framework.cli`."""

import sys

from framework.cli import main
from framework.leaving import leave
from framework.rank_env import external_rank

if __name__ == "__main__":
    code = main()
    if external_rank() is not None:  # this process was a rank itself
        leave(code)
    sys.exit(code)
