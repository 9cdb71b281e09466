"""Property tests draw the same examples in every run, so that a run tells about the change and not about its luck.

`pytest --hypothesis-profile=free` draws others each time (`--hypothesis-seed=N` repeats one such run): for looking for what the
fixed examples miss, overnight or after a change of an engine, a cost or a schedule.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network for a model

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch that computes on all of them in each waits for its own threads most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("free", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("fixed")
