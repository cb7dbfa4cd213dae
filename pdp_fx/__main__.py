"""``python -m pdp_fx``."""

import sys

from pdp_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
