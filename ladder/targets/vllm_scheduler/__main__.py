"""`python -m kvcore.ladder.targets.vllm_scheduler`; see `command`."""

import sys

from kvcore.ladder.targets.vllm_scheduler.command import main

if __name__ == "__main__":
    sys.exit(main())
