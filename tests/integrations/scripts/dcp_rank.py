"""A state dict that two ranks hold in shards, saved by plain DCP into the folder `DCP_FOLDER`."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(35.0).reshape(5, 7)
model = {
    "rows": distribute_tensor(whole, mesh, [Shard(0)]),
    "columns": distribute_tensor(whole.to(torch.bfloat16), mesh, [Shard(1)]),
    "all": distribute_tensor(whole.long(), mesh, [Replicate()]),
}
dcp.save({"model": model, "step": torch.tensor(3)}, checkpoint_id=os.environ["DCP_FOLDER"])
dist.destroy_process_group()
