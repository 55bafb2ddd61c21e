"""What every test shares: small thread pools, and shapes in signatures that are checked."""

import os

# Before torch or Ray start their pools: test processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import hypothesis
from jaxtyping import install_import_hook

# In the test run alone, jaxtyping shapes and dtypes in the torch parts are checked at every call.
install_import_hook(["eyas.pipeline", "eyas.train", "eyas.evaluate"], "beartype.beartype")

# Machines under load are slow, not wrong; a failing example is printed so that it can become a plain test.
hypothesis.settings.register_profile("eyas", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("eyas")
