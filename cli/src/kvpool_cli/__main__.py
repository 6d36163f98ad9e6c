"""`python -m kvpool_cli`."""

import sys

from kvpool_cli.main import main

sys.exit(main())
