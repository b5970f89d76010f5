"""Programs that use tilewise. Run as modules (``python -m examples.gpt.context``), they wait for each other's threads politely.

OpenMP reads its settings once, when torch loads it, so this package sets them before its programs import torch.
"""

import os

# Threads that wait at a barrier of torch's small operations spin for a long time by default: beside other busy processes
# they then take the core that the last thread of the barrier needs (docs/shared_machines.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
