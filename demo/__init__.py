"""The main job on real input: `python -m demo`."""

import os

# Before numpy is imported anywhere: with one thread the sums, and so the bits, do not depend on how
# many processors there are, and nobody spins for a second one that a busy machine does not give.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
