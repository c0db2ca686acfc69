"""Lets torchtitan train on CPUs, which it does not offer: imported before anything else of it.

It chooses CUDA where no accelerator is; its attention (FlexAttention) has no backward pass on CPUs, and its way of not
dividing gradients needs NCCL. So: a device module that answers for the host, PyTorch's causal attention, and gradients
that are summed. Nothing of the trainer, its components or its checkpoints is changed.
"""

import types

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class Host:
    """What torchtitan asks of `torch.cuda`."""

    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = synchronize = staticmethod(lambda *_: None)
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)
    memory_stats = staticmethod(lambda _: {})
    get_device_name = staticmethod(lambda _: "A100")
    get_device_properties = staticmethod(lambda _: types.SimpleNamespace(total_memory=1 << 30))


utils.device_type, utils.device_module = "cpu", Host
utils.get_local_device = lambda: torch.device("cpu")
utils.get_peak_flops = lambda _: 1e12  # it would start lspci

from torchtitan.models.common import attention, config_utils  # noqa: E402

config_utils.get_attention_config = lambda _: attention.ScaledDotProductAttention.Config()

divide = FSDPModule.set_gradient_divide_factor


def summed(module, factor):
    module.set_force_sum_reduction_for_comms(True)
    divide(module, factor)


FSDPModule.set_gradient_divide_factor = summed
