"""`python -m kvpool_operator`."""

import sys

from kvpool_operator.cli import main

sys.exit(main())
