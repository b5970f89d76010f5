"""`python -m tilewise` is the command `tilewise`, for where the folder of scripts is not on the path."""

import sys

from tilewise.cli import main

sys.exit(main())
