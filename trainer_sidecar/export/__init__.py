"""A committed checkpoint as files of other programs: a model that has been trained must not be tied to us.

Everything is streamed slice by slice from the store, proven by hash leaves on the way, and appears under its name only
when it is whole. Without torch, but for the format of torch.distributed.checkpoint.
"""
