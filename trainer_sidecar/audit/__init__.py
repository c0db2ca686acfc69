"""Proofs about a run from two sources that know nothing of each other: the journal and the ranks' ledgers.

The journal says which steps survive (`history`), the ledgers say what every rank really consumed and saw (`ledger`);
`samples`, `losses` and `continuity` hold the one against the other. Nothing here reads a plan, and nothing here is
used by the parts that are audited. No torch.
"""
