"""The reader of W&B's offline files, which is that of a benchmark."""

import sys

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from wandb_charts import panels, records

__all__ = ["panels", "records"]
