"""`python -m laneformer_jax` is `laneformer`."""

import sys

from laneformer_jax.cli import main

sys.exit(main())
