"""``python -m sglang_histate.cli`` is the same as ``histate``."""

import sys

from sglang_histate.cli import main

sys.exit(main())
