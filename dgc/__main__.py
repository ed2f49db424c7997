"""The ``dgc`` command, also as ``python -m dgc``. What it needs beyond torch comes with ``pip install 'dgc[cli]'``."""

from __future__ import annotations

import sys

EXTRA = ("typer", "rich", "matplotlib")


def main() -> None:
    try:
        from dgc.cli import run
        status = run()
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        print(f"dgc: the command line needs {error.name}: pip install 'dgc[cli]'", file=sys.stderr)
        status = 1
    raise SystemExit(status)


if __name__ == "__main__":
    main()
