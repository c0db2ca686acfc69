"""Weights from elsewhere as the first checkpoint of a run: the way in, as `export` is the way out.

Files are stored as they are, byte for byte; only where tensors lie in them is written down. So nothing is converted, no
model is ever in memory, and a digest of a stored file is the one that its maker has published.
"""
