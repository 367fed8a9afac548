"""`python -m l2l` is the command line."""

import sys

from l2l.cli import main

sys.exit(main())
