"""The training side: the contract, the stores, the checkpoint sidecar and the library that lives in the ranks.

`contract` holds the models that all parts share, `store` the object stores, `sidecar` the process that uploads,
commits and restores, `train` and `dcp` the code inside the ranks: only these two may import torch.
"""

__version__ = "0.1.0"
"""Of the whole project: packages, chart and images carry this one (`tests/release`)."""
