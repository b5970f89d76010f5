"""`python -m tilewise.cli` is `tilewise`."""

import sys

from tilewise.cli import main

sys.exit(main())
