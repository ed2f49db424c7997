"""The ``dgc`` command, also as ``python -m dgc``.

What it needs beyond torch are the extras ``cli`` and, for ``dgc tune``, ``tune``. A missing one is
told with the line that installs it, and by its own name: the package index knows another ``dgc``.
"""

from __future__ import annotations

import sys

EXTRAS = ("typer", "rich", "matplotlib", "optuna")


def main() -> None:
    try:
        from dgc.cli import run

        status = run()
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(
            f"dgc: {'tune' if package == 'optuna' else 'the command line'} needs {package}: pip install {package}",
            file=sys.stderr,
        )
        status = 1
    raise SystemExit(status)


if __name__ == "__main__":
    main()
