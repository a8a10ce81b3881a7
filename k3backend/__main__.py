"""``python -m k3backend`` and the ``k3backend`` console script."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from k3backend.cli.commands import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: the words after the program's name; None takes the process's own.
    Returns:
        0 done, 1 the answer is "no", 2 bad usage or bad input.
    """
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
