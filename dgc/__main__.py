"""The ``dgc`` command, also as ``python -m dgc``.

What it needs beyond torch comes with ``pip install 'dgc[cli]'``, for ``dgc tune`` with ``pip install 'dgc[tune]'``.
"""

from __future__ import annotations

import sys

EXTRA = ("typer", "rich", "matplotlib")


def main() -> None:
    try:
        from dgc.cli import run
        status = run()
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in (*EXTRA, "optuna"):
            raise
        told = str(error) if package == "optuna" else f"the command line needs {package}: pip install 'dgc[cli]'"
        print(f"dgc: {told}", file=sys.stderr)
        status = 1
    raise SystemExit(status)


if __name__ == "__main__":
    main()
