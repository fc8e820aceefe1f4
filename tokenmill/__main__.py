"""`python -m tokenmill` is the `tokenmill` command."""

import sys

from tokenmill.cli.main import main

sys.exit(main())
