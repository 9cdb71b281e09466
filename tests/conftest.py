"""Property tests draw the same examples in every run, so that a run tells about the change and not about its luck.

`pytest --hypothesis-profile=free` draws others each time (`--hypothesis-seed=N` repeats one such run): for looking for what the
fixed examples miss, overnight or after a change of an engine, a cost or a schedule.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("free", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("fixed")
