"""Where the `kvcore` command and `python -m kvcore` begin.

Loading `kvcore.cli` takes most of the time that a short command takes, so an interrupt usually comes while it is being
loaded; there is nobody inside it yet to say so in one line. Nothing but `sys` may be imported above.
"""

import sys


def main() -> int:
    """Run the command line. Returns the exit status."""
    try:
        from kvcore.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("kvcore: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
