"""`python -m kvpool_sidecar`."""

import sys

from kvpool_sidecar.cli import main

sys.exit(main())
